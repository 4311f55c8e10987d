"""Measures what a loaded pair costs on this device, and how often its draft is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median
from typing import Protocol

from specedge.options import MAX_EXPORTED_DRAFT_TOKENS

from .costs import READ_LENGTH, CostTable, undisturbed
from .model import LanguageModel
from .pipeline import Pipeline
from .stream import Generation

ROWS = (1, 2, 3, 4, 5, 7, 9, 13, MAX_EXPORTED_DRAFT_TOKENS + 1)
SECONDS = 3.0  # for the passes, and as much for requests; slow models take longer
REPEATS = (5, 40)
BUSY = 1.5  # from so many times the least seconds of a pass on, others had the cores
NEW_TOKENS = (16, 64)
DRAFT_TOKENS = 4
TEXTS = (
    "def read_config(path):\n    ",
    "The history of the city began when",
    "import os\nimport sys\n\n\nclass Parser:\n    ",
    "1. First, preheat the oven. 2. Then",
)
MODES = {"greedy": 0.0, "sampled": 1.0}

Progress = Callable[[float], None]  # told which share of the work is done


class Measurable(LanguageModel, Protocol):
    """A model that can be told how many rows of its cache count, whatever they hold."""

    length: int


Pass = tuple[str, int, int]  # which model, tokens, tokens in the cache before them


@dataclass(frozen=True)
class Tuning:
    """A full table; `busy` if so much else ran that it is better measured again."""

    costs: CostTable
    busy: bool


def measure(pipeline: Pipeline, progress: Progress = lambda share: None) -> Tuning:
    """Time every pass and some requests. The pipeline's caches are overwritten."""
    lengths, rows = _places(pipeline)
    found = _time_passes(pipeline, lengths, rows, lambda share: progress(share / 2))
    seconds = {one: undisturbed(took) for one, took in found.items()}
    slowed = fmean(median(took) / seconds[one] for one, took in found.items())
    by_mode = _run_requests(pipeline, seconds["target", 1, lengths[0]], progress)
    costs = CostTable(
        origin="tune",
        lengths=lengths,
        rows=rows,
        target=tuple(_rising([seconds["target", t, at] for t in rows]) for at in lengths),
        draft=tuple(_rising([seconds["draft", t, at] for t in (1, 2)]) for at in lengths),
        reading=tuple(seconds["read", READ_LENGTH, at] / READ_LENGTH for at in lengths),
        host={mode: _host(plain, drafted) for mode, (plain, drafted) in by_mode.items()},
        acceptance={mode: _acceptance(drafted) for mode, (_, drafted) in by_mode.items()},
    )
    return Tuning(costs, slowed > BUSY)


def _places(pipeline: Pipeline) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cache lengths and the numbers of tokens to time, as many as fit."""
    models = pipeline.bundle.models.values()
    context = min(model.context_length for model in models)
    most = min(pipeline.max_planned_tokens + 1, max(2, context // 4))
    rows = tuple(t for t in ROWS if t <= most)
    last = max(0, context - max(rows[-1], READ_LENGTH))
    return tuple(sorted({min(32, last), last // 2, last})), rows


def _time_passes(
    pipeline: Pipeline, lengths: tuple[int, ...], rows: tuple[int, ...], progress: Progress
) -> dict[Pass, list[float]]:
    """Seconds of every pass; all take turns, so that a busy moment slows none alone."""
    models = {"target": pipeline.target, "draft": pipeline.draft, "read": pipeline.draft}
    kinds = [*product(("target",), rows), ("draft", 1), ("draft", 2), ("read", READ_LENGTH)]
    passes = [(role, tokens, length) for role, tokens in kinds for length in lengths]
    found: dict[Pass, list[float]] = {one: [] for one in passes}
    for sweep, share in _sweeps():
        for role, tokens, length in passes:
            took = _time(models[role], role == "read", tokens, length)
            if sweep:  # the first one warms up
                found[role, tokens, length].append(took)
        progress(share())
    for model in models.values():
        model.truncate(0)
    return found


def _sweeps() -> Iterator[tuple[int, Callable[[], float]]]:
    """Numbers of sweeps until their time is over, with the share of it that is."""
    least, most = REPEATS
    begin = time.perf_counter()

    def share() -> float:
        return min(1.0, (time.perf_counter() - begin) / SECONDS)

    for sweep in range(most + 1):
        if sweep > least and share() >= 1:
            return
        yield sweep, share


def _time(model: LanguageModel, reading: bool, tokens: int, length: int) -> float:
    measurable: Measurable = model  # type: ignore[assignment]
    measurable.length = length
    run = model.prefill if reading else model.forward
    begin = time.perf_counter()
    run([0] * tokens)
    return time.perf_counter() - begin


def _run_requests(
    pipeline: Pipeline, target_seconds: float, progress: Progress
) -> dict[str, tuple[list[Generation], list[Generation]]]:
    """Plain and speculative requests on built-in texts, by mode."""
    runs = len(TEXTS) * len(MODES) * 2
    least, most = NEW_TOKENS
    new_tokens = int(max(least, min(most, SECONDS / runs / target_seconds)))
    found: dict[str, tuple[list[Generation], list[Generation]]] = {m: ([], []) for m in MODES}
    for i, (text, mode, drafts) in enumerate(product(TEXTS, MODES, (0, 1))):
        one = pipeline.generate(
            text,
            new_tokens,
            MODES[mode],
            seed=i,
            num_draft_tokens=drafts * DRAFT_TOKENS,
            ignore_eos=True,
        )
        found[mode][drafts].append(one)
        progress(0.5 + (i + 1) / runs / 2)
    return found


def _host(plain: list[Generation], drafted: list[Generation]) -> tuple[float, float]:
    """The host's seconds of a round, and of each draft token beyond."""
    base, more = (undisturbed([*map(_host_seconds, some)]) for some in (plain, drafted))
    return base, max(0.0, more - base) / DRAFT_TOKENS


def _host_seconds(one: Generation) -> float:
    return (one.stats.sampling_seconds + one.stats.other_seconds) / one.stats.num_rounds


def _acceptance(drafted: list[Generation]) -> dict[str, float]:
    accepted = sum(one.stats.num_accepted for one in drafted)
    return {"model": accepted / max(1, sum(one.stats.num_tested for one in drafted))}


def _rising(seconds: list[float]) -> tuple[float, ...]:
    """A pass over fewer tokens takes no more time; where it seems to, it was disturbed."""
    return tuple(min(seconds[i:]) for i in range(len(seconds)))
