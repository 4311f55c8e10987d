"""The speculative decoding loop: draft, verify, commit, again."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from specedge.options import Sampling

from .distribution import Floats
from .drafters import Drafter, sources
from .logprobs import TokenLogprobs, of_tokens
from .model import LanguageModel
from .near_ties import NearTie, Referee
from .past import Past
from .plans import Fixed, Plan, Step
from .randomness import uniforms
from .sampling import Draft, verify
from .stats import Stopwatch


@dataclass(frozen=True)
class Round:
    """One draft-and-verify pass: the tokens it committed and how the draft fared.

    `logprobs` are those of the committed tokens, None if they were not asked for. `sources` names
    the drafter of each drafted token. `near_ties` are choices within the noise. `drafter` and
    `num_draft_tokens` are what was chosen for the round; a drafter may propose fewer.
    """

    tokens: list[int]
    num_drafted: int
    num_accepted: int
    logprobs: list[TokenLogprobs] | None = None
    sources: tuple[str, ...] = ()
    near_ties: tuple[NearTie, ...] = ()
    drafter: str = "plain"
    num_draft_tokens: int = 0


class SpeculativeDecoder:
    """Generates with the target's distribution at fewer target passes.

    Between rounds the target's cache holds every committed token but the last: that one is
    pending, and leads the next verify pass. With `num_draft_tokens` 0 it is plain decoding. A
    `referee` judges greedy drafts where wider passes have other last bits. A `plan` chooses drafter
    and K of each round instead.
    """

    judge = staticmethod(verify)  # here, so that the audit's self-test can plant a wrong one

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        num_draft_tokens: int,
        watch: Stopwatch,
        referee: Referee | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.target = target
        self.watch = watch
        self.referee = referee
        self.plan = plan or Fixed(drafter, num_draft_tokens)

    def rounds(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        max_new_tokens: int,
        num_logprobs: int | None = None,
    ) -> Generator[Round]:
        """Rounds until at least `max_new_tokens` are committed; the last may overshoot by one.

        Each token has its log-probability and `num_logprobs` others', unless that is None.

        A round consumes 2K + 1 uniforms, whatever it uses of them: K draws, K tests, one for the
        recovered or bonus token. So what was committed never depends on where a request ends.
        """
        past = Past(prompt)
        self._prefill(past.tokens)
        end = len(prompt) + max_new_tokens
        consumed = 0
        while (left := end - len(past.tokens)) > 0:
            step = self.plan.next(past, left)
            count = 2 * step.num_draft_tokens + 1
            us = uniforms(seed, consumed, count)
            yield self._round(step, past, sampling, us, left, num_logprobs)
            consumed += count

    def _prefill(self, tokens: list[int]) -> None:
        self.target.truncate(0)
        self.plan.truncate(0)
        self.target.prefill(tokens[:-1])
        if self.referee:
            self.referee.begin(self.target.length)

    def _round(
        self,
        step: Step,
        past: Past,
        sampling: Sampling,
        us: Floats,
        limit: int,
        num_logprobs: int | None,
    ) -> Round:
        """Commit 1 to K + 1 tokens to `past`; no more than `limit` are drafted."""
        k = step.num_draft_tokens
        with self.watch.part("sampling"):
            most = min(k, limit)
            draft = step.drafter.propose(past, most, sampling, us[:k]) if most else Draft([])
        logits = self.target.forward([past.tokens[-1], *draft.tokens])
        with self.watch.part("sampling"):
            verdict = self.judge(draft, logits, sampling, past, us[k : 2 * k], float(us[-1]))
            near_ties: tuple[NearTie, ...] = ()
            if self.referee:
                logits = logits if num_logprobs is None else logits.copy()  # it may run passes
                verdict, near_ties = self.referee.review(
                    verdict, draft.tokens, logits, sampling, past
                )
            committed = [*draft.tokens[: verdict.num_accepted], verdict.next_token]
            logprobs = of_tokens(logits, committed, num_logprobs)
        past.extend(committed)
        self.target.truncate(len(past.tokens) - 1)
        self.plan.truncate(len(past.tokens) - 1)
        origin = sources(step.drafter, draft)
        n = verdict.num_accepted
        ended = Round(committed, len(draft.tokens), n, logprobs, origin, near_ties, step.name, k)
        self.plan.ended(ended)
        return ended
