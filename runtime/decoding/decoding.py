"""Speculative decoding loop: draft, verify, commit, roll back."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from specedge.sampling_options import Sampling

from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.logits import Logits
from ..sampling.logprobs import token_logprobs
from ..sampling.source import Source
from .constrained_draft import propose
from .near_ties import NearTieResolver
from .protocols import (
    Feed,
    HiddenStateModel,
    LanguageModel,
    NearTie,
    Operation,
    Operations,
    Plan,
    Round,
    RoundPlan,
    StateObserver,
    draft_sources,
    open_source,
)
from .random_numbers import Uniforms
from .timing import Stopwatch
from .verification import Draft, DraftRequest, verify


@dataclass(eq=False)
class SpeculativeDecoder:
    """Decoder with the target's distribution and fewer target passes.

    Between rounds, the target's cache holds every committed token but the last, which is pending
    and becomes the first token of the next verify pass. With N committed tokens, a round that
    drafts n and accepts a extends the cache from N - 1 to N + n tokens and rolls it back to N + a.
    The `plan` selects drafter and K of each round; K = 0 is plain decoding. A `resolver` reviews
    verdicts at temperature 0 if passes are not pass-length-invariant.

    If the uncached rest of the prompt and the first round's K tokens fit into `max_first_length`,
    the first verify pass includes both, which saves a pass. Passes of all lengths up to that one
    must be pass-length-invariant, since another K may take two passes. The first verify pass
    includes the whole rest of the prompt or one token: if K determined the split, logits could
    differ in passes that are not invariant. A long prompt is prefilled `chunk_length` tokens at a
    time, before the first round is planned. `max_length` is the maximum length of a text.

    A drafter may observe the target's hidden states of each pass. It truncates them with the text.

    Attributes:
        num_reused_tokens: Number of tokens of the prompt that were in the target's cache. The
            prompt of an encoder-decoder is its source.
    """

    accept_rule = staticmethod(verify)  # replaced by tests and `specedge verify --self-test`

    target: LanguageModel
    plan: Plan
    stopwatch: Stopwatch
    resolver: NearTieResolver | None = None
    max_first_length: int = 1
    max_length: int = sys.maxsize
    chunk_length: int = sys.maxsize
    num_reused_tokens: int = field(default=0, init=False)
    _observer: StateObserver | None = field(default=None, init=False)

    def rounds(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        max_new_tokens: int,
        num_logprobs: int | None = None,
        source: Source | None = None,
    ) -> Generator[Round]:
        """Yield rounds, whose passes run one at a time; arguments are those of `decode`."""
        steps = self.decode(prompt, sampling, seed, max_new_tokens, num_logprobs, source)
        result = None
        while True:
            try:
                step = steps.send(result)
            except StopIteration:
                return
            result = None
            if isinstance(step, Round):
                yield step
            else:
                result = step.run()

    def decode(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        max_new_tokens: int,
        num_logprobs: int | None = None,
        source: Source | None = None,
    ) -> Generator[Operation | Round, Any]:
        """Yield operations and rounds until `max_new_tokens` tokens are committed.

        Each operation is sent its result. The decoder itself runs no pass.

        Above temperature 0 the last round may commit tokens too many, which the caller drops.
        A round consumes 2K + 1 uniforms even if it uses fewer (K draws, K acceptance tests, and one
        for the recovered or bonus token), so its random numbers do not depend on earlier outcomes.

        Args:
            prompt: Tokens to continue.
            sampling: Sampling options.
            seed: Seed of the uniforms.
            max_new_tokens: Number of tokens to commit.
            num_logprobs: Number of most likely tokens whose log-probabilities are returned with
                each committed token's; None for no log-probabilities.
            source: Source of an encoder-decoder's text; None leaves the models' sources open.
        """
        history = History(prompt, source=source)
        self._observer = self.plan.begin(history)
        end = len(prompt) + max_new_tokens
        stream = Uniforms(seed)
        num_unread = yield from self._prefill(history)
        is_first = True
        while (num_left := end - len(history.tokens)) > 0:
            round_plan = self.plan.next(history, num_left)
            numbers = stream.take(2 * round_plan.num_draft_tokens + 1)
            if is_first:
                num_draft_tokens = round_plan.num_draft_tokens
                num_unread = yield from self._prefill_rest(prompt, num_unread, num_draft_tokens)
            round_ = yield from self._round(
                round_plan, history, sampling, numbers, num_left, num_logprobs, num_unread
            )
            is_first, num_unread = False, 1
            yield round_

    def _prefill(self, history: History) -> Operations[int]:
        """Prefill the prompt's uncached chunks but the last; return the number of tokens left."""
        source, tokens = history.source, history.tokens
        is_new = yield from open_source(self.target, source)
        num_cached = self.target.reuse(tokens[:-1])
        if self._observer is not None:
            num_cached = self._observer.begin(history, num_cached)
            self.target.truncate(num_cached)
        self.num_reused_tokens = num_cached
        if source is not None:
            self.num_reused_tokens = 0 if is_new else source.length
        while (chunk_end := num_cached + self.chunk_length) < len(tokens) - 1:
            yield Feed(self.target, tokens[num_cached:chunk_end], 0)
            num_cached = chunk_end
            if self._observer is not None:
                self._observe(self._observer)
                yield from self._observer.read()
        return len(tokens) - num_cached

    def _prefill_rest(
        self, prompt: Sequence[int], num_unread: int, num_draft_tokens: int
    ) -> Operations[int]:
        """Prefill the rest of the prompt but the tokens that the first verify pass includes.

        Returns:
            Their number.
        """
        if num_unread + num_draft_tokens > self.max_first_length:
            if num_unread > 1:
                yield Feed(self.target, prompt[-num_unread:-1], 0)
                if self._observer is not None:
                    self._observe(self._observer)
            num_unread = 1
        if self.resolver:
            self.resolver.begin(self.target.length)
        return num_unread

    def _observe(self, observer: StateObserver) -> None:
        """Let a drafter observe the hidden states of the target's last pass."""
        hidden = cast(HiddenStateModel, self.target).hidden
        observer.observe(self.target.length - len(hidden), hidden)

    def _round(
        self,
        round_plan: RoundPlan,
        history: History,
        sampling: Sampling,
        numbers: Floats,
        num_left: int,
        num_logprobs: int | None,
        num_unread: int,
    ) -> Operations[Round]:
        """Commit 1 to K + 1 tokens to `history`; the target has not read its last `num_unread`.

        If the target's choices are deterministic, the draft has fewer than `num_left` tokens, as
        the verify pass yields the last one. When sampling, K tokens are drafted unless the text
        would exceed `max_length`: the last token must not come from another row than in a longer
        request, in block verification a token's acceptance depends on the tokens after it, and the
        plan's choices depend on the lengths of drafts.
        """
        k, is_block = round_plan.num_draft_tokens, round_plan.is_block and sampling.allows_blocks
        most = num_left - 1 if sampling.chooses else self.max_length - history.length
        draft_uniforms, accept_uniforms = numbers[:k], numbers[k : 2 * k]
        last_uniform = float(numbers[-1])
        drafter, draft = round_plan.drafter, Draft([])
        if limit := min(k, most):
            with self.stopwatch.part("sampling"):
                request = DraftRequest(
                    history, limit, sampling, draft_uniforms, round_plan.min_confidence
                )
                draft = yield from propose(drafter, request)
        tokens = [*history.last(num_unread), *draft.tokens]
        logits = yield Feed(self.target, tokens, len(draft.tokens) + 1)
        if self._observer is not None:
            self._observe(self._observer)
        with self.stopwatch.part("sampling"):
            verdict = self.accept_rule(
                draft, logits, sampling, history, accept_uniforms, last_uniform, is_block
            )
            near_ties: tuple[NearTie, ...] = ()
            if self.resolver:
                if num_logprobs is not None:
                    # The resolver's own passes overwrite the logits.
                    logits = Logits(logits.array().copy())
                verdict, near_ties = yield from self.resolver.review(
                    verdict, draft.tokens, logits, sampling, history
                )
            committed = [*draft.tokens[: verdict.num_accepted], verdict.next_token]
            logprobs = token_logprobs(logits, committed, num_logprobs)
        history.extend(committed)
        if sampling.noise:
            sampling.noise.forget(history.length)
        self.target.truncate(history.length - 1)
        if k:
            self.plan.truncate(history.length - 1)
        round_ = Round(
            committed,
            num_drafted=len(draft.tokens),
            num_accepted=verdict.num_accepted,
            logprobs=logprobs,
            sources=draft_sources(drafter, draft),
            near_ties=near_ties,
            drafter=round_plan.name,
            num_draft_tokens=k,
            is_block=is_block,
            min_confidence=round_plan.min_confidence,
        )
        self.plan.record(round_)
        return round_
