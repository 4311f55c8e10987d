"""Language models that are tables: small laws, known exactly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np

from specedge.runtime.loop.decoding import SpeculativeDecoder
from specedge.runtime.loop.model import shared_beginning
from specedge.runtime.loop.round import Drafter
from specedge.runtime.loop.timing import Stopwatch
from specedge.runtime.planning.plans import Fixed
from specedge.runtime.sampling.scores import HostScores

Law = Callable[[tuple[int, ...]], Sequence[float]]


class TableModel:
    """A language model whose law of the next token is any function of all earlier tokens.

    It keeps the tokens it was fed, as a cache does, so a loop that rolls back wrongly, feeds a
    token twice or leaves one out gets the law of another text. Rows past `length` are stale.
    Feeding it a token or a position that it does not have is an error.
    """

    row_independent_lengths = tuple(range(1, 66))
    float32_error = 5e-6
    num_experts = 0

    def __init__(
        self, law: Law, vocab_size: int = sys.maxsize, context_length: int = sys.maxsize
    ) -> None:
        self.law = law
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.rows: list[int] = []
        self.length = 0
        self.passes: list[int] = []

    def forward(self, tokens: Sequence[int]) -> HostScores:
        self.passes.append(len(tokens))
        logits = []
        for token in tokens:
            self._write(token)
            with np.errstate(divide="ignore"):
                logits.append(np.log(np.array(self.law(tuple(self.rows[: self.length])), float)))
        return HostScores(np.stack(logits))

    def prefill(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._write(token)

    def reuse(self, tokens: Sequence[int]) -> int:
        self.truncate(shared_beginning(self.rows[: self.length], tokens))
        return self.length

    def truncate(self, length: int) -> None:
        assert length <= self.length
        self.length = length

    def _write(self, token: int) -> None:
        assert 0 <= token < self.vocab_size
        assert self.length < self.context_length
        self.rows[self.length :] = [int(token)]
        self.length += 1


def logits_of(*probs: float) -> np.ndarray:
    """A row of logits whose softmax these are."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(probs, float))


def hashed_law(seed: int, vocab_size: int, peak: float = 1.0) -> Law:
    """A law that differs for every text."""

    def law(text: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(text), *text])
        weights = np.exp(peak * rng.normal(size=vocab_size))
        return weights / weights.sum()

    return law


def quarters(seed: int, certain: bool) -> Law:
    """A law over 3 tokens in quarters, chosen so that every threshold of a round is one too.

    `certain` adds rows that are sure of a token; a draft must do without (a residual in thirds).
    """
    rows = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (0, 2, 2), (2, 0, 2), (2, 2, 0)]
    rows += [(4, 0, 0), (0, 0, 4)] if certain else []

    def law(text: tuple[int, ...]) -> np.ndarray:
        index = np.random.default_rng([seed, len(text), *text]).integers(len(rows))
        return np.array(rows[index]) / 4

    return law


_TREMBLE = np.random.default_rng(0).uniform(-1, 1, (997, 8))


class NoisyModel(TableModel):
    """A table whose logits move by up to `noise` with the number of rows in the passes that wrote
    the cache, and in the one that reads it. What a prefill writes is the same for everyone.
    """

    def __init__(self, law: Law, noise: float) -> None:
        super().__init__(law)
        self.noise = noise
        self.widths: list[int] = []

    def forward(self, tokens: Sequence[int]) -> HostScores:
        start = self.length
        logits = super().forward(tokens).array()
        self.widths[start:] = [len(tokens)] * len(tokens)
        for i, row in enumerate(logits):
            seen = hash((self.rows[start + i], *self.widths[: start + i + 1]))
            row += self.noise * _TREMBLE[seen % len(_TREMBLE)][: len(row)]
        return HostScores(logits)

    def prefill(self, tokens: Sequence[int]) -> None:
        super().prefill(tokens)
        self.widths[self.length - len(tokens) :] = [0] * len(tokens)


def near_ties_law(seed: int, vocab_size: int, gap: float, share: float) -> Law:
    """A law whose two likeliest tokens are up to `gap` apart in a share of all texts."""

    @functools.cache
    def law(text: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng(hash((seed, *text)) % 2**32)
        weights = np.exp(2 * rng.normal(size=vocab_size))
        if rng.random() < share:
            best, second = np.argsort(-weights)[:2]
            weights[second] = weights[best] * np.exp(-gap * rng.random())
        return weights / weights.sum()

    return law


def decoder(law: Law, drafter: Drafter, k: int) -> SpeculativeDecoder:
    """A decoder whose target is a table."""
    return SpeculativeDecoder(TableModel(law), Fixed(drafter, k), Stopwatch())


def generate(law, drafter, k, sampling, seed, count, prompt=(0, 1, 0)):
    """The first `count` tokens, and the rounds that wrote them."""
    rounds = list(decoder(law, drafter, k).rounds(prompt, sampling, seed, count))
    return [token for one in rounds for token in one.tokens][:count], rounds
