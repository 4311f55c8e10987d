"""A caller's own drafter."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from specedge.errors import DrafterError
from specedge.sampling_options import Sampling

from ..decoding.protocols import Drafter
from ..decoding.verification import Draft
from ..sampling.distribution import Distribution, Floats, Ids
from ..sampling.history import History


@dataclass(eq=False)
class Checked:
    """Checks its drafts, else a slip in it would change the distribution. Raises DrafterError."""

    drafter: Drafter
    vocab_size: int

    @property
    def name(self) -> str:
        return self.drafter.name

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        draft = self.drafter.propose(history, max_tokens, sampling, uniforms)
        tokens = [self._token(token) for token in draft.tokens]
        if len(tokens) > max_tokens:
            raise self._error(f"proposed {len(tokens)} tokens, {max_tokens} were asked for")
        for what, values in (("distributions", draft.probs), ("sources", draft.sources)):
            if values and len(values) != len(tokens):
                raise self._error(f"proposed {len(tokens)} tokens and {len(values)} {what}")
        for i, token in enumerate(tokens):
            distribution = draft.distribution(i)
            if distribution is not None and not sampling.greedy:
                self._check_distribution(distribution, token)
        return Draft(tokens, draft.probs or None, draft.sources)

    def truncate(self, length: int) -> None:
        self.drafter.truncate(length)

    def _token(self, token: object) -> int:
        try:
            number = operator.index(token)  # type: ignore[arg-type]
        except TypeError:
            raise self._error(f"proposed {token!r}, which is no token") from None
        if not 0 <= number < self.vocab_size:
            raise self._error(
                f"proposed token {number}, which is not between 0 and {self.vocab_size - 1}"
            )
        return number

    def _check_distribution(self, distribution: Distribution, token: int) -> None:
        ids, size = distribution.ids, self.vocab_size
        if (
            len(distribution.weights) > size
            if ids is None
            else len(ids) != len(distribution.weights)
        ):
            raise self._error(
                f"gave a distribution over {len(distribution.weights)} tokens, not over {size}"
            )
        if ids is not None and not _ascending(ids, size):
            raise self._error("gave a distribution whose ids do not ascend within the vocabulary")
        total = float(distribution.weights.sum(dtype=float))
        if not (0 < total < math.inf and (distribution.weights >= 0).all()):
            raise self._error(f"gave weights that are below 0 or add up to {total:g}")
        if not distribution.of(token) > 0:
            raise self._error(f"proposed token {token}, to which its distribution gives nothing")

    def _error(self, what: str) -> DrafterError:
        return DrafterError(f"the drafter '{self.name}' {what}")


def _ascending(ids: Ids, size: int) -> bool:
    inside = ((ids >= 0) & (ids < size)).all()
    return bool(inside and (ids[1:] > ids[:-1]).all())
