"""The speculative decoding loop: draft, verify, commit, again."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from specedge.sampling_options import Sampling

from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.logprobs import of_tokens
from ..sampling.scores import Scores
from .model import LanguageModel
from .proposing import propose
from .randomness import Uniforms
from .round import NearTie, Plan, Referee, Round, Step, sources
from .timing import Stopwatch
from .verify import Draft, verify


@dataclass(eq=False)
class SpeculativeDecoder:
    """Generates with the target's distribution at fewer target passes.

    Between rounds the target's cache holds every committed token but the last: that one is
    pending, and leads the next verify pass. Of N committed tokens a round that drafts n and accepts
    a takes the cache from N - 1 to N + n rows, and back to N + a. The `plan` chooses drafter and K
    of each round; with K = 0 it is plain decoding. A `referee` reviews verdicts at temperature 0 on
    a device where a token's logits differ in their last bits with the number of tokens in the pass.

    Where what the cache lacks of the prompt and the first round's K tokens fit into
    `max_first_length`, the first verify pass reads both, which saves a pass. A row must have
    the same bits in passes of any such length: with another K they may be two. All of the prompt's
    rest or none of it: where K decided on the cut, a longer pass could have other bits.
    """

    judge = staticmethod(verify)  # replaceable: the audit's self-test puts in a wrong accept rule

    target: LanguageModel
    plan: Plan
    watch: Stopwatch
    referee: Referee | None = None
    max_first_length: int = 1

    def rounds(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int,
        max_new_tokens: int,
        num_logprobs: int | None = None,
    ) -> Generator[Round]:
        """Rounds until `max_new_tokens` are committed.

        Above temperature 0 the last round may commit one token too many, which the caller drops.
        Each token has its log-probability and `num_logprobs` others', unless that is None.

        A round consumes 2K + 1 uniforms, however few it uses: K draws, K tests, and one for the
        recovered or bonus token. So each round's numbers are known beforehand.
        """
        history = History(prompt)
        self.plan.truncate(0)
        end = len(prompt) + max_new_tokens
        stream = Uniforms(seed)
        num_unread = 0
        while (left := end - len(history.tokens)) > 0:
            step = self.plan.next(history, left)
            numbers = stream.take(2 * step.num_draft_tokens + 1)
            num_unread = 1 if num_unread else self._prefill(prompt, step.num_draft_tokens)
            yield self._round(step, history, sampling, numbers, left, num_logprobs, num_unread)

    def _prefill(self, tokens: Sequence[int], num_draft_tokens: int) -> int:
        """How many tokens at the prompt's end are left to the first round's pass."""
        kept = self.target.reuse(tokens[:-1])
        num_unread = len(tokens) - kept
        if num_unread + num_draft_tokens > self.max_first_length:
            self.target.prefill(tokens[kept:-1])
            num_unread = 1
        if self.referee:
            self.referee.begin(self.target.length)
        return num_unread

    def _round(
        self,
        step: Step,
        history: History,
        sampling: Sampling,
        numbers: Floats,
        left: int,
        num_logprobs: int | None,
        num_unread: int,
    ) -> Round:
        """Commit 1 to K + 1 tokens to `history`, of which `left` are still wanted; the target has
        not read its last `num_unread` ones.

        At most `left` are drafted. One fewer suffices where the target chooses: its pass gives the
        last one, the same token. Drawn text needs all: a last token from the bonus row would use
        another random number than in a longer request.
        """
        k = step.num_draft_tokens  # asked for; `draft` may have fewer
        draws, tests, last = numbers[:k], numbers[k : 2 * k], float(numbers[-1])
        with self.watch.part("sampling"):
            most = min(k, left - 1 if sampling.chooses else left)
            draft = propose(step.drafter, history, most, sampling, draws) if most else Draft([])
        scores = self.target.forward(
            [*history.last(num_unread), *draft.tokens], len(draft.tokens) + 1
        )
        with self.watch.part("sampling"):
            verdict = self.judge(draft, scores, sampling, history, tests, last)
            near_ties: tuple[NearTie, ...] = ()
            if self.referee:
                if num_logprobs is not None:
                    # The referee's own passes overwrite the logits.
                    scores = Scores(scores.array().copy())
                verdict, near_ties = self.referee.review(
                    verdict, draft.tokens, scores, sampling, history
                )
            committed = [*draft.tokens[: verdict.num_accepted], verdict.next_token]
            logprobs = of_tokens(scores, committed, num_logprobs)
        history.extend(committed)
        if sampling.noise:
            sampling.noise.forget(history.length)
        self.target.truncate(len(history.tokens) - 1)
        self.plan.truncate(len(history.tokens) - 1)
        ended = Round(
            committed,
            num_drafted=len(draft.tokens),
            num_accepted=verdict.num_accepted,
            logprobs=logprobs,
            sources=sources(step.drafter, draft),
            near_ties=near_ties,
            drafter=step.name,
            num_draft_tokens=k,
        )
        self.plan.ended(ended)
        return ended
