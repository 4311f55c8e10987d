"""Near-ties: greedy choices that the pass length could change, and their exact resolution.

Plain decoding runs one token per pass. The logits of a longer pass may differ from its logits by
up to `noise`; two tokens whose logits differ by less than twice the noise are a near-tie.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from specedge.errors import OptionError, SpecEdgeError
from specedge.sampling_options import Sampling

from ..sampling.history import History
from ..sampling.logits import Logits, Row
from ..sampling.probabilities import greedy_token, most_likely
from .protocols import Feed, LanguageModel, NearTie, Operations
from .verification import Draft, Verdict, verify

_NO_UNIFORMS = np.zeros(0)

ScoredToken = tuple[int, float]  # a token and its logit


@dataclass(eq=False)
class NearTieResolver:
    """Exact resolver of near-ties for one request, where longer passes have noisy logits.

    With `exact`, near-ties are decided as in plain decoding: the cache is rolled back to the last
    row that plain decoding would have written, and the tokens since then are recomputed, one per
    pass. The cache then has the rows of plain decoding, so no token is recomputed twice. Without
    `exact`, near-ties are only listed.
    """

    target: LanguageModel
    noise: float
    exact: bool
    _num_plain: int = field(default=0, init=False)  # cache rows equal to those of plain decoding

    def begin(self, num_rows: int) -> None:
        """Begin a request whose first `num_rows` cache rows are those of plain decoding.

        These are all tokens of the prompt but the last.
        """
        self._num_plain = num_rows

    def review(
        self,
        verdict: Verdict,
        tokens: list[int],
        logits: Logits,
        sampling: Sampling,
        history: History,
    ) -> Operations[tuple[Verdict, tuple[NearTie, ...]]]:
        """Return the exact verdict on draft tokens, and the near-ties among its choices.

        The target's cache keeps at least all committed tokens but the last.

        Args:
            verdict: Verdict by the verify pass.
            tokens: Draft tokens. [n]
            logits: Logits of the verify pass. [n + 1, V]
            sampling: Sampling options, of temperature 0.
            history: Text before the draft.
        """
        # After a failed choice, more rows may have been recomputed than are committed.
        self._num_plain = min(self._num_plain, len(history.tokens) - 1)
        if not tokens and self._num_plain == len(history.tokens) - 1:
            self._num_plain += 1  # one row after rows of plain decoding
            return verdict, ()
        ties: list[NearTie] = []
        for i in range(verdict.num_accepted + 1):
            text = history.then(tokens[:i])
            try:
                first, second = _two_most_likely(logits[i], sampling, text)
                if not self._is_near_tie(first, second, sampling):
                    continue
                if self.exact:
                    row = yield from self._recompute(text, sampling)
                    first, second = _two_most_likely(row, sampling, text)
            except OptionError:  # as in `verify`: no token is left after accepted ones
                if not i:
                    raise
                return Verdict(i - 1, tokens[i - 1]), tuple(ties)
            choice = first[0]
            ties.append(NearTie(text.num_new_tokens, choice, second[0], first[1] - second[1]))
            if not self.exact:
                continue
            if i == len(tokens) or choice != tokens[i]:
                return Verdict(i, choice), tuple(ties)
            try:
                verdict, later_ties = yield from self._verify_rest(
                    i, tokens, sampling, text.then([choice])
                )
            except OptionError:
                return Verdict(i, choice), tuple(ties)
            return verdict, (*ties, *later_ties)
        return verdict, tuple(ties)

    def _verify_rest(
        self, i: int, tokens: list[int], sampling: Sampling, text: History
    ) -> Operations[tuple[Verdict, tuple[NearTie, ...]]]:
        """Verify and review the tokens after token i, which is accepted, by a new pass."""
        rest = tokens[i + 1 :]
        logits = yield Feed(self.target, tokens[i:], len(rest) + 1)
        verdict = verify(Draft(rest), logits, sampling, text, _NO_UNIFORMS, 0.0)
        verdict, ties = yield from self.review(verdict, rest, logits, sampling, text)
        return Verdict(i + 1 + verdict.num_accepted, verdict.next_token), ties

    def _is_near_tie(self, first: ScoredToken, second: ScoredToken, sampling: Sampling) -> bool:
        penalty = sampling.repetition_penalty  # it multiplies logits, and their noise
        return second[1] >= first[1] - 2 * self.noise * max(1.0, penalty, 1 / penalty)

    def _recompute(self, text: History, sampling: Sampling) -> Operations[Row]:
        """Recompute rows one token per pass; return the last row of plain decoding."""
        tokens, num_prompt = text.tokens, text.num_prompt_tokens
        self.target.truncate(self._num_plain)
        for i in range(self._num_plain, len(tokens)):
            row: Row = (yield Feed(self.target, [tokens[i]], 1))[0]
            before = History(tokens[:num_prompt], tokens[num_prompt : i + 1])
            with suppress(OptionError):  # after a grammar violation there is no expected token
                if i + 1 < len(tokens) and greedy_token(row, sampling, before) != tokens[i + 1]:
                    raise SpecEdgeError(
                        f"new token {i + 1 - num_prompt} differs from plain decoding: the noise of "
                        f"this device exceeds the measured {self.noise:.1e}; use 0 draft tokens"
                    )
        self._num_plain = len(tokens)
        return row


def _two_most_likely(
    row: Row, sampling: Sampling, text: History
) -> tuple[ScoredToken, ScoredToken]:
    ids, values = most_likely(row, 2, sampling, text)
    scored = [(int(i), float(value)) for i, value in zip(ids, values, strict=True)]
    return scored[0], scored[1] if len(scored) > 1 else (scored[0][0], -np.inf)
