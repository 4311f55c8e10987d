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

import numpy as np
from numpy.typing import ArrayLike

from specedge.option_specs import check_integer


def acceptance_probability(target_probs: ArrayLike, draft_probs: ArrayLike) -> float:
    """Return the probability that a token drawn from the draft is accepted, beta = sum min(t, d).

    Lemma 3.3 and theorem 3.5. [V], [V]
    """
    return float(np.minimum(target_probs, draft_probs).sum(dtype=np.float64))


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Return the mean tokens of a round, E = (1 - alpha^(K+1)) / (1 - alpha). Equation 1."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    check_integer("num_draft_tokens", num_draft_tokens, 0)
    return float(sum(alpha**i for i in range(num_draft_tokens + 1)))


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


def round_cost(
    num_draft_tokens: int, draft_cost: float, verify_cost: float = 1.0, host_cost: float = 0.0
) -> float:
    """Return the cost of a round, K c + v + o, which equals the tokens per round at break-even.

    K = 0 is the target alone, the unit of all costs. `verify_cost` is v for this K.
    """
    k = check_integer("num_draft_tokens", num_draft_tokens, 0)
    _check_cost("draft_cost", draft_cost)
    _check_cost("host_cost", host_cost)
    if not verify_cost > 0:
        raise ValueError(f"verify_cost must be above 0, got {verify_cost}")
    cost = k * draft_cost + verify_cost + host_cost if k else 1.0
    return _check_cost("the cost of a round", cost)


def speedup(
    alpha: float,
    num_draft_tokens: int,
    draft_cost: float,
    verify_cost: float = 1.0,
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


def _check_cost(name: str, cost: float) -> float:
    if not 0 <= cost < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, got {cost}")
    return float(cost)
