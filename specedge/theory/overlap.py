"""What two distributions say: how often a draft token is accepted, and what lenience makes of the
distribution.

t is the target's distribution, d the draft's, V the size of the vocabulary. Sources: Leviathan et
al. 2023 (arXiv 2211.17192), and the post on toyllm where named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

NextToken = NDArray[np.float64]


def acceptance_probability(
    target_probs: ArrayLike, draft_probs: ArrayLike, lenience: float = 1.0
) -> float:
    """The chance that a token drawn from the draft is accepted, beta = sum min(t, d). [V], [V]

    Lemma 3.3 and theorem 3.5. `lenience` as in `lenient_distribution`.
    """
    return float(_accepted(*_distributions(target_probs, draft_probs), lenience).sum())


def acceptance_rate(target_rows: Sequence[ArrayLike], draft_rows: Sequence[ArrayLike]) -> float:
    """alpha, the mean of beta over positions. [n, V], [n, V]

    Leviathan et al. take the positions of texts that the target itself writes.
    """
    if len(target_rows) != len(draft_rows) or not len(target_rows):
        raise ValueError("target_rows and draft_rows must have as many rows, and at least one row")
    pairs = zip(target_rows, draft_rows, strict=True)
    return float(np.mean([acceptance_probability(target, draft) for target, draft in pairs]))


def total_variation(target_probs: ArrayLike, draft_probs: ArrayLike) -> float:
    """How far two distributions are apart, 0 to 1; what is left to 1 is beta. [V], [V]"""
    target, draft = _distributions(target_probs, draft_probs)
    return float(np.abs(target - draft).sum() / 2)


def lenient_distribution(
    target_probs: ArrayLike, draft_probs: ArrayLike, lenience: float
) -> NextToken:
    """What is drawn if a draft token x stands for a uniform u in [0, b] with u d(x) < t(x). [V]

    b is `lenience`: appendix A.5's l, and the upper end of r that the post on toyllm suggests. At 1
    it is the target's distribution, and at temperature 0 always. Below 1 no token gets more than t
    / b; above 1 acceptance is stricter, and the distribution no more the target's than below. After
    a rejection the recovered token follows max(0, t - d), as without lenience.
    """
    target, draft = _distributions(target_probs, draft_probs)
    accepted = _accepted(target, draft, lenience)
    residual = np.maximum(target - draft, 0)
    recovered = residual / residual.sum() if residual.any() else target
    return accepted + max(0.0, 1 - float(accepted.sum())) * recovered


def rejection_sampling_acceptance(target_probs: ArrayLike, draft_probs: ArrayLike) -> float:
    """The chance 1 / M, M = max t / d, that plain rejection sampling accepts. [V], [V]

    Never more than beta: appendix A.2. 0 where the draft lacks a token of the target's.
    """
    target, draft = _distributions(target_probs, draft_probs)
    possible = target > 0
    return float((draft[possible] / target[possible]).min())


def _accepted(target: NextToken, draft: NextToken, lenience: float) -> NextToken:
    """The chance that each token is drafted and is accepted. [V], [V] -> [V]"""
    if not (math.isfinite(lenience) and lenience > 0):
        raise ValueError(f"lenience must be above 0 and finite, got {lenience}")
    if lenience > 1:
        return np.minimum(target, draft) / lenience
    with np.errstate(over="ignore"):
        return np.minimum(target / lenience, draft)


def _distributions(target_probs: ArrayLike, draft_probs: ArrayLike) -> tuple[NextToken, NextToken]:
    distributions = []
    for name, probs in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        distribution = np.asarray(probs, np.float64)
        if distribution.ndim != 1 or not (distribution >= 0).all():
            raise ValueError(f"{name} must be probabilities of shape [V], got {distribution}")
        if (
            not abs(distribution.sum() - 1) < 1e-4
        ):  # float32 rows of large vocabularies are that near
            raise ValueError(f"{name} must sum to 1, got {distribution.sum()}")
        distributions.append(distribution)
    target, draft = distributions
    if len(target) != len(draft):
        raise ValueError(
            f"draft_probs has {len(draft)} tokens, target_probs {len(target)}; pad with zeros"
        )
    return target, draft
