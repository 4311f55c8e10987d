"""Comparison of the measured times of rounds with those that a cost table predicts.

Only the ratio between drafters is judged: a busy machine slows all rounds down alike, which changes
no choice. Times are recorded during a request and judged after it; no choice depends on them.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from specedge.sampling_options import Sampling

from ..decoding.protocols import Plan, Round
from .cost_table import CostTable
from .planner import RoundChoice
from .plans import AutoPlan

MIN_ROUNDS = 16  # rounds of each compared drafter
MAX_RATIO = 1.25  # of two drafters' median ratios of measured to predicted time
MAX_LENGTH_RATIO = 4  # longest text to judge, relative to the longest timed cache


class RoundTimes:
    """Ratios of measured to predicted times of a request's rounds, by drafter."""

    def __init__(self, table: CostTable, greedy: bool) -> None:
        self.table = table
        self._greedy = greedy
        self._ratios: defaultdict[str, list[float]] = defaultdict(list)

    def record(self, choice: RoundChoice, round_: Round, length: int, seconds: float) -> None:
        """Record a round with `length` tokens of text, unless its costs were not measured.

        Those of catch-ups, shortened drafts and long texts are extrapolated.
        """
        is_long = length > MAX_LENGTH_RATIO * self.table.lengths[-1]
        if choice.catch_up_seconds or is_long or round_.num_drafted != choice.num_draft_tokens:
            return
        token = self.table.mode(self._greedy).token
        predicted = choice.seconds + token * len(round_.tokens)
        self._ratios[choice.drafter].append(seconds / predicted)

    @property
    def contradicts_table(self) -> bool:
        """True if the ratios of two drafters disagree."""
        medians = [median(ratios) for ratios in self._ratios.values() if len(ratios) >= MIN_ROUNDS]
        return len(medians) > 1 and max(medians) > MAX_RATIO * min(medians)


def create_round_times(plan: Plan, sampling: Sampling, has_logprobs: bool) -> RoundTimes | None:
    """Return the times of a request; None if its costs were not measured.

    Costs are measured without filters, modified logits and log-probabilities.
    """
    measured = Sampling(sampling.temperature, end_tokens=sampling.end_tokens)
    is_measured = sampling == measured and (sampling.constraint or sampling.noise) is None
    if not isinstance(plan, AutoPlan) or not is_measured or has_logprobs:
        return None
    return RoundTimes(plan.planner.table, sampling.greedy)
