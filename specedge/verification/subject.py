"""What is audited: a pair's models and the parts that its decoder is put together from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from specedge.bundle.manifest import ModelEntry
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.protocols import Drafter, LanguageModel, Round
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.drafters.draft_model import PLACEHOLDER, DraftModel
from specedge.runtime.planning.plans import Fixed
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS, Sampling

from .budget import Budget, Clock
from .cached import Array, Cached
from .noise import row_differences
from .remembering import Remembering

ROWS = 64  # tokens of the texts that are run and drawn
EVERY = 8  # all K up to this one are tried, and the largest that may be planned


@dataclass(frozen=True)
class Parts:
    """What a decoder is put together from; a planted defect has another one."""

    decoder: type[SpeculativeDecoder] = SpeculativeDecoder
    target: Callable[[Any], Any] = lambda model: model
    drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue, and what the report calls them."""

    name: str
    tokens: tuple[int, ...]


@dataclass
class Subject:
    """A pair, the prompts for it, and how much its logits depend on how many rows share a pass.

    `sizes` are the manifest's entries by role, of which vocabulary and context matter.
    `tolerance` is the largest difference between two right graphs, relative to the largest value,
    `max_first_length` what a decoder's first pass may read (see `SpeculativeDecoder`).
    """

    target: Cached
    draft: Cached  # a StandIn where the bundle has no draft model
    sizes: Mapping[str, ModelEntry]
    num_draft_tokens: int
    tolerance: float
    prompts: list[Prompt]
    max_first_length: int = 1
    parts: Parts = field(default_factory=Parts)
    noise: dict[str, float] = field(default_factory=dict)
    seconds_per_pass: float = 0.0
    memory: dict[str, Remembering] = field(default_factory=dict)

    @property
    def roles(self) -> list[str]:
        """The models that the bundle has."""
        return ["target"] if isinstance(self.draft, StandIn) else ["target", "draft"]

    @property
    def ks(self) -> range:
        """The K that drawn texts go through: all that the bundle is for, and 2, without which no
        draft token follows another."""
        return range(1, max(2, self.num_draft_tokens) + 1)

    @property
    def greedy_ks(self) -> list[int]:
        """The K that greedy texts go through: also those that rounds may be planned with."""
        most = max(EVERY, self.num_draft_tokens)
        return sorted({*range(1, most + 1), MAX_EXPORTED_DRAFT_TOKENS})

    @property
    def greedy_prompts(self) -> list[Prompt]:
        """Those that greedy texts continue, and last a longer one, of which caches hold a part."""
        most = max(1, min(2 * ROWS, self.sizes["target"].context_length // 2))
        return [*self.prompts, Prompt("all prompts in a row", tuple(self.text("target", most)))]

    def time_passes(self, clock: Clock) -> None:
        """Measure the seconds of a step of the target with a draw from its row: the median of 5."""
        text, took = self.text("target"), []
        self.target.truncate(0)
        for i in range(5):
            begun = clock.used
            row = self.target.forward([text[i % len(text)]])[-1]
            probabilities(row.array(), Sampling(1.0, top_p=0.9), History(text), row.ids)
            took.append(clock.used - begun)
        self.target.truncate(0)
        self.seconds_per_pass = median(took)

    def measure(self, budget: Budget) -> None:
        """Find the noise of the models, once."""
        if self.noise:
            return
        for role, part in (("draft", 0.5), ("target", 1.0)):
            if role not in self.roles:
                continue
            # A draft in blocks may lose few bits, and seldom: it needs a time of its own.
            tokens, lengths = self.text(role), [1, *(k + 1 for k in self.greedy_ks)]
            share = budget.share(part)
            found = row_differences(getattr(self, role), tokens, lengths, share)
            self.noise[role] = max((d.largest for d in found.values()), default=0.0)

    def remembered(self, role: str) -> Remembering:
        """A model that keeps its rows, for all settings and parts."""
        model = self.memory.setdefault(role, Remembering(getattr(self, role)))
        model.refresh()
        return model

    def text(self, role: str, most: int = ROWS) -> list[int]:
        """Up to so many tokens for a model to read: prompts, one after the other."""
        sizes = self.sizes[role]
        endless = itertools.cycle(token for prompt in self.prompts for token in prompt.tokens)
        count = min(most, sizes.context_length)
        return [known(token, sizes) for token in itertools.islice(endless, count)]

    def decoder(
        self,
        num_draft_tokens: int,
        target: LanguageModel | None = None,
        draft: LanguageModel | None = None,
        draft_sizes: ModelEntry | None = None,
        drafter: Drafter | None = None,
    ) -> SpeculativeDecoder:
        """The decoder that a pipeline makes, of these parts; with its draft model by default."""
        sizes = draft_sizes or self.sizes["draft"]
        drafter = drafter or DraftModel(
            draft or self.draft, context_length=sizes.context_length, vocab_size=sizes.vocab_size
        )
        return self.parts.decoder(
            self.parts.target(target or self.target),
            Fixed(self.parts.drafter(drafter), num_draft_tokens),
            Stopwatch(),
            max_first_length=self.max_first_length,
        )

    def scores_after(self, role: str, prompt: Sequence[int], new: Sequence[int]) -> Logits:
        """A model's rows for each new token, in one pass: no drafter, no rollback. [n rows]"""
        model: Cached = getattr(self, role)
        fed = [known(token, self.sizes[role]) for token in (*prompt, *new[:-1])]
        model.truncate(0)
        model.prefill(fed[: len(prompt) - 1])
        return model.forward(fed[len(prompt) - 1 :])

    def distributions(
        self, role: str, sampling: Sampling, prompt: Sequence[int], new: Sequence[int]
    ) -> Iterator[Array]:
        """The distribution of each new token given the text before it. [V] each"""
        scores, size = self.scores_after(role, prompt, new), self.sizes["target"].vocab_size
        for i in range(len(new)):
            row, history = scores[i], History(prompt, new[:i])
            yield probabilities(row.array(), sampling, history, row.ids).row(size)

    def short_prompt(self, index: int, num_new: int) -> list[int]:
        """The end of a prompt, so that with new tokens it fits both contexts."""
        tokens = self.prompts[index % len(self.prompts)].tokens
        return list(tokens[-max(1, self._context - num_new) :])

    def longest(self, num_new: int) -> int:
        """How many new tokens leave half of both contexts to a prompt; at most `num_new`."""
        return max(1, min(num_new, self._context // 2))

    @property
    def _context(self) -> int:
        return min(sizes.context_length for sizes in self.sizes.values())


class StandIn:
    """Draft model for the audit of a bundle without one: the target with other logits.

    Its distributions overlap the target's by about half, so that the accept rule and the residual
    distribution are both tested.
    """

    def __init__(self, target: Cached) -> None:
        self._target = target
        self._offsets = np.zeros(0, np.float32)

    @property
    def length(self) -> int:
        return self._target.length

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        rows = self._target.forward(tokens, num_rows).array()
        if len(self._offsets) != rows.shape[1]:
            random = np.random.default_rng(0)
            self._offsets = random.standard_normal((rows.shape[1],), np.float32)
        return Logits(rows + self._offsets)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._target.prefill(tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        return self._target.reuse(tokens)

    def truncate(self, length: int) -> None:
        self._target.truncate(length)

    def cache_rows(self, start: int, end: int) -> Sequence[Array]:
        return self._target.cache_rows(start, end)

    def twin(self) -> StandIn:
        return StandIn(self._target.twin())


def known(token: int, sizes: ModelEntry) -> int:
    """What a model is fed for a token."""
    return token if token < sizes.vocab_size else PLACEHOLDER


def cut(rounds: Sequence[Round], num_new: int) -> list[int]:
    """The first `num_new` tokens that rounds committed."""
    return [token for round_ in rounds for token in round_.tokens][:num_new]


def tested(rounds: Sequence[Round]) -> Iterator[tuple[int, int, bool]]:
    """Of each tested draft token, one whose predecessors in its round are accepted: its place in
    the text and in its round, and whether it was accepted.
    """
    start = 0
    for round_ in rounds:
        for i in range(min(round_.num_accepted + 1, round_.num_drafted)):
            yield start + i, i, i < round_.num_accepted
        start += len(round_.tokens)
