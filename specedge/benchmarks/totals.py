"""What runs of one setting took and did, all prompts together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from statistics import median

from specedge.runtime.requests.stats import Stats

from .measure import Run

_COUNTS = (
    *("num_new_tokens", "num_rounds", "num_drafted", "num_tested", "num_accepted"),
    *("num_draft_passes", "num_target_passes"),
)
_SECONDS = ("draft_seconds", "verify_seconds", "sampling_seconds")


def total_of(runs: Sequence[Run]) -> Stats:
    """Of each prompt the median seconds of its runs, and the counts of one: they are all alike.

    What deciding near-ties took is among the other seconds. Of reading prompts, of noise and of the
    tokens of each drafter it says nothing.
    """
    by_prompt: dict[int, list[Stats]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(run.stats)
    total = Stats()
    for alike in by_prompt.values():
        one = alike[0]
        sums = {name: getattr(total, name) + getattr(one, name) for name in _COUNTS}
        for name in _SECONDS:
            sums[name] = getattr(total, name) + median(getattr(each, name) for each in alike)
        other = median(each.other_seconds + each.exact_seconds for each in alike)
        total = Stats(
            **sums,
            other_seconds=total.other_seconds + other,
            tested_by_position=_added(total.tested_by_position, one.tested_by_position),
            accepted_by_position=_added(total.accepted_by_position, one.accepted_by_position),
        )
    return total


def _added(some: Sequence[int], more: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip_longest(some, more, fillvalue=0)]


def host_seconds_a_round(stats: Stats) -> float:
    """Outside the graphs; of totals with deciding near-ties."""
    return (stats.sampling_seconds + stats.other_seconds) / stats.num_rounds


def seconds_a_target_pass(stats: Stats) -> float:
    """Seconds of a pass of the target."""
    return stats.verify_seconds / stats.num_target_passes


def seconds_a_draft_pass(stats: Stats) -> float | None:
    """Seconds of a pass of the draft, None without one."""
    return stats.draft_seconds / stats.num_draft_passes if stats.num_draft_passes else None


def overall_speedup(runs: Sequence[Run]) -> float:
    """Seconds of plain decoding over those of the runs, all prompts together; of the repeats the
    median. What a formula predicts is this one: a text that takes long counts more.
    """
    ours: dict[int, float] = defaultdict(float)
    plain: dict[int, float] = defaultdict(float)
    for run in runs:
        ours[run.repeat] += run.stats.decode_seconds
        plain[run.repeat] += run.stats.decode_seconds * run.speedup
    return median(plain[repeat] / ours[repeat] for repeat in ours)
