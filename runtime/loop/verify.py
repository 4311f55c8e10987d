"""The accept rule of speculative sampling: pure functions over NumPy arrays.

Letters: V vocabulary entries, n draft tokens. Row i of a model's logits predicts the token that
follows the i-th token it was fed, so judging n draft tokens takes n + 1 target rows. Random
numbers in [0, 1) arrive as arguments. `probabilities` makes every distribution: draft's, target's,
plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specedge.options import Sampling

from ..sampling.distribution import Distribution, Floats
from ..sampling.history import History
from ..sampling.probabilities import choice, probabilities
from ..sampling.scores import Row, Scores


@dataclass(frozen=True)
class Draft:
    """Proposed tokens [n] and the distributions they were drawn from [n], None if certain.

    One token may be certain and the next not. `sources` [n] names the drafter of each; left empty,
    it is the one that was asked. A draft may know fewer tokens than its target, never more.
    """

    tokens: list[int]
    probs: Sequence[Distribution | None] | None = None
    sources: Sequence[str] = ()

    def distribution(self, i: int) -> Distribution | None:
        """The distribution of one token, None if it is certain."""
        return None if self.probs is None else self.probs[i]


@dataclass(frozen=True)
class Verdict:
    """What the target made of a draft: how many tokens it accepts, and the one after them."""

    num_accepted: int
    next_token: int


def verify(
    draft: Draft,
    scores: Scores,
    sampling: Sampling,
    history: History,
    tests: Floats,
    last: float,
) -> Verdict:
    """Accept or reject draft tokens so the output follows the target's distribution exactly.

    Leviathan et al. 2023, algorithm 1: token x is accepted if u d(x) < t(x), without a division, so
    that t(x) = 0 never passes. After the first rejection the recovered token follows
    max(0, t - d); after none, the bonus token follows the target's last row. With a lenience b it
    is accepted if b u d(x) < t(x) (appendix A.5), and the output follows another distribution.

    scores [n + 1 rows] of the target, tests [n or more] and last: uniforms
    """
    if sampling.greedy:
        return _verify_greedy(draft.tokens, scores, sampling, history)
    for i, token in enumerate(draft.tokens):
        logits = scores[i].array()
        target = probabilities(logits, sampling, history.then(draft.tokens[:i]))
        distribution = draft.distribution(i)
        drafted = 1.0 if distribution is None else distribution.of(token)
        if not sampling.lenience * tests[i] * drafted < target.of(token):
            residual = _residual(target, draft, i, len(logits))
            return Verdict(i, (residual if residual.total else target).pick(last))
    num_drafted = len(draft.tokens)
    target = probabilities(scores[num_drafted].array(), sampling, history.then(draft.tokens))
    return Verdict(num_drafted, target.pick(last))


def _verify_greedy(
    tokens: list[int], scores: Scores, sampling: Sampling, history: History
) -> Verdict:
    """The same rule with one-hot rows: a token is accepted if it is the target's own choice."""
    for i in range(len(tokens) + 1):
        chosen = choice(scores[i], sampling, history.then(tokens[:i]))
        if i == len(tokens) or tokens[i] != chosen:
            break
    return Verdict(i, chosen)


def _residual(target: Distribution, draft: Draft, i: int, vocab_size: int) -> Distribution:
    """The distribution of the recovered token, in proportion to max(0, t - d).

    Where t and d agree to rounding nothing is left; a rejection was then a rounding error too.
    """
    weights, drafted = target.weights_of_all(vocab_size), draft.distribution(i)
    if drafted is None:
        weights[draft.tokens[i]] = 0
        return Distribution(weights)
    scale = weights.dtype.type(target.total / drafted.total)
    weights[drafted.where] -= scale * drafted.weights
    return Distribution(np.maximum(weights, 0, out=weights))


def draw(
    row: Row, sampling: Sampling, history: History, uniform: float
) -> tuple[int, Distribution | None]:
    """Draw a token from a row, with the distribution it came from, None if certain."""
    if sampling.greedy:
        return choice(row, sampling, history), None
    distribution = probabilities(row.array(), sampling, history)
    return distribution.pick(uniform), distribution
