"""One request's rounds: what runs them, what they cost, and what they gave."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from specedge.errors import SpecEdgeError
from specedge.request import GenerationRequest
from specedge.sampling_options import Sampling

from ..decoding.decoding import SpeculativeDecoder
from ..decoding.invariance import ANY, Noise
from ..decoding.near_ties import NearTieResolver
from ..decoding.protocols import Plan, Round
from ..decoding.timing import Stopwatch, TimedModel
from ..planning.plans import AutoPlan
from ..sampling.logprobs import TokenLogprobs
from .slots import Slot
from .stats import Stats, stats_of


@dataclass
class Run:
    """The rounds of a request; `prompt`, `sampling` and `seed` are derived from it.

    Of a long prompt `chunk_length` tokens are read at a time; what is left shares the
    first round's pass where both fit into `max_first_length`.
    `again` is the target where it decides near-ties. `logit_noise`, which `noise` measures, is by
    how much a logit may differ from plain decoding's, 0 if by no bit. `drafter` is the name of what
    drafts, AUTO where rounds choose.
    """

    request: GenerationRequest
    prompt: list[int]
    sampling: Sampling
    seed: int
    limit: int
    plan: Plan
    target: TimedModel
    again: TimedModel
    draft: TimedModel | None  # None without a draft model
    watch: Stopwatch
    noise: Noise
    drafter: str
    chunk_length: int
    max_first_length: int
    done: list[Round] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)  # of these
    num_new_tokens: int = field(default=0, init=False)
    num_reused_tokens: int = field(default=0, init=False)
    logit_noise: float = field(default=0.0, init=False)

    def use(self, slot: Slot) -> None:
        """Run in the caches of a slot."""
        self.target.model = self.again.model = slot.target
        self.noise = slot.noise
        if self.draft is not None and slot.draft is not None:
            self.draft.model = slot.draft

    def rounds(self) -> Generator[Round | None]:
        """Run them; where wider passes have other last bits, greedy ones have a resolver.

        None comes before them, after each chunk of a long prompt but the last, so that other
        requests have their turns meanwhile. An exact request reads its prompt anew: what is cached
        may be of wider passes.
        """
        if self.request.exact:
            self.target.truncate(0)
        resolver = self._referee()
        longest = 1 if resolver or self.request.exact else self.max_first_length
        decoder = SpeculativeDecoder(self.target, self.plan, self.watch, resolver, longest)
        yield from self._reading(self.prompt[:-1])
        yield from decoder.rounds(
            self.prompt, self.sampling, self.seed, self.limit, self.request.logprobs
        )

    def _reading(self, tokens: list[int]) -> Generator[None]:
        """Read all but the last chunk of what the target's cache lacks; the decoder reads that."""
        self.num_reused_tokens = self.target.reuse(tokens)
        for start in range(self.num_reused_tokens, len(tokens), self.chunk_length):
            if (end := start + self.chunk_length) < len(tokens):
                self.target.prefill(tokens[start:end])
                yield

    def _referee(self) -> NearTieResolver | None:
        if not self.sampling.greedy:
            return None
        exact, k = self.request.exact, self.plan.max_draft_tokens
        with self.watch.part("noise"):
            self.logit_noise = self.noise.bound(self.prompt, k, trusting=not exact)
        if exact and self.logit_noise == ANY:
            raise SpecEdgeError(
                "this target chooses among experts, and on this device its passes of several "
                "tokens have other last bits than those of one, which may turn a choice; take "
                "0 draft tokens to be exact"
            )
        return NearTieResolver(self.again, self.logit_noise, exact) if self.logit_noise else None

    @property
    def stats(self) -> Stats:
        seconds, first = self.watch.seconds.copy(), self.target.seconds_of_first
        seconds["prefill"] -= first
        seconds["verify"] += first
        return stats_of(
            self.done,
            self.request.fixed_k or 0,
            seconds,
            num_prompt_tokens=len(self.prompt),
            num_new_tokens=self.num_new_tokens,
            num_reused_tokens=self.num_reused_tokens,
            num_draft_passes=self.draft.num_passes if self.draft else 0,
            num_target_passes=self.target.num_passes,
            num_exact_passes=self.again.num_passes,
        )

    @property
    def expected_speedup(self) -> float | None:
        """What planned rounds gained over the target alone, by the table of costs."""
        return self.plan.planner.expected_speedup if isinstance(self.plan, AutoPlan) else None
