"""Expected cost of rounds and texts for given acceptance rates and costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

from specedge.runtime.planning.cost_table import RoundCosts


def text_rounds(
    chances: Sequence[float], rounds: Sequence[float], num_tokens: int, greedy: bool
) -> float:
    """Return the expected cost of a text.

    The i-th draft token of a round is accepted with probability `chances[i]` if those before it
    are. A round drafts no more tokens than are still needed (one fewer for greedy decoding);
    surplus tokens of the last round are lost, which matters for short texts.

    Args:
        num_tokens: Number of tokens of the text.
        chances: Acceptance rates by position. [K]
        rounds: Cost of a round of k draft tokens, k = 0 to K. [K + 1]
        greedy: True for greedy decoding.
    """
    reached = [1.0, *accumulate(chances, mul), 0.0]
    cost = [0.0]
    for missing in range(1, num_tokens + 1):
        k = min(len(rounds) - 1, missing - 1 if greedy else missing)
        rest = sum(
            (reached[n] - (reached[n + 1] if n < k else 0.0)) * cost[max(0, missing - n - 1)]
            for n in range(k + 1)
        )
        cost.append(rounds[k] + rest)
    return cost[num_tokens]


def model_rounds(costs: RoundCosts, chances: Sequence[float]) -> list[float]:
    """Return the seconds of a draft model's rounds of 0 to K tokens."""
    expected = [1.0, *(1 + total for total in accumulate(accumulate(chances, mul)))]
    return [costs.plain + costs.token] + [
        costs.passes[k] + costs.rounds[k] + costs.token * expected[k]
        for k in range(1, len(chances) + 1)
    ]


def predicted_speedup(
    chances: Sequence[float], texts: Iterable[tuple[int, RoundCosts]], greedy: bool
) -> float:
    """Return the speed-up of a draft model over texts of given lengths and costs."""
    plain = seconds = 0.0
    for num_tokens, costs in texts:
        plain += num_tokens * (costs.plain + costs.token)
        seconds += text_rounds(chances, model_rounds(costs, chances), num_tokens, greedy)
    return plain / seconds


def known_chances(
    by_position: Sequence[float | None], overall: float | None, num_draft_tokens: int
) -> list[float]:
    """Return acceptance rates by position, with the overall rate where none was tested."""
    rates = [*by_position, *[None] * num_draft_tokens][:num_draft_tokens]
    return [(overall or 0.0) if chance is None else chance for chance in rates]
