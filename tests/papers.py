"""Figures about speed as printed by papers and posts; misprints are marked.

D is Chen et al. 2023 (arXiv 2302.01318), G is Leviathan et al. 2023 (arXiv 2211.17192).
"""

from __future__ import annotations

from typing import NamedTuple

COSTS = (0.01, 0.02, 0.05, 0.1, 1.8 / 14.1, 0.2, 0.5)  # c; 1.8 ms and 14.1 ms are D's
ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)

EXPECTED_TOKENS = {  # alpha: E for each K
    0.5: (1.5, 1.75, 1.875, 1.9375, 1.96875, 1.992188, 1.999023),
    0.6: (1.6, 1.96, 2.176, 2.3056, 2.38336, 2.458010, 2.490930),
    0.7: (1.7, 2.19, 2.533, 2.7731, 2.94117, 3.141173, 3.267422),
    0.8: (1.8, 2.44, 2.952, 3.3616, 3.68928, 4.161139, 4.570503),
    0.9: (1.9, 2.71, 3.439, 4.0951, 4.68559, 5.695328, 6.861894),
}
EXPECTED_TOKENS_K = (1, 2, 3, 4, 5, 7, 10)

BEST_K = {  # alpha: the best K for each of COSTS
    0.5: (5, 4, 3, 2, 2, 1, 0),
    0.6: (7, 6, 4, 3, 3, 2, 1),
    0.7: (9, 8, 6, 4, 4, 3, 1),
    0.8: (14, 11, 8, 6, 5, 4, 2),
    0.9: (24, 19, 13, 10, 9, 7, 3),
}
BEST_SPEEDUP = {  # alpha: the speed-up at the best K for each of COSTS
    0.5: (1.875000, 1.793981, 1.630435, 1.458333, 1.3941, 1.25, 1),
    0.6: (2.297205, 2.169657, 1.921333, 1.673846, 1.5734, 1.4, 1.0667),
    0.7: (2.971720, 2.757605, 2.352938, 1.980786, 1.8357, 1.5831, 1.1333),
    0.8: (4.231647, 3.816723, 3.092080, 2.469640, 2.2519, 1.8676, 1.22),
    0.9: (7.485566, 6.365387, 4.674134, 3.430947, 3.0309, 2.3731, 1.3756),
}

SPEEDUP_AT_4 = {  # alpha: the speed-up at K = 4 for the first four of COSTS
    0.5: (1.862981, 1.793981, 1.614583, 1.383929),
    0.6: (2.216923, 2.134815, 1.921333, 1.646857),
    0.7: (2.666442, 2.567685, 2.310917, 1.980786),
    0.8: (3.232308, 3.112593, 2.801333, 2.401143),
    0.9: (3.937596, 3.791759, 3.412583, 2.925071),
}


class FreeDraft(NamedTuple):
    """A row of G's table 1: the speed-up with free drafts."""

    alpha: float
    k: int
    speedup: float
    printed: float


FREE_DRAFTS = (
    FreeDraft(0.6, 2, 1.96, 1.96),
    FreeDraft(0.7, 3, 2.533, 2.53),
    FreeDraft(0.8, 2, 2.44, 2.44),
    FreeDraft(0.8, 5, 3.68928, 3.69),
    FreeDraft(0.9, 2, 2.71, 2.71),
    FreeDraft(0.9, 10, 6.861894, 6.86),
)


class Translation(NamedTuple):
    """A row of G's tables 2 and 4: T5-XXL as the target."""

    task: str
    draft: str
    temperature: int
    k: int
    alpha: float
    draft_cost: float
    printed: float
    computed: float
    measured: float


T5 = (
    Translation("EnDe", "small", 0, 7, 0.75, 0.02, 3.2, 3.1575, 3.4),
    Translation("EnDe", "base", 0, 7, 0.80, 0.04, 3.3, 3.2509, 2.8),
    Translation("EnDe", "large", 0, 7, 0.82, 0.11, 2.5, 2.4971, 1.7),
    Translation("EnDe", "small", 1, 7, 0.62, 0.02, 2.3, 2.2580, 2.6),
    Translation("EnDe", "base", 1, 5, 0.68, 0.04, 2.4, 2.3467, 2.4),
    Translation("EnDe", "large", 1, 3, 0.71, 0.11, 2.0, 1.9338, 1.4),
    Translation("CNNDM", "small", 0, 5, 0.65, 0.02, 2.4, 2.4015, 3.1),
    Translation("CNNDM", "base", 0, 5, 0.73, 0.04, 2.6, 2.6193, 3.0),
    Translation("CNNDM", "large", 0, 3, 0.74, 0.11, 2.0, 2.0247, 2.2),
    Translation("CNNDM", "small", 1, 5, 0.53, 0.02, 1.9, 1.8914, 2.3),
    Translation("CNNDM", "base", 1, 3, 0.55, 0.04, 1.8, 1.8026, 2.2),
    Translation("CNNDM", "large", 1, 3, 0.56, 0.11, 1.6, 1.5408, 1.7),
)


class Run(NamedTuple):
    """A run of which a post states r, tokens a round over K + 1, at K = 4."""

    source: str
    tokens_over_rows: float
    draft_ms: float
    target_ms: float
    speedup: float
    alpha: float


RUNS = (
    Run("D, HumanEval", 0.8, 1.8, 14.1, 2.647887, 0.888180),
    Run("D, XSum", 0.62, 1.8, 14.1, 2.052113, 0.758300),
    Run("toyllm", 0.8125, 11.9, 73.3, 2.463038, 0.895981),
)

# Seconds, speculative and plain, of the post on candle: a CPU, where verifying is not free.
CANDLE = ((14.8, 13.1), (20.5, 13.0), (14.4, 13.2), (25.9, 13.0))
