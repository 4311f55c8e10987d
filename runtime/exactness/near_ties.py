"""Greedy choices that the number of rows in a pass could turn: found, and decided on request.

Plain decoding is one row a pass. A wider pass may give logits that differ from plain decoding's by
up to a `noise`; then two tokens closer than twice that are a near-tie.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from specedge.errors import OptionError, SpecEdgeError
from specedge.sampling_options import Sampling

from ..decoding.model import LanguageModel
from ..decoding.round import NearTie
from ..decoding.verify import Draft, Verdict, verify
from ..sampling.history import History
from ..sampling.probabilities import choice, likeliest
from ..sampling.scores import Row, Scores

_NO_UNIFORMS = np.zeros(0)

Scored = tuple[int, float]  # a token and its logit


@dataclass(eq=False)
class Referee:
    """Judges greedy drafts of one request on a device whose wider passes are noisy.

    With `exact` a near-tie is decided as plain decoding decides it: the cache goes back to its
    last row that plain decoding would have written, and the tokens since then are read again, one
    a pass. That leaves plain decoding's rows, so no token is read again twice.
    """

    target: LanguageModel
    noise: float
    exact: bool
    # Rows of the cache that plain decoding would have written.
    _num_plain: int = field(default=0, init=False)

    def begin(self, num_rows: int) -> None:
        self._num_plain = num_rows

    def review(
        self,
        verdict: Verdict,
        tokens: list[int],
        scores: Scores,
        sampling: Sampling,
        history: History,
    ) -> tuple[Verdict, tuple[NearTie, ...]]:
        # Rows behind a choice that could not be made were read again in vain.
        self._num_plain = min(self._num_plain, len(history.tokens) - 1)
        if not tokens and self._num_plain == len(history.tokens) - 1:
            self._num_plain += 1  # one row after rows of plain decoding
            return verdict, ()
        ties: list[NearTie] = []
        for i in range(verdict.num_accepted + 1):
            text = history.then(tokens[:i])
            try:
                first, second = _two_likeliest(scores[i], sampling, text)
                if not self._is_near(first, second, sampling):
                    continue
                if self.exact:
                    row = self._read_again(text, sampling)
                    first, second = _two_likeliest(row, sampling, text)
            except OptionError:  # as in `verify`: none is left behind tokens that are accepted
                if not i:
                    raise
                return Verdict(i - 1, tokens[i - 1]), tuple(ties)
            chosen = first[0]
            ties.append(NearTie(text.num_new_tokens, chosen, second[0], first[1] - second[1]))
            if not self.exact:
                continue
            if i == len(tokens) or chosen != tokens[i]:
                return Verdict(i, chosen), tuple(ties)
            try:
                verdict, later = self._go_on(i, tokens, sampling, text.then([chosen]))
            except OptionError:  # behind it
                return Verdict(i, chosen), tuple(ties)
            return verdict, (*ties, *later)
        return verdict, tuple(ties)

    def _go_on(
        self, i: int, tokens: list[int], sampling: Sampling, text: History
    ) -> tuple[Verdict, tuple[NearTie, ...]]:
        """The review where token i is accepted after all; the rows after it are computed anew."""
        scores, rest = self.target.forward(tokens[i:]), tokens[i + 1 :]
        verdict = verify(Draft(rest), scores, sampling, text, _NO_UNIFORMS, 0.0)
        verdict, ties = self.review(verdict, rest, scores, sampling, text)
        return Verdict(i + 1 + verdict.num_accepted, verdict.next_token), ties

    def _is_near(self, first: Scored, second: Scored, sampling: Sampling) -> bool:
        penalty = sampling.repetition_penalty  # it multiplies logits, and their noise
        return second[1] >= first[1] - 2 * self.noise * max(1.0, penalty, 1 / penalty)

    def _read_again(self, text: History, sampling: Sampling) -> Row:
        """The row that plain decoding has at the end of a text."""
        tokens, prompt = text.tokens, text.num_prompt_tokens
        self.target.truncate(self._num_plain)
        for at in range(self._num_plain, len(tokens)):
            row = self.target.forward([tokens[at]])[0]
            before = History(tokens[:prompt], tokens[prompt : at + 1])
            with suppress(OptionError):  # a grammar that is followed no more tells nothing of noise
                if at + 1 < len(tokens) and choice(row, sampling, before) != tokens[at + 1]:
                    raise SpecEdgeError(
                        f"new token {at + 1 - prompt} is not plain decoding's: this device's noise "
                        f"is above the {self.noise:.1e} that was measured; take 0 draft tokens"
                    )
        self._num_plain = len(tokens)
        return row


def _two_likeliest(row: Row, sampling: Sampling, text: History) -> tuple[Scored, Scored]:
    ids, values = likeliest(row, 2, sampling, text)
    found = [(int(i), float(value)) for i, value in zip(ids, values, strict=True)]
    return found[0], found[1] if len(found) > 1 else (found[0][0], -np.inf)
