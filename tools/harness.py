"""Prompts, timings, confidence intervals and memory for the measurements.

Compared settings alternate, with the baseline before and after the others, so that drifting machine
speed does not favor one of them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np

from corpus import held_out_prompts
from specedge import Pipeline
from specedge.benchmarks.prompts import SETS as BENCH_SETS

SETS = ("noise", "code", "prose", "chat")
QUESTIONS = (
    "What is the difference between a virus and a bacterium?",
    "Write a short email to my landlord about the broken heating.",
    "Explain recursion to a ten-year-old.",
    "Give me five ideas for a cheap weekend trip with children.",
    "Summarize the plot of Romeo and Juliet in four sentences.",
    "How do I make a simple tomato soup?",
    "Write a Python function that returns the n-th Fibonacci number and explain it.",
    "List the planets of the solar system with one fact about each.",
    "What should I consider before I buy a used car?",
    "Translate 'Where is the train station?' into French, Spanish and German.",
)
PROSE = (
    "It was late in the autumn, and the rain had not stopped for a week. She looked out of the",
    "The history of the city began when the first settlers came over the mountains and",
    "Most people who keep bees will tell you that the hardest month is not January but",
    "In the years before the railway came, the valley had been",
)
MB = 1e6

bundle_option = click.option(
    "--bundle", help="Bundle to measure. [default: as for specedge generate]"
)
threads_option = click.option("--threads", type=int, help="Number of CPU threads.")


def prompt_tokens(pipeline: Pipeline, name: str, count: int) -> list[list[int]]:
    """Return up to `count` prompts of a set as token ids."""
    if name == "noise":
        rng, size = random.Random(0), pipeline.bundle.target.vocab_size
        return [[rng.randrange(size) for _ in range(96)] for _ in range(count)]
    if name == "chat":
        chats = [[{"role": "user", "content": text}] for text in QUESTIONS[:count]]
        return [pipeline.prompts.chat_tokens(chat, False) for chat in chats]
    if name == "code":
        return list(islice(held_out_prompts(pipeline.tokenizer), count))
    texts = (*BENCH_SETS["prose"], *PROSE)
    return [pipeline.tokenizer.encode(text).ids for text in texts[:count]]


def time_requests(
    pipeline: Pipeline, prompt: list[int], length: int, requests: Sequence[dict[str, Any]]
) -> list[float]:
    """Return the seconds per new token of requests with empty caches, one in each slot.

    Their rounds alternate, so that varying speed of the machine affects all of them alike.
    """
    pipeline.forget()
    seconds, streams = [0.0] * len(requests), []
    for i, options in enumerate(requests):
        start = time.perf_counter()
        streams.append(pipeline.stream(prompt, length, ignore_eos=True, **options))
        seconds[i] += time.perf_counter() - start
    running = list(range(len(streams)))
    while running:
        for i in tuple(running):
            start = time.perf_counter()
            if next(streams[i], None) is None:
                running.remove(i)
            seconds[i] += time.perf_counter() - start
    counts = [stream.stats.num_new_tokens for stream in streams]
    return [total / count for total, count in zip(seconds, counts, strict=True)]


def confidence_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the ratio of two sums and its 95% confidence interval, by bootstrap over the pairs."""

    def ratio(sample: Sequence[tuple[float, float]]) -> float:
        return sum(first for first, _ in sample) / sum(second for _, second in sample)

    rng = random.Random(0)
    ratios = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return ratio(pairs), ratios[50], ratios[-51]


def memory_bandwidth(threads: int, array_bytes: int = 200_000_000) -> float:
    """Return the memory bandwidth of a number of threads that sum arrays, in bytes per second."""
    arrays = [np.ones(array_bytes // 8) for _ in range(threads)]
    best = float("inf")
    for _ in range(10):
        workers = [threading.Thread(target=array.sum) for array in arrays]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - start)
    return threads * array_bytes / best


def process_memory(name: str, process: int | str = "self") -> int:
    """Return VmRSS, RssAnon or VmHWM (peak) of a process in bytes; Linux only."""
    lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def table_row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_header(*columns: str) -> str:
    """Return the first two lines of a Markdown table."""
    return f"{table_row(*columns)}\n{'|---' * len(columns)}|"
