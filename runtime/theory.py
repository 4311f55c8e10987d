"""What speculative decoding should gain: the papers' formulas, and ours for real machines.

alpha is the mean acceptance rate, K the number of draft tokens. Costs are in passes of the target
over one token. They rest on acceptances that are independent and alike; exactness does not.
"""

from __future__ import annotations


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens a round yields on average. Leviathan et al. 2023, equation 1."""
    if not 0 <= alpha <= 1 or k < 0:
        raise ValueError(f"alpha must be between 0 and 1 and K at least 0, got {alpha} and {k}")
    return float(sum(alpha**i for i in range(k + 1)))


def speedup(
    alpha: float, k: int, draft_cost: float, verify_cost: float = 1.0, host_cost: float = 0.0
) -> float:
    """How many times faster than the target alone.

    With the defaults it is theorem 3.8 of Leviathan et al. 2023, for whom verifying K + 1 tokens
    costs one pass and the host nothing. Neither holds on a CPU or a small GPU.
    """
    return expected_tokens(alpha, k) / (k * draft_cost + verify_cost + host_cost)
