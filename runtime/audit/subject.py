"""What is audited: a pair's models and the parts that its decoder is put together from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from specedge.options import Sampling

from ..drafters.draft_model import PLACEHOLDER, DraftModel
from ..loop.decoding import SpeculativeDecoder
from ..loop.model import LanguageModel
from ..loop.round import Drafter, Round
from ..loop.timing import Stopwatch
from ..planning.plans import Fixed
from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.probabilities import probabilities
from .budget import Budget
from .cached import Cached
from .noise import row_differences
from .remembering import Remembering

ROWS = 64  # tokens of the texts that are run and drawn
PLANNED = 8  # the largest K that rounds are planned with, where the bundle says no more

Array = NDArray[Any]


@dataclass(frozen=True)
class Parts:
    """What a decoder is put together from; a planted defect has another one."""

    decoder: type[SpeculativeDecoder] = SpeculativeDecoder
    target: Callable[[Any], Any] = lambda model: model
    drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter


@dataclass(frozen=True)
class Sizes:
    """Tokens that a model knows and positions that it has."""

    vocab_size: int
    context_length: int


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue, and what the report calls them."""

    name: str
    tokens: tuple[int, ...]


@dataclass
class Subject:
    """A pair, the prompts for it, and how much its logits depend on how many rows share a pass.

    `tolerance` is the largest difference between two right graphs, relative to the largest value.
    """

    target: Cached
    draft: Cached
    target_sizes: Sizes
    draft_sizes: Sizes
    num_draft_tokens: int
    tolerance: float
    prompts: list[Prompt]
    parts: Parts = field(default_factory=Parts)
    noise: dict[str, float] = field(default_factory=dict)
    seconds_per_pass: float = 0.0
    memory: dict[str, Remembering] = field(default_factory=dict)

    @property
    def ks(self) -> range:
        """The K that drawn texts go through: all that the bundle is for, and 2, without which no
        draft token follows another."""
        return range(1, max(2, self.num_draft_tokens) + 1)

    @property
    def greedy_ks(self) -> range:
        """The K that greedy texts go through: also those that rounds are planned with."""
        return range(1, max(PLANNED, self.num_draft_tokens) + 1)

    def measure(self, budget: Budget) -> None:
        """Find the noise of both models, and what a pass of the target takes; once."""
        if self.noise:
            return
        for role in ("target", "draft"):
            tokens, lengths = self.text(role), [1, *(k + 1 for k in self.greedy_ks)]
            found = row_differences(getattr(self, role), tokens, lengths, budget)
            self.noise[role] = max((d.largest for d in found.values()), default=0.0)
        begun = budget.clock.used
        self.target.truncate(0)
        for token in self.text("target")[:4]:
            self.target.forward([token])
        self.seconds_per_pass = (budget.clock.used - begun) / 4

    def remembered(self, role: str) -> Remembering:
        """A model that keeps its rows, for all settings and parts."""
        model = self.memory.setdefault(role, Remembering(getattr(self, role)))
        model.refresh()
        return model

    def text(self, role: str) -> list[int]:
        """Up to `ROWS` tokens for a model to read: prompts, one after the other."""
        sizes = self.target_sizes if role == "target" else self.draft_sizes
        endless = itertools.cycle(token for prompt in self.prompts for token in prompt.tokens)
        count = min(ROWS, sizes.context_length)
        return [known(token, sizes) for token in itertools.islice(endless, count)]

    def decoder(
        self,
        num_draft_tokens: int,
        target: LanguageModel | None = None,
        draft: LanguageModel | None = None,
        draft_sizes: Sizes | None = None,
    ) -> SpeculativeDecoder:
        """The decoder that a pipeline makes, of these parts."""
        sizes = draft_sizes or self.draft_sizes
        drafter = DraftModel(
            draft or self.draft,
            context_length=sizes.context_length,
            vocab_size=sizes.vocab_size,
        )
        return self.parts.decoder(
            self.parts.target(target or self.target),
            Fixed(self.parts.drafter(drafter), num_draft_tokens),
            Stopwatch(),
        )

    def short_prompt(self, index: int, num_new: int) -> list[int]:
        """The end of a prompt, so that with new tokens it fits both contexts."""
        context = min(self.target_sizes.context_length, self.draft_sizes.context_length)
        tokens = self.prompts[index % len(self.prompts)].tokens
        return list(tokens[-max(1, context - num_new) :])

    def longest(self, num_new: int) -> int:
        """How many new tokens leave half of both contexts to a prompt; at most `num_new`."""
        context = min(self.target_sizes.context_length, self.draft_sizes.context_length)
        return max(1, min(num_new, context // 2))


def known(token: int, sizes: Sizes) -> int:
    """What a model is fed for a token."""
    return token if token < sizes.vocab_size else PLACEHOLDER


def logits_after(
    model: LanguageModel, sizes: Sizes, prompt: Sequence[int], new: Sequence[int]
) -> Floats:
    """A model's rows for each of the new tokens, in one pass: no drafter, no rollback. [n, V]"""
    fed = [known(token, sizes) for token in (*prompt, *new[:-1])]
    model.truncate(0)
    model.prefill(fed[: len(prompt) - 1])
    return model.forward(fed[len(prompt) - 1 :]).array()


def distributions(
    logits: Floats, sampling: Sampling, prompt: Sequence[int], new: Sequence[int], vocab_size: int
) -> Iterator[Array]:
    """The distribution of each new token given the text before it. [V] each"""
    for i, row in enumerate(logits):
        yield probabilities(row, sampling, History(prompt, new[:i])).row(vocab_size)


def cut(rounds: Sequence[Round], num_new: int) -> list[int]:
    """The first `num_new` tokens that rounds committed."""
    return [token for round_ in rounds for token in round_.tokens][:num_new]
