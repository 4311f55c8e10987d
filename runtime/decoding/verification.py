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
class DraftRequest:
    """Request for a draft.

    Attributes:
        history: Text to continue.
        max_tokens: Maximum number of draft tokens.
        sampling: Sampling options.
        uniforms: Uniform random numbers, one for each token. [max_tokens or more]
        min_confidence: Predicted probability that all tokens are accepted, below which a draft
            model or head ends the draft; 0 for drafts of `max_tokens` tokens.
    """

    history: History
    max_tokens: int
    sampling: Sampling
    uniforms: Floats
    min_confidence: float = 0.0

    def after(self, tokens: Sequence[int]) -> DraftRequest:
        """Return the request for the rest of the draft after its first tokens."""
        length = len(tokens)
        return DraftRequest(
            self.history.then(tokens),
            self.max_tokens - length,
            self.sampling,
            self.uniforms[length:],
            self.min_confidence,
        )


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

    def prob(self, i: int) -> float:
        """Return the probability of token i in its distribution."""
        distribution = self.distribution(i)
        return 1.0 if distribution is None else distribution.of(self.tokens[i])


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
    is_block: bool = False,
) -> Verdict:
    """Accept or reject draft tokens so that the output follows the target's distribution exactly.

    Leviathan et al. 2023, algorithm 1: token x is accepted if u d(x) < t(x). The inequality is
    strict, so that t(x) = 0 is never accepted, and has no division, so that d(x) = 0 needs no
    special case. After the first rejection, the recovered token is sampled from the residual
    distribution max(0, t - d), normalized; without a rejection, the bonus token is sampled from the
    target's last row. With a lenience b below 1, a token is accepted if b u d(x) < t(x) (appendix
    A.5), the recovered token is sampled as before, and the output follows another distribution.

    With `is_block`, the draft is verified as a whole (`_verify_block`), which accepts more tokens.

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
        is_block: True for block verification. It must not depend on tokens of the draft, which are
            all sampled (`Sampling.allows_blocks`).

    Raises:
        OptionError: The options exclude all tokens at the first position.
    """
    accepted: list[int] = []
    try:
        if sampling.chooses:
            return _verify_choices(draft.tokens, logits, sampling, history, accepted)
        rule = _verify_block if is_block else _verify_samples
        return rule(draft, logits, sampling, history, accept_uniforms, last_uniform, accepted)
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
        is_accepted = sampling.lenience * accept_uniforms[i] * draft.prob(i) < target.of(token)
        if not is_accepted:
            residual = _residual(target, draft, i, len(row))
            return Verdict(i, (residual if residual.total else target).pick(last_uniform))
        accepted.append(token)
    num_drafted = len(draft.tokens)
    target = row_distribution(logits[num_drafted], sampling, history.then(draft.tokens))
    return Verdict(num_drafted, target.pick(last_uniform))


def _verify_block(
    draft: Draft,
    logits: Logits,
    sampling: Sampling,
    history: History,
    accept_uniforms: Floats,
    last_uniform: float,
    accepted: list[int],
) -> Verdict:
    """Verify a draft of sampled tokens as a block: Sun et al. 2024 (2403.10444), algorithm 2.

    The first i tokens have joint ratio p_i = min(1, p_(i-1) t(x_i) / d(x_i)), p_0 = 1. The longest
    prefix that passes its test is accepted. Z_i is the total of the residual max(0, p_i t - d) at
    the position after it, whose draft token may be rejected: prefix i < n passes if
    u (Z_i + 1 - p_i) < Z_i, or if p_i = 1, which also covers Z_i = 0; the whole draft passes if
    u < p_n. After prefix i < n the next token is sampled from its residual.
    """
    ratios, targets = [1.0], list[Distribution]()
    for i, token in enumerate(draft.tokens):
        try:
            target = row_distribution(logits[i], sampling, history.then(draft.tokens[:i]))
        except OptionError:
            if not i:
                raise
            break  # no token may follow, so the draft ends here
        targets.append(target)
        ratio, draft_prob = ratios[-1] * target.of(token), draft.prob(i)
        ratios.append(ratio / draft_prob if ratio < draft_prob else float(ratio > 0))
        if not ratios[-1]:
            break  # no longer prefix can pass
    length = len(targets)
    if not length or accept_uniforms[length - 1] < ratios[-1]:
        accepted += draft.tokens[:length]
        target = row_distribution(logits[length], sampling, history.then(accepted))
        return Verdict(length, target.pick(last_uniform))
    while True:
        length -= 1
        target, ratio = targets[length], ratios[length]
        residual = _residual(target, draft, length, len(logits[length]), ratio)
        mass = residual.total / target.total
        if ratio == 1 or accept_uniforms[length - 1] * (mass + 1 - ratio) < mass:
            return Verdict(length, (residual if mass else target).pick(last_uniform))


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


def _residual(
    target: Distribution, draft: Draft, i: int, vocab_size: int, ratio: float = 1.0
) -> Distribution:
    """Return the residual distribution max(0, p t - d) for a joint ratio p, times the total of t.

    It may be empty if p t and d differ only by rounding; the caller then draws from t.
    """
    weights, drawn_from = target.weights_of_all(vocab_size), draft.distribution(i)
    if ratio < 1:
        weights *= weights.dtype.type(ratio)
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
    request: DraftRequest, is_last: Callable[[Row], bool] = lambda row: False
) -> Generator[list[int], Any, Draft]:
    """Draw a draft token by token; yield the tokens so far to be sent the row after them.

    The draft ends where the options exclude all tokens of the drafter's vocabulary. A token that a
    grammar forces needs no row.

    Args:
        request: Text, options and random numbers of the draft.
        is_last: Function that is called with the row of each token that was drawn from one, and
            returns True to end the draft after that token, which is tested like the others.
    """
    tokens: list[int] = []
    probs: list[Distribution | None] = []
    sampling, constraint = request.sampling, request.sampling.constraint
    with suppress(OptionError):
        for i in range(request.max_tokens):
            text = request.history.then(tokens)
            token = None if constraint is None else constraint.forced(text)
            distribution = row = None
            if token is None:
                row = yield tokens
                token, distribution = draw(row, sampling, text, float(request.uniforms[i]))
            tokens.append(token)
            probs.append(distribution)
            if constraint is not None and token in sampling.end_tokens:
                break
            if row is not None and is_last(row):
                break
    return Draft(tokens, probs)


def draw_draft(next_row: Callable[[list[int]], Row], request: DraftRequest) -> Draft:
    """Draw a draft from rows of logits that `next_row` returns for the tokens so far."""
    rows, row = draft_rows(request), None
    while True:
        try:
            row = next_row(rows.send(row))
        except StopIteration as end:
            return cast(Draft, end.value)
