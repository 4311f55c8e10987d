"""What a round, and a text of so many tokens, should cost by measured acceptance and costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

from specedge.runtime.planning.cost_table import RoundCosts


def text_rounds(
    chances: Sequence[float], rounds: Sequence[float], num_tokens: int, greedy: bool
) -> float:
    """What a text costs on average; `rounds[k]` is what a round of k draft tokens does, k = 0 to K.

    The i-th draft token of a round is accepted with `chances[i]` if those before it are. A round
    drafts no more than is still wanted, of greedy tokens one fewer; what the last one yields beyond
    that is lost: with short texts it counts. [K], [K + 1]
    """
    reached = [1.0, *accumulate(chances, mul), 0.0]
    cost = [0.0]
    for wanted in range(1, num_tokens + 1):
        k = min(len(rounds) - 1, wanted - 1 if greedy else wanted)
        rest = sum(
            (reached[n] - (reached[n + 1] if n < k else 0.0)) * cost[max(0, wanted - n - 1)]
            for n in range(k + 1)
        )
        cost.append(rounds[k] + rest)
    return cost[num_tokens]


def model_rounds(costs: RoundCosts, chances: Sequence[float]) -> list[float]:
    """Return the seconds of a draft model's rounds of 0 to K tokens, one for each of `chances`."""
    expected = [1.0, *(1 + total for total in accumulate(accumulate(chances, mul)))]
    return [costs.plain + costs.token] + [
        costs.passes[k] + costs.rounds[k] + costs.token * expected[k]
        for k in range(1, len(chances) + 1)
    ]


def predicted_speedup(
    chances: Sequence[float], texts: Iterable[tuple[int, RoundCosts]], greedy: bool
) -> float:
    """A draft model's over all texts together: of each how many tokens it has, and its costs."""
    plain = seconds = 0.0
    for num_tokens, costs in texts:
        plain += num_tokens * (costs.plain + costs.token)
        seconds += text_rounds(chances, model_rounds(costs, chances), num_tokens, greedy)
    return plain / seconds


def known_chances(
    by_position: Sequence[float | None], overall: float | None, num_draft_tokens: int
) -> list[float]:
    """The chance at each position; where none was tested, that of all together."""
    known = [*by_position, *[None] * num_draft_tokens][:num_draft_tokens]
    return [(overall or 0.0) if chance is None else chance for chance in known]
