"""Protocols of models, drafters and plans, as the decoding loop uses them, and the round record.

Models are in `backend/`, drafters in `drafters/`, plans in `planning/`. The loop runs no pass: it
is a generator of operations, which `run_operations` runs one at a time and the engine of
`requests/` together with those of other requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from specedge.request import PLAIN
from specedge.sampling_options import Sampling

from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.logits import Logits
from ..sampling.logprobs import TokenLogprobs
from ..sampling.source import Source
from .observed_states import Array, ObservedStates
from .verification import Draft, DraftRequest

T = TypeVar("T")


class Operation(Protocol):
    """Work that a request needs before it continues, with the result of `run`."""

    def run(self) -> Any:
        """Do the work and return its result."""


Operations = Generator[Operation, Any, T]  # operations, each sent its result, of a result T


def run_operations(operations: Operations[T]) -> T:
    """Run operations one at a time; return the generator's result."""
    result = None
    while True:
        try:
            operation = operations.send(result)
        except StopIteration as end:
            value: T = end.value
            return value
        result = operation.run()


class LanguageModel(Protocol):
    """Model with a key-value cache over V vocabulary entries."""

    @property
    def length(self) -> int:
        """Number of tokens in the cache."""

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        """Append T tokens to the cache; return the logits of the last R, by default of all.

        The last row predicts the token after tokens[-1]. A draft model's head may be pruned; the
        ids of its columns are part of the logits. [T] -> [R, V]
        """

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append any number of tokens to the cache without computing logits."""

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keep the longest common prefix of the cache and `tokens`; return its length."""

    def truncate(self, length: int) -> None:
        """Roll the cache back to its first `length` tokens."""


class HiddenStateModel(LanguageModel, Protocol):
    """Target whose passes return hidden states, or draft head that reads them.

    Row i of a draft head's cache reads the hidden state of token i and token i + 1, and its logits
    predict token i + 2.
    """

    @property
    def hidden(self) -> Array:
        """Hidden states of the last pass, valid until the next one. [T, F], of a head [T, H]"""


class DraftHeadModel(HiddenStateModel, Protocol):
    """Draft head with the states that it has observed."""

    @property
    def observed(self) -> ObservedStates:
        """Observed hidden states of the target."""

    def forward(
        self, tokens: Sequence[int], num_rows: int | None = None, hidden: Array | None = None
    ) -> Logits:
        """Append tokens, each with a hidden state [T, H]; return logits as `LanguageModel`."""

    def prefill(self, tokens: Sequence[int], hidden: Array | None = None) -> None:
        """Append tokens, each with a hidden state [T, H], without computing logits."""

    def fuse(self, hidden: Array) -> Array:
        """Return the states that passes read, for hidden states of the target. [n, F] -> [n, H]"""


class SourceModel(LanguageModel, Protocol):
    """Decoder of an encoder-decoder, whose constant states belong to a source."""

    @property
    def source(self) -> Source | None:
        """Source of the constant states; None before the first one."""

    def open(self, source: Source) -> None:
        """Set the constant states to those of a source; empty the cache if it was another one."""

    def forget(self) -> None:
        """Compute the constant states again when a source is opened next."""


class DraftingModel(LanguageModel, Protocol):
    """Model that may draft on its device, without host work between tokens."""

    @property
    def has_draft_graphs(self) -> bool:
        """True if it drafts on its device for some requests."""

    def draft(
        self, tokens: Sequence[int], request: DraftRequest, hidden: Array | None = None
    ) -> Draft | None:
        """Append the last tokens of a text and return a draft of `max_tokens` tokens after them.

        The draft equals that of single passes; its last token is not appended. A draft head reads a
        `hidden` state with each token [T, H]. Returns None, without effect, if single passes are
        needed.
        """


@dataclass  # not a tuple and not frozen, which would take twice the time to create
class Feed:
    """Pass of a model over further tokens of a text.

    The result is the logits of the last `num_rows` tokens [num_rows, V], valid until the model's
    next pass. For 0 rows it is None, and any number of tokens may be appended. A draft head reads a
    `hidden` state with each token [T, H].
    """

    model: LanguageModel
    tokens: Sequence[int]
    num_rows: int
    hidden: Array | None = None

    def run(self) -> Logits | None:
        if self.hidden is not None:
            head = cast(DraftHeadModel, self.model)
            if self.num_rows:
                return head.forward(self.tokens, self.num_rows, self.hidden)
            head.prefill(self.tokens, self.hidden)
        elif self.num_rows:
            return self.model.forward(self.tokens, self.num_rows)
        else:
            self.model.prefill(self.tokens)
        return None


class FuseStates(NamedTuple):
    """Computation of the states [n, H] that a draft head reads, from those of the target [n, F]."""

    model: DraftHeadModel
    states: Array

    def run(self) -> Array:
        return self.model.fuse(self.states)


class OpenSource(NamedTuple):
    """Computation of a source's constant states in a model, before its passes."""

    model: SourceModel
    source: Source

    def run(self) -> None:
        self.model.open(self.source)


def open_source(model: LanguageModel, source: Source | None) -> Operations[bool]:
    """Open a source in a model unless it is open; return True if it was another one."""
    source_model = cast(SourceModel, model)
    if source is None or source_model.source == source:
        return False
    yield OpenSource(source_model, source)
    return True


class BatchedModel(Protocol):
    """Model whose passes serve several texts, with the logits of their own passes, bit for bit."""

    @property
    def max_rows(self) -> int:
        """Maximum number of tokens of a pass, of all texts together."""

    @property
    def max_logits(self) -> int:
        """Maximum number of rows of logits of a pass."""

    def forward(
        self, feeds: Sequence[tuple[LanguageModel, Sequence[int], int]]
    ) -> Sequence[Logits | None]:
        """Run the feeds (model, tokens, num_rows) of different texts in one pass.

        Returns:
            The logits of each, valid until the next pass; None for 0 rows.
        """


class DeviceDraft(NamedTuple):
    """Draft on the model's device. The result is that of `DraftingModel.draft`."""

    model: DraftingModel
    tokens: Sequence[int]
    request: DraftRequest
    hidden: Array | None = None

    def run(self) -> Draft | None:
        return self.model.draft(*self[1:])


class ClosableModel(LanguageModel, Protocol):
    """Model that owns memory."""

    def close(self) -> None:
        """Release the memory; the model is not used again."""


class TargetModel(ClosableModel, Protocol):
    """Target model with the measured properties of its passes."""

    def shared(self, tokens: Sequence[int], source: Source | None = None) -> int:
        """Return the length of the prefix that the cache and `tokens` share.

        It is 0 if the cache belongs to another source.
        """

    @property
    def invariant_lengths(self) -> Collection[int]:
        """Pass-length-invariant lengths T: logits are bitwise those of passes of other lengths.

        They were measured at export and tested on this machine.
        """

    @property
    def float32_error(self) -> float:
        """Error of the logits against float64 at export, relative to the largest."""

    @property
    def rounds_inputs(self) -> bool:
        """True if matrix products quantize their inputs, which amplifies rounding differences."""

    @property
    def fast_length(self) -> int:
        """Longest pass for which the kernels on this device are optimized."""

    @property
    def num_experts(self) -> int:
        """Number of experts per layer; 0 in a dense model."""


class Drafter(Protocol):
    """Source of draft tokens.

    The text follows the target's distribution for any drafter, provided that each token comes with
    the distribution that it was sampled from, given all tokens before it, or with None if it is
    deterministic.

    Classes derived from this one need a name and `propose` only.
    """

    @property
    def name(self) -> str:
        """Name of the drafter in statistics."""

    @property
    def is_sampled(self) -> bool:
        """True if it samples every token, so that drafts may be verified as blocks."""
        return False

    @property
    def observer(self) -> StateObserver | None:
        """This drafter, or a part of it, if it reads hidden states of the target."""
        return None

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        """Propose 0 to `max_tokens` tokens after `history`; uniforms [max_tokens or more].

        A smaller `max_tokens` must only shorten the draft, so that a seed's text does not depend on
        where a request ends. Token i is drawn with uniform i. There are as many uniforms as the
        plan allows draft tokens, wherever the request ends.
        """

    def truncate(self, length: int) -> None:
        """Roll back to the first `length` tokens of the text; 0 begins another text."""
        return  # by default, a drafter has no state


class StateObserver(Protocol):
    """Drafter that reads hidden states of the target."""

    def begin(self, history: History, num_cached: int) -> int:
        """Begin a text whose first `num_cached` tokens are in the target's cache.

        Returns:
            The number of them to keep: `num_cached`, or one less if this completes the states.
        """

    def observe(self, start: int, hidden: Array) -> None:
        """Copy the hidden states [n, F] of a pass of the target over tokens from `start` on.

        `truncate` drops those of rejected tokens.
        """

    def read(self) -> Operations[None]:
        """Run passes over the states that were observed of a prompt."""


class ModelDrafter(Drafter):
    """Base class of drafters that run passes."""

    @abstractmethod
    def draft(self, request: DraftRequest) -> Operations[Draft]:
        """Return the operations of a proposal, and the proposal as their result."""

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        return run_operations(self.draft(DraftRequest(history, max_tokens, sampling, uniforms)))


def draft_sources(drafter: Drafter, draft: Draft) -> tuple[str, ...]:
    """Return the name of each draft token's drafter. -> [n]"""
    return tuple(draft.sources) or (drafter.name,) * len(draft.tokens)


@dataclass(frozen=True)
class NearTie:
    """Greedy choice whose margin is below the noise of the logits.

    Attributes:
        position: Index among the new tokens, from 0.
        token: Chosen token.
        runner_up: Second most likely token.
        margin: Difference of their logits in the pass that decided.
    """

    position: int
    token: int
    runner_up: int
    margin: float


@dataclass(frozen=True)
class Round:
    """Committed tokens of one draft-and-verify round and the outcome of its draft.

    `logprobs` are those of the committed tokens, None if they were not requested. `sources` names
    the drafter of each draft token. `drafter` and `num_draft_tokens` are the plan's; a drafter may
    propose fewer tokens. `is_block` is True if the draft was verified as a block. `min_confidence`
    is the plan's.
    """

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    logprobs: list[TokenLogprobs] | None = None
    sources: tuple[str, ...] = ()
    near_ties: tuple[NearTie, ...] = ()
    drafter: str = PLAIN
    num_draft_tokens: int = 0
    is_block: bool = False
    min_confidence: float = 0.0


@dataclass(frozen=True)
class RoundPlan:
    """Drafter and K (`num_draft_tokens`) of the next round.

    The drafter may propose fewer tokens; the round takes 2K + 1 uniforms in any case. `name` is
    the drafter's in statistics, PLAIN if K = 0. With `is_block`, the draft is verified as a block
    if the sampling options allow it. Both are known before a token is drafted, on which the accept
    rule must not depend. `min_confidence` is that of the draft's request.
    """

    name: str
    drafter: Drafter
    num_draft_tokens: int
    is_block: bool = False
    min_confidence: float = 0.0


class Plan(Protocol):
    """Choice of drafter and K for each round."""

    @property
    def max_draft_tokens(self) -> int:
        """Largest K that it may choose."""

    def next(self, history: History, num_left: int) -> RoundPlan:
        """Return the plan of the round after `history`, which needs at most `num_left` tokens.

        K must not depend on `num_left`, else a seed's text would depend on where a request ends.
        """

    def begin(self, history: History) -> StateObserver | None:
        """Begin a text; return a drafter that has to observe hidden states of the target."""

    def record(self, round_: Round) -> None:
        """Record the outcome of a round."""

    def truncate(self, length: int) -> None:
        """Roll the drafters back to the first `length` tokens of the text."""
