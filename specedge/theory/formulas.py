"""Expected tokens, cost and speed-up of speculative decoding.

alpha is the mean acceptance rate, the probability that a tested draft token is accepted; K the
number of draft tokens of a round, which yields 1 to K + 1 tokens. Costs are in target passes over
one token: c of a draft pass, v of a verify pass over K + 1 rows, o of the host's work in a round.

Formulas with alpha assume independent, identically distributed acceptances; exactness does not.
Sources: Leviathan et al. 2023 (arXiv 2211.17192) unless noted, and Chen et al. 2023
(arXiv 2302.01318). docs/theory.md lists the formulas and the misprints of the sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specedge.option_specs import check_integer
from specedge.sampling_options import MAX_DRAFT_TOKENS

Costs = float | Sequence[float] | NDArray[np.float64]  # one number, or one for each K from 0


def acceptance_probability(target_probs: ArrayLike, draft_probs: ArrayLike) -> float:
    """Return the probability that a token drawn from the draft is accepted, beta = sum min(t, d).

    Lemma 3.3 and theorem 3.5. [V], [V]
    """
    return float(np.minimum(target_probs, draft_probs).sum(dtype=np.float64))


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Return the mean tokens of a round, E = (1 - alpha^(K+1)) / (1 - alpha). Equation 1."""
    _check_rate("alpha", alpha)
    check_integer("num_draft_tokens", num_draft_tokens, 0)
    return float(sum(alpha**i for i in range(num_draft_tokens + 1)))


def expected_tokens_limit(alpha: float) -> float:
    """Return the supremum of E over K: 1 / (1 - alpha), infinite if everything is accepted."""
    _check_rate("alpha", alpha)
    return 1 / (1 - alpha) if alpha < 1 else math.inf


def alpha_from_tokens(tokens_per_round: float, num_draft_tokens: int) -> float:
    """Return the alpha with this mean of tokens per round: the inverse of `expected_tokens`.

    Chen et al.'s r is tokens per round over K + 1, so it is inverted as r (K + 1).
    """
    k = check_integer("num_draft_tokens", num_draft_tokens, 1)
    if not 1 <= tokens_per_round <= k + 1:
        raise ValueError(f"tokens_per_round must be between 1 and {k + 1}, got {tokens_per_round}")
    if tokens_per_round == 1:
        return 0.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if expected_tokens(middle, k) < tokens_per_round:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class AcceptanceRates:
    """Four quantities that are called acceptance rate; only the first two are equal.

    Attributes:
        alpha: Probability that a tested draft token is accepted, sum min(t, d) on average.
        accepted_over_tested: Estimate of alpha; tokens after a rejection are not tested.
        accepted_over_drafted: Fraction of all draft tokens, as reported by vLLM.
        tokens_over_rows: Tokens per round over K + 1: Chen et al.'s r, vLLM's system efficiency.
    """

    alpha: float
    accepted_over_tested: float
    accepted_over_drafted: float
    tokens_over_rows: float


def acceptance_rates(alpha: float, num_draft_tokens: int) -> AcceptanceRates:
    """Return the four acceptance rates for independent acceptances with probability alpha."""
    k = check_integer("num_draft_tokens", num_draft_tokens, 1)
    tokens = expected_tokens(alpha, k)
    accepted, rejected = tokens - 1, 1 - alpha**k
    return AcceptanceRates(
        alpha=alpha,
        accepted_over_tested=accepted / (accepted + rejected),
        accepted_over_drafted=accepted / k,
        tokens_over_rows=tokens / (k + 1),
    )


def round_cost(
    num_draft_tokens: int, draft_cost: float, verify_cost: Costs = 1.0, host_cost: float = 0.0
) -> float:
    """Return the cost of a round, K c + v + o, which equals the tokens per round at break-even.

    K = 0 is the target alone, the unit of all costs. `verify_cost` is one number, or a sequence
    whose item K is v for that K; item 0 is then 1, and the last item is that of the largest K.
    """
    k = check_integer("num_draft_tokens", num_draft_tokens, 0)
    _check_cost("draft_cost", draft_cost)
    _check_cost("host_cost", host_cost)
    verify = _verify_cost(verify_cost, k)
    return _check_cost("the cost of a round", k * draft_cost + verify + host_cost) if k else 1.0


def speedup(
    alpha: float,
    num_draft_tokens: int,
    draft_cost: float,
    verify_cost: Costs = 1.0,
    host_cost: float = 0.0,
) -> float:
    """Return the speed-up over the target alone, E / (K c + v + o).

    The defaults give theorem 3.8, which assumes that verifying K + 1 tokens costs one pass and the
    host nothing. Neither holds on a CPU or a small GPU.
    """
    cost = round_cost(num_draft_tokens, draft_cost, verify_cost, host_cost)
    return expected_tokens(alpha, num_draft_tokens) / cost


def run_speedup(tokens_per_round: float, num_draft_tokens: int, draft_cost: float) -> float:
    """Return the speed-up of a run from its tokens per round: Mody 2023, "Speculative Sampling"."""
    return tokens_per_round / round_cost(num_draft_tokens, draft_cost)


def break_even_alpha(
    num_draft_tokens: int, draft_cost: float, verify_cost: Costs = 1.0, host_cost: float = 0.0
) -> float | None:
    """Return the smallest alpha at which K draft tokens break even; None if there is none.

    With the defaults and K = 1 it is c: corollary 3.9.
    """
    k = check_integer("num_draft_tokens", num_draft_tokens, 1)
    cost = round_cost(k, draft_cost, verify_cost, host_cost)
    return None if cost > k + 1 else alpha_from_tokens(max(cost, 1.0), k)


def best_k(
    alpha: float,
    draft_cost: float,
    verify_cost: Costs = 1.0,
    host_cost: float = 0.0,
    max_draft_tokens: int = MAX_DRAFT_TOKENS,
) -> int:
    """Return the K with the largest speed-up, the smallest on ties. Section 3.5.

    It is 0 (the target alone) if no K gives a speed-up, and limited by `max_draft_tokens` and the
    last K of `verify_cost`: with free drafts, the speed-up increases with K.
    """
    last = check_integer("max_draft_tokens", max_draft_tokens, 0)
    if isinstance(verify_cost, Sequence | np.ndarray):
        last = min(last, max(len(verify_cost) - 1, 0))
    return max(
        range(last + 1),
        key=lambda k: (speedup(alpha, k, draft_cost, verify_cost, host_cost), -k),
    )


def operations_factor(alpha: float, num_draft_tokens: int, draft_operations: float = 0.0) -> float:
    """Return arithmetic operations per token relative to the target alone. Section 3.4.

    `draft_operations` are those of a draft pass relative to a target pass over one token.
    """
    _check_cost("draft_operations", draft_operations)
    tokens = expected_tokens(alpha, num_draft_tokens)
    return (num_draft_tokens * (draft_operations + 1) + 1) / tokens


def _verify_cost(verify_cost: Costs, k: int) -> float:
    if not isinstance(verify_cost, Sequence | np.ndarray):
        return _check_cost("verify_cost", verify_cost, is_positive=True)
    costs = [_check_cost("verify_cost", cost, is_positive=True) for cost in verify_cost]
    if not costs:
        raise ValueError("verify_cost is empty; specify one number, or one for each K from 0")
    if costs[0] != 1:
        raise ValueError(
            f"verify_cost must begin with the cost at K = 0, which is 1, got {costs[0]}"
        )
    if k >= len(costs):
        raise ValueError(
            f"verify_cost ends at K = {len(costs) - 1}, got K = {k}; add costs for larger K"
        )
    return costs[k]


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {rate}")


def _check_cost(name: str, cost: float, is_positive: bool = False) -> float:
    if not (math.isfinite(cost) and (cost > 0 or (cost == 0 and not is_positive))):
        raise ValueError(
            f"{name} must be {'above' if is_positive else 'at least'} 0 and finite, got {cost}"
        )
    return float(cost)
