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

import queue
import random
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import click
from openai import APIError, OpenAI

from harness import MB, bundle_option, process_memory, table_header, table_row

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


@dataclass
class Observations:
    """Seconds to the first text and per token after it, and the outcome of each request."""

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    num_tokens: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


@contextmanager
def running_server(bundle: str | None, slots: int) -> Iterator[tuple[OpenAI, int]]:
    """Run a server in a process; yield a client and the process id."""
    command = [sys.executable, "-m", "specedge", "serve", "--port", "0", "--slots", str(slots)]
    command += ["--queue", "1000", *([] if bundle is None else ["--bundle", bundle])]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            match = re.search(r"http://\S+", process.stderr.readline() if process.stderr else "")
            if match is None:
                raise click.ClickException("the server did not start")
            url = match[0].rstrip("/")
            url = url if url.endswith("/v1") else f"{url}/v1"
            yield OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600), process.pid
        finally:
            process.terminate()


def request_options(index: int) -> tuple[str, dict[str, Any]]:
    """Return the prompt and the pipeline's options of a request."""
    rng = random.Random(index)
    options: dict[str, Any] = {"max_new_tokens": rng.choice(LENGTHS), "ignore_eos": True}
    prompt = f"{rng.choice(TEXTS)}  # {rng.randrange(40)}"
    if rng.random() < 0.5:
        return prompt, options | {"temperature": 0.8, "seed": index, "num_draft_tokens": 3}
    return prompt, options | {"temperature": 0.0}


def send_request(
    client: OpenAI, model: str, index: int, expected: str, observations: Observations
) -> None:
    """Stream one request and record its times and outcome."""
    prompt, options = request_options(index)
    length = options["max_new_tokens"]
    body = {name: options[name] for name in ("temperature", "seed") if name in options}
    extra = {"ignore_eos": True}
    if "num_draft_tokens" in options:
        extra["speculative"] = {"num_draft_tokens": options["num_draft_tokens"]}
    start, first, text = time.perf_counter(), 0.0, ""
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=length, stream=True, extra_body=extra, **body
    )
    for chunk in stream:
        first = first or time.perf_counter()
        text += chunk.choices[0].text
        if index % 20 == DISCONNECTED:
            stream.close()
            observations.outcomes["disconnected"] += 1
            return
    observations.outcomes["equal" if text == expected else "DIFFERENT"] += 1
    observations.first.append(first - start)
    observations.per_token.append((time.perf_counter() - first) / length)
    observations.num_tokens += length


def time_completion(client: OpenAI, model: str, prompt_tokens: int, length: int) -> float:
    """Return the seconds of a streamed completion of random tokens."""
    prompt = [random.randrange(300, 400) for _ in range(prompt_tokens)]
    extra = {"ignore_eos": True, "speculative": {"off": True}}
    start = time.perf_counter()
    for _ in client.completions.create(
        model=model, prompt=prompt, max_tokens=length, temperature=0, stream=True, extra_body=extra
    ):
        pass
    return time.perf_counter() - start


def compare_streams(bundle: str | None, long_prompt: int, repeats: int = 3) -> None:
    """Print the median times of streams alone and during the prefill of a long prompt."""
    click.echo(table_header("tokens of the stream", "alone", "beside", "ratio"))
    with running_server(bundle, 4) as (client, _):
        model = client.models.list().data[0].id
        time_completion(client, model, 20, 20)
        for length in (20, 64, 128):
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats):
                times[0].append(time_completion(client, model, 20, length))
                request = (client, model, long_prompt, 1)
                thread = threading.Thread(target=time_completion, args=request)
                thread.start()
                time.sleep(0.05)  # the long prompt comes first
                times[1].append(time_completion(client, model, 20, length))
                thread.join()
            alone, beside = map(median, times)
            cells = (f"{alone:.2f} s", f"{beside:.2f} s", f"{beside / alone:.2f}")
            click.echo(table_row(length, *cells))


@contextmanager
def running_command(command: str, slots: int) -> Iterator[OpenAI]:
    """Run a server's command; yield a client once it answers."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = shlex.split(command.format(slots=slots, port=port))
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
    with subprocess.Popen(arguments, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                try:
                    client.completions.create(model="default", prompt="x", max_tokens=1)
                    break
                except APIError:
                    time.sleep(0.2)
            else:
                raise click.ClickException(f"the server ended: {command}")
            yield client
        finally:
            process.terminate()


def time_clients(client: OpenAI, num_clients: int, length: int, plain: bool) -> float:
    """Return the tokens per second of clients that each stream a greedy completion."""
    extra: dict[str, Any] = {"ignore_eos": True}
    extra |= {"speculative": {"off": True}} if plain else {}

    def stream(index: int) -> None:
        for _ in client.completions.create(
            model="default",
            prompt=PROSE[index % len(PROSE)],
            max_tokens=length,
            temperature=0,
            stream=True,
            extra_body=extra,
        ):
            pass

    start = time.perf_counter()
    threads = [threading.Thread(target=stream, args=(i,)) for i in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_clients * length / (time.perf_counter() - start)


def compare_servers(servers: dict[str, str], length: int, repeats: int, plain: bool) -> None:
    """Print the throughput of servers by number of clients, measured in turn."""
    click.echo(table_header("clients", *(f"{name}, tokens/s" for name in servers)))
    for num_clients in (1, 2, 4, 8):
        with ExitStack() as stack:
            clients = {
                name: stack.enter_context(running_command(command, num_clients))
                for name, command in servers.items()
            }
            speeds: dict[str, list[float]] = {name: [] for name in servers}
            for repeat in range(repeats + 1):
                for name, client in clients.items():
                    speed = time_clients(client, num_clients, length, plain)
                    if repeat:  # the first one is a warm-up
                        speeds[name].append(speed)
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
    """Send all requests from concurrent clients, for each number of slots."""
    import specedge

    if servers:
        named = dict(server.split("=", 1) for server in servers)
        compare_servers(named, tokens, repeats, plain)
        return
    if long_prompt is not None:
        compare_streams(bundle, long_prompt)
        return

    pipeline, expected = specedge.load(bundle), []
    for index in range(count):
        prompt, options = request_options(index)
        expected.append(pipeline.generate(prompt, **options).text)
    columns = ("first text, p50, p95", "per token, p50, p95", "tokens/s", "memory", "texts")
    click.echo(table_header("slots", *columns))
    for slots in all_slots:
        observations, indexes = Observations(), queue.SimpleQueue[int]()
        for index in range(count):
            indexes.put(index)
        with running_server(bundle, slots) as (client, pid):
            model = client.models.list().data[0].id

            def work(
                client: OpenAI = client,
                model: str = model,
                indexes: queue.SimpleQueue[int] = indexes,
                observations: Observations = observations,
            ) -> None:
                while True:
                    try:
                        index = indexes.get_nowait()
                    except queue.Empty:
                        return
                    send_request(client, model, index, expected[index], observations)

            start = time.perf_counter()
            threads = [threading.Thread(target=work) for _ in range(num_clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds = time.perf_counter() - start
            memory = process_memory("VmHWM", pid)
        cells = [_percentiles(times) for times in (observations.first, observations.per_token)]
        outcomes = ", ".join(f"{n} {how}" for how, n in sorted(observations.outcomes.items()))
        speed = f"{observations.num_tokens / seconds:.0f}"
        click.echo(table_row(slots, *cells, speed, f"{memory / MB:.0f} MB", outcomes))


def _percentiles(seconds: list[float]) -> str:
    cuts = quantiles(seconds, n=20)
    return f"{1e3 * cuts[9]:.1f}, {1e3 * cuts[18]:.1f} ms"


if __name__ == "__main__":
    main()
