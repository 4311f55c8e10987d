"""What speculative decoding should gain: the papers' formulas, and ours for real machines.

alpha is the mean acceptance rate, the chance that a tested draft token is accepted; K the number of
draft tokens a round, which yields 1 to K + 1 tokens. Costs are in passes of the target over one
token: c is that of a draft pass, v of a verify pass over K + 1 rows, o what the host adds to a
round.

Formulas with alpha rest on acceptances that are independent and alike; exactness does not.
Sources: Leviathan et al. 2023 (arXiv 2211.17192) where nothing else is said, and Chen et al. 2023
(arXiv 2302.01318). docs/theory.md has the formulas, and the misprints that are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specedge.option_specs import check_integer
from specedge.sampling_options import MAX_DRAFT_TOKENS

Costs = float | Sequence[float] | NDArray[np.float64]  # one number, or one for each K from 0


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Tokens a round yields on average, E = (1 - alpha^(K+1)) / (1 - alpha). Equation 1."""
    _check_rate("alpha", alpha)
    check_integer("num_draft_tokens", num_draft_tokens, 0)
    return float(sum(alpha**i for i in range(num_draft_tokens + 1)))


def expected_tokens_limit(alpha: float) -> float:
    """What no K exceeds: 1 / (1 - alpha), infinite if everything is accepted."""
    _check_rate("alpha", alpha)
    return 1 / (1 - alpha) if alpha < 1 else math.inf


def expected_tokens_without_bonus(alpha: float, num_draft_tokens: int) -> float:
    """Tokens a round yields where a full acceptance gives no token of the target's beside it.

    Serving engines dropped it to keep both caches of one length. K tokens at most.
    """
    check_integer("num_draft_tokens", num_draft_tokens, 1)
    return expected_tokens(alpha, num_draft_tokens - 1)


def expected_tokens_by_position(acceptances: Sequence[float]) -> float:
    """Tokens a round yields if its i-th draft token, once tested, is accepted with the i-th chance.

    1 + sum over i of the chance that the first i are accepted: no assumption that positions are
    alike or independent. `Stats.acceptance_by_position` measures the chances.
    """
    for acceptance in acceptances:
        _check_rate("acceptance", acceptance)
    return 1 + float(np.cumprod(np.asarray(acceptances, np.float64)).sum())


def tokens_distribution(alpha: float, num_draft_tokens: int) -> list[float]:
    """The chance that a round yields 1, 2, ... K + 1 tokens: geometric, cut off at K + 1."""
    _check_rate("alpha", alpha)
    k = check_integer("num_draft_tokens", num_draft_tokens, 0)
    return [alpha**i * (1 - alpha) for i in range(k)] + [float(alpha**k)]


def alpha_from_tokens(tokens_per_round: float, num_draft_tokens: int) -> float:
    """The alpha whose rounds yield so many tokens on average: the inverse of `expected_tokens`.

    A run's r, which is tokens a round over K + 1, is inverted as r (K + 1).
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
    """Four numbers that are all called acceptance rate. Only the first two are the same.

    alpha: the chance that a tested draft token is accepted, sum min(t, d) on average
    accepted_over_tested: its estimate from a run; tokens after a rejection are not tested
    accepted_over_drafted: of all draft tokens, as vLLM reports it
    tokens_over_rows: tokens a round over K + 1, Chen et al.'s r, vLLM's system efficiency
    """

    alpha: float
    accepted_over_tested: float
    accepted_over_drafted: float
    tokens_over_rows: float


def acceptance_rates(alpha: float, num_draft_tokens: int) -> AcceptanceRates:
    """What each of the four is where acceptances are independent with chance alpha."""
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
    """What a round costs, K c + v + o: so many tokens it must yield to break even.

    K = 0 is the target alone, the unit of all costs. `verify_cost` may be one number, or a sequence
    whose item K is v for that K; item 0 is then the unit too, and it ends at the largest K.
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
    """How many times faster than the target alone: E / (K c + v + o).

    With the defaults it is theorem 3.8, for which verifying K + 1 tokens costs one pass and the
    host nothing. Neither holds on a CPU or a small GPU.
    """
    cost = round_cost(num_draft_tokens, draft_cost, verify_cost, host_cost)
    return expected_tokens(alpha, num_draft_tokens) / cost


def time_per_token(
    alpha: float,
    num_draft_tokens: int,
    target_time: float,
    draft_cost: float,
    verify_cost: Costs = 1.0,
    host_cost: float = 0.0,
) -> float:
    """Time of a new token, in the unit of `target_time`, which the target takes for one alone."""
    _check_cost("target_time", target_time, above=True)
    return target_time / speedup(alpha, num_draft_tokens, draft_cost, verify_cost, host_cost)


def break_even_alpha(
    num_draft_tokens: int, draft_cost: float, verify_cost: Costs = 1.0, host_cost: float = 0.0
) -> float | None:
    """The alpha from which K draft tokens pay; None if even accepting all of them does not.

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
    """The number of draft tokens with the largest speed-up, the smallest on ties. Section 3.5.

    0, the target alone, if none pays; no K exceeds `max_draft_tokens` or the costs that are known.
    As drafting gets free the best K has no limit but these.
    """
    last = check_integer("max_draft_tokens", max_draft_tokens, 0)
    if isinstance(verify_cost, Sequence | np.ndarray):
        last = min(last, max(len(verify_cost) - 1, 0))
    return max(
        range(last + 1),
        key=lambda k: (speedup(alpha, k, draft_cost, verify_cost, host_cost), -k),
    )


def operations_factor(alpha: float, num_draft_tokens: int, draft_operations: float = 0.0) -> float:
    """Arithmetic operations a token, over those of the target alone: section 3.4.

    `draft_operations` are those of a draft pass over those of a target pass over one token.
    """
    _check_cost("draft_operations", draft_operations)
    tokens = expected_tokens(alpha, num_draft_tokens)
    return (num_draft_tokens * (draft_operations + 1) + 1) / tokens


def run_time(
    num_tokens: float,
    tokens_over_rows: float,
    num_draft_tokens: int,
    draft_time: float,
    target_time: float,
) -> float:
    """What a run of so many tokens takes, in the unit of the times of one pass of each model.

    N / (r (K + 1)) rounds of K draft passes and a target pass: Mody 2023, "Speculative Sampling".
    """
    _check_cost("target_time", target_time, above=True)
    cost = round_cost(num_draft_tokens, draft_time / target_time)
    return num_tokens * target_time * cost / _tokens(tokens_over_rows, num_draft_tokens)


def run_speedup(
    tokens_over_rows: float, num_draft_tokens: int, draft_time: float, target_time: float
) -> float:
    """A run's speed-up from its r, tokens a round over K + 1: r (K + 1) t / (K d + t)."""
    seconds = run_time(1, tokens_over_rows, num_draft_tokens, draft_time, target_time)
    return target_time / seconds


def implied_round_time(
    tokens_over_rows: float, num_draft_tokens: int, time_per_token: float
) -> float:
    """What a round really took, by a run's time a token.

    What it has beyond K draft passes and a target pass is the host, and verifying K rows more.
    """
    return _tokens(tokens_over_rows, num_draft_tokens) * time_per_token


def _tokens(tokens_over_rows: float, num_draft_tokens: int) -> float:
    rows = check_integer("num_draft_tokens", num_draft_tokens, 0) + 1
    if not 1 <= tokens_over_rows * rows <= rows:
        raise ValueError(
            f"tokens_over_rows must be between 1 / {rows} and 1, got {tokens_over_rows}"
        )
    return tokens_over_rows * rows


def _verify_cost(verify_cost: Costs, k: int) -> float:
    if not isinstance(verify_cost, Sequence | np.ndarray):
        return _check_cost("verify_cost", verify_cost, above=True)
    costs = [_check_cost("verify_cost", cost, above=True) for cost in verify_cost]
    if not costs:
        raise ValueError("verify_cost is empty; give one number, or one for each K from 0")
    if costs[0] != 1:
        raise ValueError(f"verify_cost begins with that of K = 0, which is 1, got {costs[0]}")
    if k >= len(costs):
        raise ValueError(f"verify_cost ends at K = {len(costs) - 1}, got K = {k}; measure more")
    return costs[k]


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {rate}")


def _check_cost(name: str, cost: float, above: bool = False) -> float:
    if not (math.isfinite(cost) and (cost > 0 or (cost == 0 and not above))):
        raise ValueError(
            f"{name} must be {'above' if above else 'at least'} 0 and finite, got {cost}"
        )
    return float(cost)
