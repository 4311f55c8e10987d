"""What the loop asks of a language model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

from specedge.sampling_options import Sampling

from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.scores import Scores
from .verify import Draft


def shared_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common before they differ."""
    for i, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return i
    return min(len(first), len(second))


class LanguageModel(Protocol):
    """A model with a KV cache over V vocabulary entries."""

    @property
    def length(self) -> int:
        """How many tokens are in the cache."""

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Scores:
        """Append T tokens to the cache; the logits of the last R of them, of all unless told, to be
        read as `Scores` says. [T] -> [R, V]

        The last row predicts the token after tokens[-1], and so on. A draft's may lack tokens: it
        says which it has.
        """

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append any number of tokens to the cache without computing logits."""

    def reuse(self, tokens: Sequence[int]) -> int:
        """Keep only the longest prefix that the cache and `tokens` share; its length."""

    def truncate(self, length: int) -> None:
        """Forget every cached token past `length`."""


@runtime_checkable
class DraftingModel(LanguageModel, Protocol):
    """A model that may draft without its host."""

    def draft(
        self,
        tokens: Sequence[int],
        count: int,
        history: History,
        sampling: Sampling,
        uniforms: Floats,
    ) -> Draft | None:
        """Append 1 or 2 tokens, which end a text, and give a draft of `count` tokens that follow,
        the one that passes would give; its last token alone is not appended. None, and nothing
        done, where passes are to do it.
        """


class LoadedModel(LanguageModel, Protocol):
    """A model that holds memory of its own."""

    def close(self) -> None:
        """Give it back; the model is not used again."""


class TargetModel(LoadedModel, Protocol):
    """A model that knows what was measured of its passes."""

    def shared(self, tokens: Sequence[int]) -> int:
        """How long the prefix is that the cache and `tokens` share."""

    @property
    def invariant_lengths(self) -> Collection[int]:
        """Pass lengths T at which a row's logits had the bits of longer passes, as measured at
        export, and on other devices than the CPU at load.
        """

    @property
    def float32_error(self) -> float:
        """How far logits were from float64 at export, relative to the largest."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round what they multiply: then a last bit may turn all that follows."""

    @property
    def fast_length(self) -> int:
        """The longest pass that kernels here are made for, beyond which they are much slower."""

    @property
    def num_experts(self) -> int:
        """Among how many experts a layer chooses; 0 where none does."""
