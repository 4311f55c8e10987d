"""Fastest number of CPU threads: small models lose by many threads."""

from __future__ import annotations

import os
from statistics import median

from specedge.bundle import Bundle, store
from specedge.cpu_count import cpu_count
from specedge.runtime.backend.sessions import has_pool
from specedge.runtime.requests import loader
from specedge.runtime.requests.pipeline import Pipeline

from .tune import TEXTS

LARGE = 300_000_000  # bytes of weights, whose reading takes all cores anywhere
REPEATS = 5
NEW_TOKENS = 48
K = (0, 4)
GAIN = 0.97  # of the time of one thread a core, from which on fewer are taken


def fastest(bundle: str | os.PathLike[str] | None, ops: str) -> int | None:
    """Return the fastest of one thread per core, half as many, and so on.

    Each number has its own sessions, and each text is run with all of them in turn.

    Returns:
        None if one thread per core is the fastest.
    """
    manifest = Bundle.read(store.find_bundle(bundle))
    counts, cores = [], cpu_count()
    while cores:
        counts.append(cores)
        cores //= 2
    size = sum(
        manifest.files[weights].size for weights in {m.weights for m in manifest.models.values()}
    )
    if len(counts) == 1 or size > LARGE or has_pool():
        return None
    pipelines = {n: loader.load(bundle, threads=n, ops=ops) for n in counts}
    seconds: dict[tuple[int, int], list[float]] = {(n, k): [] for n in counts for k in K}
    for i in range(REPEATS):
        for n in counts[:: -1 if i % 2 else 1]:
            for k in K:
                seconds[n, k].append(_seconds(pipelines[n], TEXTS[i % len(TEXTS)], k))
    times = {n: min(median(seconds[n, k]) for k in K) for n in counts}
    best = min(times, key=lambda n: times[n])
    return best if times[best] < GAIN * times[counts[0]] else None


def _seconds(pipeline: Pipeline, text: str, k: int) -> float:
    """Return seconds per token, prefill included."""
    pipeline.forget()
    stats = pipeline.generate(text, NEW_TOKENS, num_draft_tokens=k, ignore_eos=True).stats
    return (stats.prefill_seconds + stats.decode_seconds) / stats.num_new_tokens
