"""Pair of models that an audit checks, its prompts, and the parts of its decoder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from specedge.bundle.manifest import ModelEntry
from specedge.bundle.token_readings import TokenReadings
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.protocols import (
    Drafter,
    LanguageModel,
    Round,
    open_source,
    run_operations,
)
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.decoding.verification import Verdict, verify
from specedge.runtime.drafters.draft_head import create_drafter
from specedge.runtime.drafters.text_reading import TextReading, TranslatedText
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits
from specedge.runtime.sampling.probabilities import probabilities
from specedge.runtime.sampling.source import Source
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS, Sampling

from .budget import Budget, Clock
from .memoization import MemoizedModel
from .noise import Array, CachedModel, row_differences

ROWS = 64  # tokens of each text
MAX_K = 8  # every K up to this one is tested, and the largest that may be planned


@dataclass(frozen=True)
class DecoderParts:
    """Parts of a decoder; an injected defect replaces one.

    `batch` replaces the passes over several slots, which the batched check runs.
    """

    accept_rule: Callable[..., Verdict] = verify
    target: Callable[[Any], Any] = lambda model: model
    drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter
    batch: Callable[[Any], Any] = lambda batch: batch


@dataclass(frozen=True)
class AuditPrompt:
    """Tokens to continue, with the name that the report shows.

    The text of an encoder-decoder has a `source`, and `text` of more tokens for single passes.
    """

    name: str
    tokens: tuple[int, ...]
    source: Source | None = None
    text: tuple[int, ...] = ()


@dataclass
class AuditedPair:
    """Pair of models, prompts, and the noise of its logits.

    Attributes:
        target: The target.
        draft: The draft model, or a SubstituteDraft.
        sizes: Manifest entries by role, for vocabulary and context.
        num_draft_tokens: K of the bundle.
        tolerance: Largest difference of two correct graphs, relative to the largest value.
        prompts: Prompts of the checks.
        max_first_length: Longest first pass; see `SpeculativeDecoder`.
        parts: Parts of the decoder.
        noise: Largest dependence of logits on the pass length, by role.
        seconds_per_pass: Seconds of a step of the target with a draw.
        memory: Memoized models by role.
        readings: The draft's tokens for each of the target's; None if they are the same.
    """

    target: CachedModel
    draft: CachedModel
    sizes: Mapping[str, ModelEntry]
    num_draft_tokens: int
    tolerance: float
    prompts: list[AuditPrompt]
    max_first_length: int = 1
    parts: DecoderParts = field(default_factory=DecoderParts)
    noise: dict[str, float] = field(default_factory=dict)
    seconds_per_pass: float = 0.0
    memory: dict[str, MemoizedModel] = field(default_factory=dict)
    readings: TokenReadings | None = None

    @property
    def roles(self) -> list[str]:
        """Roles of the bundle's models."""
        return ["target"] if isinstance(self.draft, SubstituteDraft) else ["target", "draft"]

    @property
    def ks(self) -> range:
        """K of sampled texts: 1 to the bundle's K, at least to 2, to test consecutive tokens."""
        return range(1, max(2, self.num_draft_tokens) + 1)

    @property
    def greedy_ks(self) -> list[int]:
        """K of greedy texts, including all that rounds may be planned with."""
        most = max(MAX_K, self.num_draft_tokens)
        return sorted({*range(1, most + 1), MAX_EXPORTED_DRAFT_TOKENS})

    @property
    def greedy_prompts(self) -> list[AuditPrompt]:
        """Prompts of greedy texts; the last one is long, to test prefix cache reuse."""
        most = max(1, min(2 * ROWS, self.sizes["target"].context_length // 2))
        return [
            *self.prompts,
            dataclasses.replace(
                self.prompts[0],
                name="all prompts concatenated",
                tokens=tuple(self.text("target", most)),
            ),
        ]

    def time_passes(self, clock: Clock) -> None:
        """Measure the seconds of a step of the target with a draw: the median of 5."""
        text, durations = self.text("target"), []
        self.target.truncate(0)
        for i in range(5):
            start = clock.used
            row = self.target.forward([text[i % len(text)]])[-1]
            probabilities(row.array(), Sampling(1.0, top_p=0.9), History(text), row.ids)
            durations.append(clock.used - start)
        self.target.truncate(0)
        self.seconds_per_pass = median(durations)

    def measure(self, budget: Budget) -> None:
        """Measure the noise of the models, once."""
        if self.noise:
            return
        for role, part in (("draft", 0.5), ("target", 1.0)):
            if role not in self.roles:
                continue
            # Noise of a draft with block-wise weights is rare, so it gets half of the time.
            tokens, lengths = self.text(role), [1, *(k + 1 for k in self.greedy_ks)]
            share = budget.share(part)
            differences = row_differences(getattr(self, role), tokens, lengths, share)
            self.noise[role] = max((d.largest for d in differences.values()), default=0.0)

    @property
    def depends_on_rounds(self) -> bool:
        """True if the draft's distributions depend on the rounds, and not on the text alone."""
        return depends_on_rounds(self.sizes["draft"])

    def memoized(self, role: str) -> MemoizedModel:
        """Return a memoized model, shared by all settings and parts.

        The target with perturbed logits replaces a draft whose rows depend on the rounds.
        """
        inner: CachedModel = getattr(self, role)
        if role == "draft" and self.depends_on_rounds and role not in self.memory:
            inner = SubstituteDraft(self.target.with_new_cache())
        model = self.memory.setdefault(role, MemoizedModel(inner))
        model.refresh()
        return model

    def text(self, role: str, most: int = ROWS) -> list[int]:
        """Return up to `most` tokens that a model can read: the prompts in sequence."""
        endless = itertools.cycle(
            token for prompt in self.prompts for token in prompt.text or prompt.tokens
        )
        count = min(most, self.sizes[role].context_length)
        return self.reading(role).read([*itertools.islice(endless, count)], 0)[:count]

    def reading(self, role: str) -> TextReading:
        """Return a new reading of texts by a model."""
        if role == "draft" and self.readings is not None:
            return TranslatedText(self.readings)
        return TextReading(self.sizes[role].vocab_size)

    def decoder(
        self,
        num_draft_tokens: int,
        target: LanguageModel | None = None,
        draft: LanguageModel | None = None,
        draft_sizes: ModelEntry | None = None,
        drafter: Drafter | None = None,
    ) -> SpeculativeDecoder:
        """Return a decoder with these parts; by default it drafts with the draft model."""
        sizes = draft_sizes or self.sizes["draft"]
        readings = self.readings if draft_sizes is None else None
        drafter = drafter or create_drafter(draft or self.draft, sizes, readings)
        decoder = SpeculativeDecoder(
            self.parts.target(target or self.target),
            FixedPlan(self.parts.drafter(drafter), num_draft_tokens),
            Stopwatch(),
            max_first_length=self.max_first_length,
            max_length=self.sizes["target"].context_length,
        )
        decoder.accept_rule = self.parts.accept_rule
        return decoder

    def open(self, role: str, source: Source | None, model: LanguageModel | None = None) -> None:
        """Open a prompt's source in a model, by default the one of the role."""
        model = model or getattr(self, role)
        drafter = create_drafter(model, self.sizes[role])
        run_operations(open_source(model, drafter.readable_source(source)))

    def scores_after(self, role: str, prompt: AuditPrompt, new: Sequence[int]) -> Logits:
        """Return a model's logits for each new token, from one pass without rollback. [n rows]"""
        model: CachedModel = getattr(self, role)
        reading, num_prompt_tokens = self.reading(role), len(prompt.tokens)
        fed = reading.read([*prompt.tokens, *new[:-1]], 0)
        start = reading.length(num_prompt_tokens) - 1
        self.open(role, prompt.source)
        model.truncate(0)
        model.prefill(fed[:start])
        logits = model.forward(fed[start:])
        ends = [reading.length(num_prompt_tokens + i) - start for i in range(len(new))]
        if ends[-1] == len(ends):
            return logits
        return Logits(logits.array()[[end - 1 for end in ends]], logits.ids)

    def distributions(
        self, role: str, sampling: Sampling, prompt: AuditPrompt, new: Sequence[int]
    ) -> Iterator[Array]:
        """Yield the distribution of each new token given the text before it. [V] each"""
        logits, size = self.scores_after(role, prompt, new), self.sizes["target"].vocab_size
        for i in range(len(new)):
            row, history = logits[i], History(prompt.tokens, new[:i])
            yield probabilities(row.array(), sampling, history, row.ids).row(size)

    def short_prompt(self, index: int, num_new: int) -> AuditPrompt:
        """Return the end of a prompt that leaves room for new tokens in both contexts."""
        prompt = self.prompts[index % len(self.prompts)]
        return dataclasses.replace(prompt, tokens=prompt.tokens[-max(1, self._context - num_new) :])

    def longest(self, num_new: int) -> int:
        """Return the number of new tokens, at most `num_new`, that leave half of both contexts."""
        return max(1, min(num_new, self._context // 2))

    @property
    def _context(self) -> int:
        return min(sizes.context_length for sizes in self.sizes.values())


class Wrapper:
    """Base class of models and drafters that change another one, and have its other attributes."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class SubstituteDraft(Wrapper):
    """Draft model for a bundle without one: the target with perturbed logits.

    Its distributions overlap the target's by about half, so that the accept rule and the residual
    distribution are both tested.
    """

    batch, has_draft_graphs = None, False  # which would return the target's logits

    def __init__(self, target: CachedModel) -> None:
        super().__init__(target)
        self._offsets = np.zeros(0, np.float32)

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        rows = self._wrapped.forward(tokens, num_rows).array()
        if len(self._offsets) != rows.shape[1]:
            random = np.random.default_rng(0)
            self._offsets = random.standard_normal((rows.shape[1],), np.float32)
        return Logits(rows + self._offsets)

    def with_new_cache(self) -> SubstituteDraft:
        return SubstituteDraft(self._wrapped.with_new_cache())


def depends_on_rounds(draft: ModelEntry) -> bool:
    """Return True if a draft's distributions depend on the rounds, and not on the text alone.

    A draft head reads hidden states, and a parallel draft predicts several tokens at once.
    """
    return draft.reads_hidden or draft.mask_token is not None


def first_tokens(rounds: Sequence[Round], num_new: int) -> list[int]:
    """Return the first `num_new` tokens that rounds committed."""
    return [token for round_ in rounds for token in round_.tokens][:num_new]


def tested_tokens(rounds: Sequence[Round], num_new: int) -> Iterator[tuple[int, int, bool]]:
    """Yield each tested draft token: position in the text and in its round, and acceptance.

    Positions are below `num_new`.

    A token is tested if all tokens before it in its round were accepted. It is accepted with
    probability sum min(t, d / p), where p is the joint ratio of the tokens before it in a draft
    that is verified as a block, else 1.
    """
    start = 0
    for round_ in rounds:
        num_tested = min(round_.num_accepted + 1, round_.num_drafted, num_new - start)
        for i in range(num_tested):
            yield start + i, i, i < round_.num_accepted
        start += len(round_.tokens)


def conditional_acceptance(target: Array, draft: Array, ratio: float) -> float:
    """Return sum min(t, d / p) for a joint ratio p. [V], [V]"""
    return float(np.minimum(ratio * target, draft).sum(dtype=np.float64)) / ratio


def joint_ratio(target: Array, draft: Array, token: int, ratio: float) -> float:
    """Return the joint ratio after one more token: min(1, p t(x) / d(x)). [V], [V]"""
    joint = ratio * float(target[token])
    return joint / float(draft[token]) if joint < draft[token] else 1.0
