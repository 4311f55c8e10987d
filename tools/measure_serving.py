"""What `specedge serve` does under load, and what it adds to the pipeline's own time.

    python tools/measure_serving.py load [--bundle FOLDER] [--slots N]... [--requests N]
    python tools/measure_serving.py overhead [--bundle FOLDER]

`load`: clients in threads stream requests of mixed lengths, greedy and drawn with a seed. Of 20 one
goes away after its first text, and one is malformed. Each other text must be the one that the
pipeline gives alone. Prints a row of a table for each number of slots. `overhead`: one client, in
turn with the pipeline in this process, by the processor time of each. Development only.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import click
from openai import BadRequestError, OpenAI

LENGTHS = (4, 8, 16, 32, 64, 128)
TEXTS = ("def read_config(path):", "import json", "class Parser:", "for i in range(")
GONE, MALFORMED = 7, 13  # of 20 requests


@dataclass
class Seen:
    """What clients saw: seconds to the first text and a token after it, and what became of all."""

    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    tokens: int = 0
    ends: dict[str, int] = field(default_factory=dict)

    def ended(self, how: str) -> None:
        self.ends[how] = self.ends.get(how, 0) + 1


@contextmanager
def server(bundle: str | None, slots: int, *more: str) -> Iterator[tuple[OpenAI, Path]]:
    """A client of a server in a process of its own, and where the system tells its memory."""
    command = [sys.executable, "-m", "specedge", "serve", "--port", "0", "--slots", str(slots)]
    command += ["--queue", "1000"] + ([] if bundle is None else ["--bundle", bundle])
    command += more
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            found = re.search(r"http://\S+", process.stderr.readline() if process.stderr else "")
            assert found, "the server did not start"
            client = OpenAI(base_url=found[0], api_key="none", max_retries=0, timeout=600)
            yield client, Path(f"/proc/{process.pid}/statm")
        finally:
            process.terminate()


def request(index: int) -> dict[str, Any]:
    """The request of an index, for the pipeline."""
    rng = random.Random(index)
    options: dict[str, Any] = {"max_new_tokens": rng.choice(LENGTHS), "ignore_eos": True}
    options["prompt"] = f"{rng.choice(TEXTS)}  # {rng.randrange(40)}"
    if rng.random() < 0.5:
        return options | {"temperature": 0.8, "seed": index, "num_draft_tokens": 3}
    return options | {"temperature": 0.0}


def ask(client: OpenAI, model: str, index: int, wanted: dict[int, str], seen: Seen) -> None:
    ours = request(index)
    own = {"ignore_eos": True, "speculative": {"num_draft_tokens": ours.get("num_draft_tokens")}}
    theirs = {"model": model, "prompt": ours["prompt"], "max_tokens": ours["max_new_tokens"]}
    theirs |= {name: ours.get(name) for name in ("temperature", "seed")}
    if index % 20 == MALFORMED:
        try:
            client.completions.create(extra_body={"temprature": 1}, **theirs)
        except BadRequestError:
            seen.ended("refused")
        return
    begin = time.perf_counter()
    first, text = 0.0, ""
    stream = client.completions.create(stream=True, extra_body=own, **theirs)
    for chunk in stream:
        first = first or time.perf_counter()
        text += chunk.choices[0].text
        if index % 20 == GONE:
            stream.close()
            seen.ended("left")
            return
    end = time.perf_counter()
    seen.ended("right" if text == wanted[index] else "WRONG")
    seen.first.append(first - begin)
    seen.per_token.append((end - first) / ours["max_new_tokens"])
    seen.tokens += ours["max_new_tokens"]


@click.group()
def main() -> None:
    """Measure the server."""


@main.command()
@click.option("--bundle", default=None)
@click.option("--slots", "all_slots", multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--requests", "count", default=500, show_default=True)
@click.option("--clients", default=16, show_default=True)
def load(bundle: str | None, all_slots: tuple[int, ...], count: int, clients: int) -> None:
    """Let clients ask all requests of each number of slots."""
    import specedge

    pipeline = specedge.load(bundle)
    wanted = {}
    for index in range(count):
        options = request(index)
        wanted[index] = pipeline.generate(options.pop("prompt"), **options).text
    print("| slots | first text, p50 and p95 | a token, p50 and p95 | tokens/s | memory | texts |")
    print("|---|---|---|---|---|---|")
    for slots in all_slots:
        with server(bundle, slots) as (client, statm):
            print(_row(slots, *_loaded(client, statm, count, clients, wanted)), flush=True)


def _loaded(
    client: OpenAI, statm: Path, count: int, clients: int, wanted: dict[int, str]
) -> tuple[Seen, float, list[float]]:
    """What clients saw, in how many seconds, and the server's memory by quarters of the time."""
    model, seen = client.models.list().data[0].id, Seen()
    left, lock, memory = iter(range(count)), threading.Lock(), []

    def work() -> None:
        while True:
            with lock:
                index = next(left, None)
                if index is not None and index % max(1, count // 4) == 0:
                    memory.append(4096 * int(statm.read_text("utf-8").split()[1]) / 1e6)
            if index is None:
                return
            ask(client, model, index, wanted, seen)

    begin = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    memory.append(4096 * int(statm.read_text("utf-8").split()[1]) / 1e6)
    return seen, seconds, memory


def _row(slots: int, seen: Seen, seconds: float, memory: list[float]) -> str:
    def both(values: list[float]) -> str:
        cuts = quantiles(values, n=20)
        return f"{1e3 * cuts[9]:.1f} and {1e3 * cuts[18]:.1f} ms"

    ends = ", ".join(f"{number} {how}" for how, number in sorted(seen.ends.items()))
    cells = [str(slots), both(seen.first), both(seen.per_token), f"{seen.tokens / seconds:.0f}"]
    cells += [" ".join(f"{one:.0f}" for one in memory) + " MB", ends]
    return f"| {' | '.join(cells)} |"


@main.command()
@click.option("--bundle", default=None)
@click.option("--repeats", default=60, show_default=True)
@click.option("--length", default=64, show_default=True)
def overhead(bundle: str | None, repeats: int, length: int) -> None:
    """Ask the server and the pipeline the same; milliseconds of processor time a request, on one
    thread, which what else runs on the machine changes least.
    """
    import specedge

    pipeline = specedge.load(bundle, threads=1, share_threads=True)
    ours: dict[str, Any] = {"num_draft_tokens": 4, "ignore_eos": True}
    texts = [f"{TEXTS[i % len(TEXTS)]}  # {i}" for i in range(repeats)]
    with server(bundle, 1, "--threads", "1") as (client, statm):
        own = {"ignore_eos": True, "speculative": {"num_draft_tokens": 4}}
        given: dict[str, Any] = {
            "model": client.models.list().data[0].id,
            "max_tokens": length,
            "temperature": 0,
            "extra_body": own,
        }

        def streamed(text: str) -> None:
            list(client.completions.create(prompt=text, stream=True, **given))

        def spent() -> float:
            fields = statm.with_name("stat").read_text("utf-8").rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        ways: dict[str, tuple[Callable[[str], Any], Callable[[], float]]] = {
            "pipeline": (lambda text: pipeline.generate(text, length, **ours), time.process_time),
            "whole": (lambda text: client.completions.create(prompt=text, **given), spent),
            "streamed": (streamed, spent),
        }
        seconds = dict.fromkeys(ways, 0.0)
        for ask_it, _ in ways.values():
            ask_it(texts[0])  # binds buffers
        for text in texts:
            for name, (ask_it, clock) in ways.items():
                begin = clock()
                ask_it(text)
                seconds[name] += clock() - begin
    print(f"{length} tokens, milliseconds of processor time a request, mean of {repeats}:")
    for name, value in seconds.items():
        print(f"  {name:10}{1e3 * value / repeats:8.1f}")


if __name__ == "__main__":
    main()
