"""Rejection sampling of draft tokens: the accept rule of speculative sampling, pure functions.

Notation: V vocabulary entries, n draft tokens; t is the target's distribution of a token (p in the
paper), d the draft's (q), u a uniform random number in [0, 1), passed as an argument. Row i of a
model's logits predicts the token after the i-th token of the pass, so n draft tokens need n + 1
rows of the target. `row_distribution` computes the distributions of draft, target and plain
decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from specedge.errors import OptionError
from specedge.sampling_options import Sampling

from ..sampling.distribution import Distribution, Floats
from ..sampling.history import History
from ..sampling.logits import Logits, Row
from ..sampling.probabilities import greedy_token, row_distribution


@dataclass(frozen=True)
class Draft:
    """Draft tokens [n] and the distributions they were drawn from [n].

    A distribution is None if the token is deterministic: d(x) = 1. Deterministic and sampled tokens
    may alternate. `sources` [n] names the drafter of each token; if empty, it is the drafter that
    was called. Tokens are ids of the target's vocabulary.
    """

    tokens: list[int]
    probs: Sequence[Distribution | None] | None = None
    sources: Sequence[str] = ()

    def distribution(self, i: int) -> Distribution | None:
        """Return the distribution of token i, None if the token is deterministic."""
        return None if self.probs is None else self.probs[i]


@dataclass(frozen=True)
class Verdict:
    """Outcome of a verification: the number of accepted tokens and the token after them.

    `next_token` is the recovered token after a rejection, else the bonus token.
    """

    num_accepted: int
    next_token: int


def verify(
    draft: Draft,
    logits: Logits,
    sampling: Sampling,
    history: History,
    accept_uniforms: Floats,
    last_uniform: float,
) -> Verdict:
    """Accept or reject draft tokens so that the output follows the target's distribution exactly.

    Leviathan et al. 2023, algorithm 1: token x is accepted if u d(x) < t(x). The inequality is
    strict, so that t(x) = 0 is never accepted, and has no division, so that d(x) = 0 needs no
    special case. After the first rejection, the recovered token is sampled from the residual
    distribution max(0, t - d), normalized; without a rejection, the bonus token is sampled from the
    target's last row. With a lenience b below 1, a token is accepted if b u d(x) < t(x) (appendix
    A.5), the recovered token is sampled as before, and the output follows another distribution.

    At temperature 0, and with Gumbel coupling (`random_numbers.GumbelNoise`), a token is accepted
    if it is the target's choice.

    If the options exclude all tokens after accepted ones, only these are committed, since a text
    that ends with one of them needs no other.

    Args:
        draft: Draft tokens [n].
        logits: Logits of the target's verify pass. [n + 1, V]
        sampling: Sampling options.
        history: Text before the draft.
        accept_uniforms: Uniforms of the acceptance tests. [n or more]
        last_uniform: Uniform of the recovered or bonus token.

    Raises:
        OptionError: The options exclude all tokens at the first position.
    """
    accepted: list[int] = []
    try:
        if sampling.chooses:
            return _verify_choices(draft.tokens, logits, sampling, history, accepted)
        return _verify_samples(
            draft, logits, sampling, history, accept_uniforms, last_uniform, accepted
        )
    except OptionError:
        if not accepted:
            raise
        return Verdict(len(accepted) - 1, accepted[-1])


def _verify_samples(
    draft: Draft,
    logits: Logits,
    sampling: Sampling,
    history: History,
    accept_uniforms: Floats,
    last_uniform: float,
    accepted: list[int],
) -> Verdict:
    """Apply the accept rule; append each accepted token to `accepted`."""
    for i, token in enumerate(draft.tokens):
        row = logits[i]
        target = row_distribution(row, sampling, history.then(draft.tokens[:i]))
        drawn_from = draft.distribution(i)
        draft_prob = 1.0 if drawn_from is None else drawn_from.of(token)
        is_accepted = sampling.lenience * accept_uniforms[i] * draft_prob < target.of(token)
        if not is_accepted:
            residual = _residual(target, draft, i, len(row))
            return Verdict(i, (residual if residual.total else target).pick(last_uniform))
        accepted.append(token)
    num_drafted = len(draft.tokens)
    target = row_distribution(logits[num_drafted], sampling, history.then(draft.tokens))
    return Verdict(num_drafted, target.pick(last_uniform))


def _verify_choices(
    tokens: list[int], logits: Logits, sampling: Sampling, history: History, accepted: list[int]
) -> Verdict:
    """Accept each token that is the target's choice: the accept rule for one-hot distributions."""
    for i, token in enumerate(tokens):
        choice = _choose(logits[i], sampling, history.then(tokens[:i]))
        if choice != token:
            return Verdict(i, choice)
        accepted.append(token)
    return Verdict(len(tokens), _choose(logits[len(tokens)], sampling, history.then(tokens)))


def _choose(row: Row, sampling: Sampling, history: History) -> int:
    """Return the greedy token, or the token selected by Gumbel noise."""
    if sampling.noise is None:
        return greedy_token(row, sampling, history)
    return sampling.noise.choose(row_distribution(row, sampling, history), history.length)


def _residual(target: Distribution, draft: Draft, i: int, vocab_size: int) -> Distribution:
    """Return the residual distribution max(0, t - d), unnormalized.

    It may be empty if t and d differ only by rounding; the caller then draws from t.
    """
    weights, drawn_from = target.weights_of_all(vocab_size), draft.distribution(i)
    if drawn_from is None:
        weights[draft.tokens[i]] = 0
        return Distribution(weights)
    scale = weights.dtype.type(target.total / drawn_from.total)  # weights are not normalized
    weights[drawn_from.columns] -= scale * drawn_from.weights
    return Distribution(np.maximum(weights, 0, out=weights))


def draw(
    row: Row, sampling: Sampling, history: History, uniform: float
) -> tuple[int, Distribution | None]:
    """Return a draft token from a row, and its distribution; None if the token is deterministic."""
    if sampling.chooses:
        return _choose(row, sampling, history), None
    distribution = row_distribution(row, sampling, history)
    return distribution.pick(uniform), distribution


def draft_rows(
    history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
) -> Generator[list[int], Any, Draft]:
    """Draw a draft token by token; yield the tokens so far to be sent the row after them.

    The draft ends where the options exclude all tokens of the drafter's vocabulary. A token that a
    grammar forces needs no row.

    Args:
        history: Text before the draft.
        max_tokens: Maximum number of tokens.
        sampling: Sampling options.
        uniforms: Uniform random numbers, one for each token. [max_tokens or more]
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
                row = yield tokens
                token, distribution = draw(row, sampling, text, float(uniforms[i]))
            tokens.append(token)
            probs.append(distribution)
            if constraint is not None and token in sampling.end_tokens:
                break
    return Draft(tokens, probs)


def draw_draft(
    next_row: Callable[[list[int]], Row],
    history: History,
    max_tokens: int,
    sampling: Sampling,
    uniforms: Floats,
) -> Draft:
    """Draw a draft from rows of logits that `next_row` returns for the tokens so far."""
    rows, row = draft_rows(history, max_tokens, sampling, uniforms), None
    while True:
        try:
            row = next_row(rows.send(row))
        except StopIteration as end:
            return cast(Draft, end.value)
