"""The speculative decoding loop: draft, verify, commit, again."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from specedge.options import Sampling

from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.logprobs import of_tokens
from ..sampling.scores import HostScores
from .model import LanguageModel
from .randomness import uniforms
from .round import NearTie, Plan, Referee, Round, Step, sources
from .timing import Stopwatch
from .verify import Draft, verify


class SpeculativeDecoder:
    """Generates with the target's distribution at fewer target passes.

    Between rounds the target's cache holds every committed token but the last: that one is
    pending, and leads the next verify pass. The `plan` chooses drafter and K of each round. With
    K = 0 a round is plain decoding. A `referee` reviews greedy verdicts where wider passes have
    other last bits.
    """

    judge = staticmethod(verify)  # here, so that the audit's self-test can plant a wrong one

    def __init__(
        self,
        target: LanguageModel,
        plan: Plan,
        watch: Stopwatch,
        referee: Referee | None = None,
    ) -> None:
        self.target = target
        self.plan = plan
        self.watch = watch
        self.referee = referee

    def rounds(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        max_new_tokens: int,
        num_logprobs: int | None = None,
    ) -> Generator[Round]:
        """Rounds until `max_new_tokens` are committed; a drawn round may overshoot by one.

        Each token has its log-probability and `num_logprobs` others', unless that is None.

        A round consumes 2K + 1 uniforms, whatever it uses of them: K draws, K tests, one for the
        recovered or bonus token. So what was committed never depends on where a request ends.
        """
        history = History(prompt)
        self._prefill(history.tokens)
        end = len(prompt) + max_new_tokens
        consumed = 0
        while (left := end - len(history.tokens)) > 0:
            step = self.plan.next(history, left)
            count = 2 * step.num_draft_tokens + 1
            us = uniforms(seed, consumed, count)
            yield self._round(step, history, sampling, us, left, num_logprobs)
            consumed += count

    def _prefill(self, tokens: list[int]) -> None:
        self.plan.truncate(0)
        kept = self.target.reuse(tokens[:-1])
        self.target.prefill(tokens[kept:-1])
        if self.referee:
            self.referee.begin(self.target.length)

    def _round(
        self,
        step: Step,
        history: History,
        sampling: Sampling,
        us: Floats,
        wanted: int,
        num_logprobs: int | None,
    ) -> Round:
        """Commit 1 to K + 1 tokens to `history`, of which `wanted` are still wanted.

        No more than these are drafted; at temperature 0 one fewer, since the target's pass yields
        one anyway. Drawn text must not do so: its tokens would depend on where the request ends.
        """
        k = step.num_draft_tokens
        with self.watch.part("sampling"):
            most = min(k, wanted - 1 if sampling.greedy else wanted)
            draft = step.drafter.propose(history, most, sampling, us[:k]) if most else Draft([])
        scores = self.target.forward([history.tokens[-1], *draft.tokens])
        with self.watch.part("sampling"):
            verdict = self.judge(draft, scores, sampling, history, us[k : 2 * k], float(us[-1]))
            near_ties: tuple[NearTie, ...] = ()
            if self.referee:
                if num_logprobs is not None:
                    scores = HostScores(scores.array().copy())  # it may run passes
                verdict, near_ties = self.referee.review(
                    verdict, draft.tokens, scores, sampling, history
                )
            committed = [*draft.tokens[: verdict.num_accepted], verdict.next_token]
            logprobs = of_tokens(scores, committed, num_logprobs)
        history.extend(committed)
        self.target.truncate(len(history.tokens) - 1)
        self.plan.truncate(len(history.tokens) - 1)
        origin = sources(step.drafter, draft)
        n = verdict.num_accepted
        ended = Round(committed, len(draft.tokens), n, logprobs, origin, near_ties, step.name, k)
        self.plan.ended(ended)
        return ended
