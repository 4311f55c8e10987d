"""Totals of a setting's runs over all prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median

from specedge.runtime.requests.stats import Stats

from .measure import TimedRun

_COUNTS = (
    *("num_new_tokens", "num_rounds", "num_drafted", "num_tested", "num_accepted"),
    *("num_draft_passes", "num_target_passes"),
)
_SECONDS = ("draft_seconds", "verify_seconds", "sampling_seconds")


def total_of(runs: Sequence[TimedRun]) -> Stats:
    """Return the sum over prompts of the median seconds and the counts of a run.

    The counts of a prompt's runs are equal. The time of resolving near-ties is part of the other
    seconds. Prefill, noise measurement and tokens by drafter are not included.
    """
    by_prompt: dict[int, list[Stats]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(run.stats)
    total = Stats()
    for alike in by_prompt.values():
        first = alike[0]
        sums = {name: getattr(total, name) + getattr(first, name) for name in _COUNTS}
        for name in _SECONDS:
            sums[name] = getattr(total, name) + median(getattr(each, name) for each in alike)
        other = median(each.other_seconds + each.exact_seconds for each in alike)
        total = Stats(
            **sums,
            other_seconds=total.other_seconds + other,
            tested_by_position=_added(total.tested_by_position, first.tested_by_position),
            accepted_by_position=_added(total.accepted_by_position, first.accepted_by_position),
        )
    return total


def _added(counts: Sequence[int], more: Sequence[int]) -> list[int]:
    return [first + other for first, other in zip_longest(counts, more, fillvalue=0)]


def host_seconds_a_round(stats: Stats) -> float:
    """Return seconds per round outside of the graphs."""
    return (stats.sampling_seconds + stats.other_seconds) / stats.num_rounds


def seconds_a_target_pass(stats: Stats) -> float:
    """Return seconds per pass of the target."""
    return stats.verify_seconds / stats.num_target_passes


def seconds_a_draft_pass(stats: Stats) -> float | None:
    """Return seconds per pass of the draft model; None without one."""
    return stats.draft_seconds / stats.num_draft_passes if stats.num_draft_passes else None


def overall_speedup(runs: Sequence[TimedRun]) -> float:
    """Return the ratio of total seconds, plain decoding to the runs, median of the repeats.

    Long texts have more weight, as in the formulas.
    """
    ours: dict[int, float] = defaultdict(float)
    plain: dict[int, float] = defaultdict(float)
    for run in runs:
        ours[run.repeat] += run.stats.decode_seconds
        plain[run.repeat] += run.stats.decode_seconds * run.speedup
    return median(plain[repeat] / ours[repeat] for repeat in ours)
