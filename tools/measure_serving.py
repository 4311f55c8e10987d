"""Measure `specedge serve` under load.

    python tools/measure_serving.py [--bundle FOLDER] [--slots N]... [--requests N]

Clients in threads stream requests of mixed lengths, greedy and seeded. In every 20 requests one
client disconnects after its first text. Each other text must be the one that the pipeline generates
alone. Prints a row for each number of slots.
"""

from __future__ import annotations

import queue
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import click
from openai import OpenAI

from harness import MB, bundle_option, process_memory, table_header, table_row

LENGTHS = (4, 8, 16, 32, 64, 128)
TEXTS = ("def read_config(path):", "import json", "class Parser:", "for i in range(")
DISCONNECTED = 7  # of every 20 requests


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


@click.command()
@bundle_option
@click.option("--slots", "all_slots", multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--requests", "count", default=500, show_default=True)
@click.option("--clients", "num_clients", default=16, show_default=True)
def main(bundle: str | None, all_slots: tuple[int, ...], count: int, num_clients: int) -> None:
    """Send all requests from concurrent clients, for each number of slots."""
    import specedge

    pipeline, expected = specedge.load(bundle), []
    for index in range(count):
        prompt, options = request_options(index)
        expected.append(pipeline.generate(prompt, **options).text)
    columns = (
        "slots",
        "first text, p50, p95",
        "per token, p50, p95",
        "tokens/s",
        "memory",
        "texts",
    )
    click.echo(table_header(*columns))
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
