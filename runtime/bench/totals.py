"""What runs of one setting took and did, all prompts together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..stats import Stats
from .measure import Run

PARTS = ("draft", "verify", "sampling", "rest")


@dataclass(frozen=True)
class Total:
    """Seconds by part and counts, each prompt once."""

    seconds: dict[str, float]
    counts: Counter[str]
    tested: Counter[int]
    accepted: Counter[int]

    @property
    def host(self) -> float:
        """Seconds of a round outside the graphs."""
        return (self.seconds["sampling"] + self.seconds["rest"]) / self.counts["rounds"]

    @property
    def verify(self) -> float:
        """Seconds of a pass of the target."""
        return self.seconds["verify"] / self.counts["target_passes"]

    @property
    def draft(self) -> float | None:
        """Seconds of a pass of the draft."""
        return ratio(self.seconds["draft"], self.counts["draft_passes"])

    @property
    def by_position(self) -> list[float | None]:
        """Accepted over tested draft tokens, for the first, second, ..."""
        return [ratio(self.accepted[i], self.tested[i]) for i in sorted(self.tested)]

    @property
    def overall(self) -> float | None:
        """Accepted over tested draft tokens."""
        return ratio(self.counts["accepted"], self.counts["tested"])


def total_of(runs: Sequence[Run]) -> Total:
    """Of each prompt the median seconds of its runs, and the counts of one: they are all alike."""
    by_prompt: dict[int, list[Stats]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(run.stats)
    seconds = dict.fromkeys(PARTS, 0.0)
    counts: Counter[str] = Counter()
    tested: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for alike in by_prompt.values():
        for part in PARTS:
            seconds[part] += median(_seconds(stats)[part] for stats in alike)
        one = alike[0]
        counts.update(
            tokens=one.num_new_tokens,
            rounds=one.num_rounds,
            drafted=one.num_drafted,
            tested=one.num_tested,
            accepted=one.num_accepted,
            draft_passes=one.num_draft_passes,
            target_passes=one.num_target_passes,
        )
        tested.update(dict(enumerate(one.tested_by_position)))
        accepted.update(dict(enumerate(one.accepted_by_position)))
    return Total(seconds, counts, tested, accepted)


def _seconds(stats: Stats) -> dict[str, float]:
    return {
        "draft": stats.draft_seconds,
        "verify": stats.verify_seconds,
        "sampling": stats.sampling_seconds,
        "rest": stats.other_seconds + stats.exact_seconds,
    }


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


def ratio(part: float, whole: float) -> float | None:
    """A quotient, None where there is none."""
    return part / whole if whole else None
