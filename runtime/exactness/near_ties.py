"""Greedy choices that the number of rows in a pass could turn: found, and decided on request.

Plain decoding is one row a pass. A wider pass may give logits that differ from plain decoding's by
up to a `noise`; then two tokens closer than twice that are a near-tie.
"""

from __future__ import annotations

import numpy as np

from specedge.errors import SpecEdgeError
from specedge.options import Sampling

from ..loop.model import LanguageModel
from ..loop.round import NearTie
from ..loop.verify import Draft, Verdict, verify
from ..sampling.distribution import Floats
from ..sampling.history import Past
from ..sampling.logit_edits import edited
from ..sampling.probabilities import choice

_NO_UNIFORMS = np.zeros(0)


class Referee:
    """Judges greedy drafts of one request on a device whose wider passes are noisy.

    With `exact` a near-tie is decided as plain decoding decides it: the cache goes back to its
    last row that plain decoding would have written, and the tokens since then are read again, one
    a pass. That leaves plain decoding's rows, so no token is read again twice.
    """

    def __init__(self, target: LanguageModel, noise: float, exact: bool) -> None:
        self.target = target
        self.noise = noise
        self.exact = exact
        self._num_plain = 0  # rows of the cache that plain decoding would have written
        self._ties: list[NearTie] = []

    def begin(self, num_rows: int) -> None:
        """A request's prompt is in the cache, by passes that plain decoding shares."""
        self._num_plain = num_rows

    def review(
        self, verdict: Verdict, tokens: list[int], logits: Floats, sampling: Sampling, past: Past
    ) -> tuple[Verdict, tuple[NearTie, ...]]:
        """The verdict on drafted tokens [n], perhaps another one, and the near-ties in it.

        logits [n + 1, V] of the target's last pass, over the end of `past` and the tokens
        """
        self._ties = []
        verdict = self._verdict(verdict, tokens, logits, sampling, past)
        return verdict, tuple(self._ties)

    def _verdict(
        self, verdict: Verdict, tokens: list[int], logits: Floats, sampling: Sampling, past: Past
    ) -> Verdict:
        if not tokens and self._num_plain == len(past.tokens) - 1:
            self._num_plain += 1  # one row after rows of plain decoding
            return verdict
        for i in range(verdict.num_accepted + 1):
            text = past.then(tokens[:i])
            scores = edited(logits[i], sampling, text)
            if not self._is_near(scores, sampling):
                continue
            if not self.exact:
                self._note(scores, text)
                continue
            chosen = self._note(edited(self._read_again(text, sampling), sampling, text), text)
            if i == len(tokens) or chosen != tokens[i]:
                return Verdict(i, chosen)
            return self._go_on(i, tokens, sampling, text.then([chosen]))
        return verdict

    def _go_on(self, i: int, tokens: list[int], sampling: Sampling, text: Past) -> Verdict:
        """The verdict where token i stands after all; the rows after it are computed anew."""
        logits, rest = self.target.forward(tokens[i:]), tokens[i + 1 :]
        verdict = verify(Draft(rest), logits, sampling, text, _NO_UNIFORMS, 0.0)
        verdict = self._verdict(verdict, rest, logits, sampling, text)
        return Verdict(i + 1 + verdict.num_accepted, verdict.next_token)

    def _is_near(self, scores: Floats, sampling: Sampling) -> bool:
        penalty = sampling.repetition_penalty  # it multiplies logits, and their noise
        least = float(scores.max()) - 2 * self.noise * max(1.0, penalty, 1 / penalty)
        return int(np.count_nonzero(scores >= least)) > 1

    def _note(self, scores: Floats, text: Past) -> int:
        """List a near-tie; the token chosen."""
        best = int(scores.argmax())
        others = scores.copy()
        others[best] = -np.inf
        second = int(others.argmax())
        margin = float(scores[best]) - float(scores[second])
        self._ties.append(NearTie(text.num_new_tokens, best, second, margin))
        return best

    def _read_again(self, text: Past, sampling: Sampling) -> Floats:
        """The row that plain decoding has at the end of a text. -> [V]"""
        tokens, prompt = text.tokens, text.num_prompt_tokens
        self.target.truncate(self._num_plain)
        for at in range(self._num_plain, len(tokens)):
            row: Floats = self.target.forward([tokens[at]])[0]
            before = Past(tokens[:prompt], tokens[prompt : at + 1])
            if at + 1 < len(tokens) and choice(row, sampling, before) != tokens[at + 1]:
                raise SpecEdgeError(
                    f"new token {at + 1 - prompt} is not plain decoding's: this device's noise is "
                    f"above the {self.noise:.1e} that was measured; take 0 draft tokens"
                )
        self._num_plain = len(tokens)
        return row
