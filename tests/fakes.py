"""Language models that are tables: small distributions, known exactly."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np

from specedge import Draft
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.observed_states import ObservedStates
from specedge.runtime.decoding.protocols import Drafter
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.decoding.verification import draw_draft
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import common_prefix_length
from specedge.runtime.sampling.logits import Logits
from specedge.sampling_options import Sampling

NextToken = Callable[[tuple[int, ...]], Sequence[float]]


class TableModel:
    """A language model whose distribution of the next token is any function of all earlier tokens.

    It keeps the tokens it was fed, as a cache does, so a loop that rolls back wrongly, feeds a
    token twice or leaves one out gets the distribution of another text. Rows past `length` are
    stale. Feeding it a token or a position that it does not have is an error.
    """

    invariant_lengths = tuple(range(1, 66))
    float32_error = 5e-6
    num_experts = 0
    rounds_inputs = False
    fast_length = sys.maxsize

    def __init__(
        self,
        distribution: NextToken,
        vocab_size: int = sys.maxsize,
        context_length: int = sys.maxsize,
    ) -> None:
        self.distribution = distribution
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.rows: list[int] = []
        self.length = 0
        self.passes: list[int] = []

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        self.passes.append(len(tokens))
        probs = []
        for token in tokens:
            self._write(token)
            probs.append(self.distribution(tuple(self.rows[: self.length])))
        with np.errstate(divide="ignore"):
            return Logits(np.log(np.array(probs[-num_rows:] if num_rows else probs, float)))

    def prefill(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._write(token)

    def reuse(self, tokens: Sequence[int]) -> int:
        self.truncate(common_prefix_length(self.rows[: self.length], tokens))
        return self.length

    def truncate(self, length: int) -> None:
        assert length <= self.length
        self.length = length

    def close(self) -> None:
        pass

    def _write(self, token: int) -> None:
        assert 0 <= token < self.vocab_size
        assert self.length < self.context_length
        self.rows[self.length :] = [int(token)]
        self.length += 1


class Counting:
    """A model that counts the tokens that it reads."""

    def __init__(self, model):
        self.model, self.num_read = model, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, tokens, num_rows=None):
        self.num_read += len(tokens)
        return self.model.forward(tokens, num_rows)

    def prefill(self, tokens):
        self.num_read += len(tokens)
        self.model.prefill(tokens)


def logits_of(*probs: float) -> np.ndarray:
    """Return logits whose softmax equals the given probabilities."""
    with np.errstate(divide="ignore"):
        return np.log(np.array(probs, float))


def hashed_distribution(seed: int, vocab_size: int, peak: float = 1.0) -> NextToken:
    """A distribution that differs for every text."""

    @functools.cache
    def distribution(text: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(text), *text])
        weights = np.exp(peak * rng.normal(size=vocab_size))
        return weights / weights.sum()

    return distribution


def quarters(seed: int, certain: bool) -> NextToken:
    """A distribution over 3 tokens in quarters, chosen so that every threshold of a round is one
    too.

    `certain` adds rows that are sure of a token; a draft must do without (a residual in thirds).
    """
    rows = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (0, 2, 2), (2, 0, 2), (2, 2, 0)]
    rows += [(4, 0, 0), (0, 0, 4)] if certain else []

    @functools.cache
    def distribution(text: tuple[int, ...]) -> np.ndarray:
        index = np.random.default_rng([seed, len(text), *text]).integers(len(rows))
        return np.array(rows[index]) / 4

    return distribution


FILTERED = Sampling(0.7, top_p=0.7)


def filtered(seed: int) -> tuple[NextToken, NextToken]:
    """Return a distribution, and what FILTERED leaves of it, in halves."""
    rows = [(3, 3, 2), (3, 2, 3), (2, 3, 3), (6, 1, 1), (1, 6, 1)]

    def row(text: tuple[int, ...]) -> np.ndarray:
        index = np.random.default_rng([seed, len(text), *text]).integers(len(rows))
        return np.array(rows[index])

    @functools.cache
    def distribution(text: tuple[int, ...]) -> np.ndarray:
        weights = row(text) ** 0.7
        return weights / weights.sum()

    @functools.cache
    def rest(text: tuple[int, ...]) -> np.ndarray:
        kept = np.where(row(text) > 2, 1.0, 0.0)
        return kept / kept.sum()

    return distribution, rest


_TREMBLE = np.random.default_rng(0).uniform(-1, 1, (997, 8))


class NoisyModel(TableModel):
    """A table whose logits move by up to `noise` with the number of rows in the passes that wrote
    the cache, and in the one that reads it. What a prefill writes is the same for everyone.
    """

    def __init__(self, distribution: NextToken, noise: float) -> None:
        super().__init__(distribution)
        self.noise = noise
        self.widths: list[int] = []

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        start = self.length
        logits = super().forward(tokens).array()
        self.widths[start:] = [len(tokens)] * len(tokens)
        for i, row in enumerate(logits):
            seen = hash((self.rows[start + i], *self.widths[: start + i + 1]))
            row += self.noise * _TREMBLE[seen % len(_TREMBLE)][: len(row)]
        return Logits(logits[-num_rows:] if num_rows else logits)

    def prefill(self, tokens: Sequence[int]) -> None:
        super().prefill(tokens)
        self.widths[self.length - len(tokens) :] = [0] * len(tokens)


def near_ties_distribution(seed: int, vocab_size: int, gap: float, share: float) -> NextToken:
    """Return a distribution with near-ties of up to `gap` in a share of all texts."""

    @functools.cache
    def distribution(text: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng(hash((seed, *text)) % 2**32)
        weights = np.exp(2 * rng.normal(size=vocab_size))
        if rng.random() < share:
            best, second = np.argsort(-weights)[:2]
            weights[second] = weights[best] * np.exp(-gap * rng.random())
        return weights / weights.sum()

    return distribution


def decoder(distribution: NextToken, drafter: Drafter, k: int) -> SpeculativeDecoder:
    """A decoder whose target is a table."""
    return SpeculativeDecoder(TableModel(distribution), FixedPlan(drafter, k), Stopwatch())


def generate(distribution, drafter, k, sampling, seed, count, prompt=(0, 1, 0)):
    """The first `count` tokens, and the rounds that wrote them."""
    rounds = list(decoder(distribution, drafter, k).rounds(prompt, sampling, seed, count))
    return [token for one in rounds for token in one.tokens][:count], rounds


class Recalling(Drafter):
    """Drafter that proposes tokens of a known text, every fifth one wrong."""

    name = "recalling"

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def propose(self, history, max_tokens, sampling, uniforms):
        start = history.num_new_tokens
        drafted = self.tokens[start : start + max_tokens]
        return Draft([t ^ 1 if i % 5 == 4 else t for i, t in enumerate(drafted, start)])


class Sure(Drafter):
    """Drafts one token, which is certain, at every third place."""

    name = "sure"

    def propose(self, history, max_tokens, sampling, uniforms):
        at = len(history.tokens)
        return Draft([] if at % 3 else [at // 3 % 3][:max_tokens])


class StatesTable(TableModel):
    """A target whose pass returns hidden states, which differ for every text. F = 2"""

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        logits = super().forward(tokens, num_rows)
        self._return_states(len(tokens))
        return logits

    def prefill(self, tokens: Sequence[int]) -> None:
        super().prefill(tokens)
        self._return_states(len(tokens))

    def _return_states(self, count: int) -> None:
        ends = range(self.length - count + 1, self.length + 1)
        self.hidden = np.array([target_state(tuple(self.rows[:end])) for end in ends], np.float32)


class HeadTable(TableModel):
    """A draft head whose distribution is any function of its rows: a state and a token of each.

    H = 1. It returns another state for each of its texts.
    """

    def __init__(
        self, distribution: NextToken, window: int = 64, chunk_length: int = sys.maxsize
    ) -> None:
        super().__init__(distribution)
        self.observed = ObservedStates(2, window)
        self.chunk_length = chunk_length
        self.num_fused: list[int] = []

    def fuse(self, hidden: np.ndarray) -> np.ndarray:
        assert hidden.shape[1] == 2
        self.num_fused.append(len(hidden))
        return fused_state(hidden)

    def forward(self, tokens, num_rows=None, hidden=None) -> Logits:
        assert hidden is not None
        assert hidden.shape == (len(tokens), 1)
        states = [int(state) for state in hidden[:, 0]]
        logits = super().forward(list(zip(states, tokens, strict=True)), num_rows)
        self._return_states(len(tokens))
        return logits

    def prefill(self, tokens, hidden=None) -> None:
        assert hidden is not None
        states = [int(state) for state in hidden[:, 0]]
        super().prefill(list(zip(states, tokens, strict=True)))
        self._return_states(len(tokens))

    def _return_states(self, count: int) -> None:
        ends = range(self.length - count + 1, self.length + 1)
        self.hidden = np.array([[head_state(self.rows[:end])] for end in ends], np.float32)

    def _write(self, row) -> None:
        assert self.length < self.context_length
        self.rows[self.length :] = [row]
        self.length += 1


class DraftingHeadTable(HeadTable):
    """A head that drafts several tokens in one launch, unless `refuses`.

    `launches` has the number of tokens that each reads, and its number of draft tokens.
    """

    has_draft_graphs = True
    refuses = False

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.launches: list[tuple[int, int]] = []

    def draft(self, tokens, request, hidden=None):
        if self.refuses:
            return None

        def next_row(drafted):
            states = self.hidden[-1:] if drafted else hidden
            return self.forward(drafted[-1:] or tokens, 1, states)[-1]

        self.launches.append((len(tokens), request.max_tokens))
        return draw_draft(next_row, request)


@functools.cache
def target_state(text: tuple[int, ...]) -> tuple[int, int]:
    """The hidden state of a text's last token."""
    return tuple(np.random.default_rng([7, len(text), *text]).integers(1, 1000, 2).tolist())


def fused_state(hidden: np.ndarray) -> np.ndarray:
    return hidden[:, :1] + 1000 * hidden[:, 1:]


def head_state(rows: Sequence[tuple[int, int]]) -> int:
    """The state that a head returns for its last row."""
    return _head_state(tuple(number for row in rows for number in row))


@functools.cache
def _head_state(numbers: tuple[int, ...]) -> int:
    return int(np.random.default_rng([8, *numbers]).integers(1, 1000))


def of_rows(distribution: NextToken) -> NextToken:
    """Return a head's distribution: a target's of the numbers of its rows."""
    return lambda rows: distribution(tuple(number for row in rows for number in row))
