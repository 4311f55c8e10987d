"""Measure `specedge serve` under load.

    python tools/measure_serving.py [--bundle FOLDER] [--slots N]... [--requests N]
    python tools/measure_serving.py [--bundle FOLDER] --long-prompt TOKENS
    python tools/measure_serving.py --server NAME=COMMAND [--server NAME=COMMAND]... [--plain]

Concurrent clients stream greedy and seeded requests of mixed lengths. One of 20 clients disconnects
after its first text; every other text must be equal to that of a single request. Prints a row for
each number of slots. With `--long-prompt` it compares short streams alone with short streams during
the prefill of a prompt of that many tokens, with plain greedy decoding. With `--server` it compares
the throughput of OpenAI-compatible servers, whose commands have places for {slots} and {port}, with
1, 2, 4 and 8 clients in turn.
"""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import click
from openai import OpenAI

from harness import MB, bundle_option, process_memory, table_header, table_row
from server_process import running_server

LENGTHS = (4, 8, 16, 32, 64, 128)
TEXTS = ("def read_config(path):", "import json", "class Parser:", "for i in range(")
PROSE = (
    "The capital of France is",
    "Write a list of fruits:",
    "Once upon a time there was",
    "The weather in the mountains",
    "Hello, my name is",
    "A good way to learn a language is",
    "In the year 1492",
    "The best recipe for bread",
)
DISCONNECTED = 7  # index, modulo 20, of requests whose client disconnects
OFF = {"off": True}  # plain decoding


@dataclass(frozen=True)
class StreamedText:
    """Text of a stream, with the seconds to its first piece and to its end."""

    text: str
    first: float
    seconds: float


@contextmanager
def server_client(command: Sequence[object]) -> Iterator[tuple[OpenAI, int]]:
    """Run a server; yield a client and the process id."""
    with running_server(command, stderr=subprocess.DEVNULL) as (url, pid):
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600), pid


def specedge_command(bundle: str | None, slots: int) -> list[object]:
    """Return the command of `specedge serve`."""
    command = [sys.executable, "-m", "specedge", "serve", "--port", "{port}", "--slots", slots]
    return [*command, "--queue", 1000, *([] if bundle is None else ["--bundle", bundle])]


def stream(
    client: OpenAI,
    prompt: str | list[int],
    length: int,
    speculative: dict[str, Any] | None = None,
    is_disconnected: bool = False,
    temperature: float = 0.0,
    **options: Any,
) -> StreamedText:
    """Stream a completion of `length` tokens; disconnect after the first piece if told so."""
    extra: dict[str, Any] = {"ignore_eos": True}
    extra |= {"speculative": speculative} if speculative else {}
    start, first, text = time.perf_counter(), 0.0, ""
    pieces = client.completions.create(
        model="default", prompt=prompt, max_tokens=length, stream=True, extra_body=extra,
        temperature=temperature, **options,
    )  # fmt: skip
    for piece in pieces:
        first = first or time.perf_counter() - start
        text += piece.choices[0].text if piece.choices else ""
        if is_disconnected:
            pieces.close()
            break
    return StreamedText(text, first, time.perf_counter() - start)


def measure_load(
    bundle: str | None, all_slots: Sequence[int], count: int, num_clients: int
) -> None:
    """Print times and outcomes of requests of concurrent clients by number of slots."""
    import specedge

    requests, expected = [_request(index) for index in range(count)], []
    with specedge.load(bundle) as pipeline:
        for prompt, length, k, sampling in requests:
            options = {"num_draft_tokens": k} if k else {}
            expected.append(
                pipeline.generate(prompt, length, ignore_eos=True, **options, **sampling).text
            )
    columns = ("first text, p50, p95", "per token, p50, p95", "tokens/s", "memory", "texts")
    click.echo(table_header("slots", *columns))
    for slots in all_slots:
        with server_client(specedge_command(bundle, slots)) as (client, pid):

            def send(index: int, client: OpenAI = client) -> StreamedText:
                prompt, length, k, sampling = requests[index]
                speculative = {"num_draft_tokens": k} if k else None
                is_disconnected = index % 20 == DISCONNECTED
                return stream(client, prompt, length, speculative, is_disconnected, **sampling)

            start = time.perf_counter()
            with ThreadPoolExecutor(num_clients) as pool:
                results = list(pool.map(send, range(count)))
            seconds = time.perf_counter() - start
            memory = process_memory("VmHWM", pid)
        whole = [i for i in range(count) if i % 20 != DISCONNECTED]
        lengths = {i: requests[i][1] for i in whole}
        outcomes = Counter(
            "equal" if results[i].text == expected[i] else "DIFFERENT" for i in whole
        ) + Counter(disconnected=count - len(whole))
        times = (
            [results[i].first for i in whole],
            [(results[i].seconds - results[i].first) / lengths[i] for i in whole],
        )
        summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
        speed = f"{sum(lengths.values()) / seconds:.0f}"
        cells = (*map(_percentiles, times), speed, f"{memory / MB:.0f} MB", summary)
        click.echo(table_row(slots, *cells))


def _request(index: int) -> tuple[str, int, int, dict[str, Any]]:
    """Return the prompt, length, K (0: automatic) and sampling options of a request."""
    rng = random.Random(index)
    length = rng.choice(LENGTHS)
    prompt = f"{rng.choice(TEXTS)}  # {rng.randrange(40)}"
    if rng.random() < 0.5:
        return prompt, length, 3, {"temperature": 0.8, "seed": index}
    return prompt, length, 0, {"temperature": 0.0}


def _percentiles(seconds: list[float]) -> str:
    cuts = quantiles(seconds, n=20)
    return f"{1e3 * cuts[9]:.1f}, {1e3 * cuts[18]:.1f} ms"


def compare_streams(bundle: str | None, long_prompt: int, repeats: int = 3) -> None:
    """Print the median times of streams alone and during the prefill of a long prompt."""
    click.echo(table_header("tokens of the stream", "alone", "beside", "ratio"))

    def seconds(prompt_tokens: int, length: int) -> float:
        prompt = [random.randrange(300, 400) for _ in range(prompt_tokens)]
        return stream(client, prompt, length, OFF).seconds

    with (
        server_client(specedge_command(bundle, 4)) as (client, _),
        ThreadPoolExecutor(1) as pool,
    ):
        seconds(20, 20)
        for length in (20, 64, 128):
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats):
                times[0].append(seconds(20, length))
                other = pool.submit(seconds, long_prompt, 1)
                time.sleep(0.05)  # the long prompt comes first
                times[1].append(seconds(20, length))
                other.result()
            alone, beside = map(median, times)
            cells = (f"{alone:.2f} s", f"{beside:.2f} s", f"{beside / alone:.2f}")
            click.echo(table_row(length, *cells))


def compare_servers(servers: dict[str, str], length: int, repeats: int, plain: bool) -> None:
    """Print the throughput of servers by number of clients, measured in turn."""
    click.echo(table_header("clients", *(f"{name}, tokens/s" for name in servers)))
    for num_clients in (1, 2, 4, 8):
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(num_clients))
            commands = {
                name: shlex.split(command.replace("{slots}", str(num_clients)))
                for name, command in servers.items()
            }
            clients = {
                name: stack.enter_context(server_client(command))[0]
                for name, command in commands.items()
            }
            speeds: dict[str, list[float]] = {name: [] for name in servers}
            for repeat in range(repeats + 1):
                for name, client in clients.items():
                    start = time.perf_counter()
                    prompts = (PROSE[i % len(PROSE)] for i in range(num_clients))
                    streams = [
                        pool.submit(stream, client, prompt, length, OFF if plain else None)
                        for prompt in prompts
                    ]
                    for running in streams:
                        running.result()
                    if repeat:  # the first one is a warm-up
                        elapsed = time.perf_counter() - start
                        speeds[name].append(num_clients * length / elapsed)
        cells = [f"{median(values):.1f} ({max(values):.1f})" for values in speeds.values()]
        click.echo(table_row(num_clients, *cells))


@click.command()
@bundle_option
@click.option("--slots", "all_slots", multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--requests", "count", default=500, show_default=True)
@click.option("--clients", "num_clients", default=16, show_default=True)
@click.option("--long-prompt", type=int, help="Time short streams during a prompt of this length.")
@click.option("--server", "servers", multiple=True, help="NAME=COMMAND of a server to compare.")
@click.option("--tokens", default=64, show_default=True, help="Tokens per client, with --server.")
@click.option("--repeats", default=5, show_default=True, help="Repetitions, with --server.")
@click.option("--plain", is_flag=True, help="Do not draft, with --server.")
def main(
    bundle: str | None,
    all_slots: tuple[int, ...],
    count: int,
    num_clients: int,
    long_prompt: int | None,
    servers: tuple[str, ...],
    tokens: int,
    repeats: int,
    plain: bool,
) -> None:
    """Measure servers under load."""
    try:
        if servers:
            named = dict(server.split("=", 1) for server in servers)
            compare_servers(named, tokens, repeats, plain)
        elif long_prompt is not None:
            compare_streams(bundle, long_prompt)
        else:
            measure_load(bundle, all_slots, count, num_clients)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
