"""The accept rule of speculative sampling: pure functions.

Letters: V vocabulary entries, n draft tokens; t is the target's distribution of a token (p in the
paper), d the draft's (q), u a uniform random number in [0, 1), which arrives as an argument. Row i
of a model's logits predicts the token that follows the i-th token it was fed, so judging n draft
tokens takes n + 1 target rows. `of_row` makes every distribution: the draft's, the target's,
and plain decoding's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from specedge.errors import OptionError
from specedge.sampling_options import Sampling

from ..sampling.distribution import Distribution, Floats
from ..sampling.history import History
from ..sampling.probabilities import choice, of_row
from ..sampling.scores import Row, Scores


@dataclass(frozen=True)
class Draft:
    """Proposed tokens [n] and the distributions they were drawn from [n].

    None in a distribution's place says that the token was chosen without randomness: d(x) = 1. One
    token may be chosen and the next drawn. `sources` [n] names the drafter of each; left empty, it
    is the one that was asked. Its tokens are the target's, or some of them.
    """

    tokens: list[int]
    probs: Sequence[Distribution | None] | None = None
    sources: Sequence[str] = ()

    def distribution(self, i: int) -> Distribution | None:
        """The distribution of one token, None if it was chosen without randomness."""
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

    Leviathan et al. 2023, algorithm 1: token x is accepted if u d(x) < t(x): strictly, so that
    t(x) = 0 never passes, and without a division, so that d(x) = 0 needs no case. After the first
    rejection the recovered token follows max(0, t - d); after none, the bonus token follows the
    target's last row. With a lenience b it is accepted if b u d(x) < t(x) (appendix A.5), with the
    same recovered token, and the output follows another distribution.

    With noise (`coupling.GumbelNoise`), as at temperature 0, a token is accepted if it is the
    target's own choice.

    Where the options leave no token behind accepted ones, no more than these are committed: a text
    that ends with one of them needs no other. OptionError where they leave none for the first.

    scores [n + 1 rows] of the target, tests [n or more] and last: uniforms
    """
    passed: list[int] = []
    try:
        if sampling.chooses:
            return _verify_choices(draft.tokens, scores, sampling, history, passed)
        return _verify_drawn(draft, scores, sampling, history, tests, last, passed)
    except OptionError:
        if not passed:
            raise
        return Verdict(len(passed) - 1, passed[-1])


def _verify_drawn(
    draft: Draft,
    scores: Scores,
    sampling: Sampling,
    history: History,
    tests: Floats,
    last: float,
    passed: list[int],
) -> Verdict:
    """The rule; `passed` gets each token when it is accepted."""
    for i, token in enumerate(draft.tokens):
        row = scores[i]
        target = of_row(row, sampling, history.then(draft.tokens[:i]))
        drawn_from = draft.distribution(i)
        draft_prob = 1.0 if drawn_from is None else drawn_from.of(token)
        accepted = sampling.lenience * tests[i] * draft_prob < target.of(token)
        if not accepted:
            residual = _residual(target, draft, i, len(row))
            return Verdict(i, (residual if residual.total else target).pick(last))
        passed.append(token)
    num_drafted = len(draft.tokens)
    target = of_row(scores[num_drafted], sampling, history.then(draft.tokens))
    return Verdict(num_drafted, target.pick(last))


def _verify_choices(
    tokens: list[int], scores: Scores, sampling: Sampling, history: History, passed: list[int]
) -> Verdict:
    """Accept each token that is the target's own choice: the same rule with one-hot rows."""
    for i, token in enumerate(tokens):
        chosen = _choice(scores[i], sampling, history.then(tokens[:i]))
        if chosen != token:
            return Verdict(i, chosen)
        passed.append(token)
    return Verdict(len(tokens), _choice(scores[len(tokens)], sampling, history.then(tokens)))


def _choice(row: Row, sampling: Sampling, history: History) -> int:
    """Return the token that a model chooses: the likeliest, or by the noise of its position."""
    if sampling.noise is None:
        return choice(row, sampling, history)
    return sampling.noise.choose(of_row(row, sampling, history), history.length)


def _residual(target: Distribution, draft: Draft, i: int, vocab_size: int) -> Distribution:
    """The distribution of the recovered token, in proportion to max(0, t - d).

    If t and d differ only by rounding it may be empty; the caller then draws from t.
    """
    weights, drawn_from = target.weights_of_all(vocab_size), draft.distribution(i)
    if drawn_from is None:
        weights[draft.tokens[i]] = 0
        return Distribution(weights)
    scale = weights.dtype.type(target.total / drawn_from.total)  # weights need not add up to 1
    weights[drawn_from.where] -= scale * drawn_from.weights
    return Distribution(np.maximum(weights, 0, out=weights))


def draw(
    row: Row, sampling: Sampling, history: History, uniform: float
) -> tuple[int, Distribution | None]:
    """For drafters: a token drawn from a row and the distribution it came from, None if chosen."""
    if sampling.chooses:
        return _choice(row, sampling, history), None
    distribution = of_row(row, sampling, history)
    return distribution.pick(uniform), distribution


def draw_draft(
    next_row: Callable[[list[int]], Row],
    history: History,
    max_tokens: int,
    sampling: Sampling,
    uniforms: Floats,
) -> Draft:
    """For drafters: a draft, each token drawn from the row that `next_row` gives after the tokens
    before it; it ends where the options allow none that the drafter knows. A token that a grammar
    forces needs no row.
    """
    tokens: list[int] = []
    probs: list[Distribution | None] = []
    constraint = sampling.constraint
    with suppress(OptionError):
        for i in range(max_tokens):
            text = history.then(tokens)
            token = None if constraint is None else constraint.forced(text)
            distribution = None
            if token is None:
                row = next_row(tokens)
                token, distribution = draw(row, sampling, text, float(uniforms[i]))
            tokens.append(token)
            probs.append(distribution)
            if constraint is not None and token in sampling.end_tokens:
                break
    return Draft(tokens, probs)
