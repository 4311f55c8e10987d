"""Validation of custom drafters."""

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
class CustomDrafter:
    """Wrapper that validates the drafts of a custom drafter.

    An invalid draft would change the distribution of the text.

    Raises:
        DrafterError: A draft is invalid.
    """

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
            raise self._error(f"proposed {len(tokens)} tokens, expected at most {max_tokens}")
        for field, values in (("distributions", draft.probs), ("sources", draft.sources)):
            if values and len(values) != len(tokens):
                raise self._error(f"proposed {len(tokens)} tokens and {len(values)} {field}")
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
            raise self._error(f"proposed {token!r}, which is not a token id") from None
        if not 0 <= number < self.vocab_size:
            raise self._error(
                f"proposed token {number}, which is not between 0 and {self.vocab_size - 1}"
            )
        return number

    def _check_distribution(self, distribution: Distribution, token: int) -> None:
        ids, size = distribution.ids, self.vocab_size
        count = len(distribution.weights)
        if count > size if ids is None else len(ids) != count:
            raise self._error(f"returned a distribution over {count} tokens, expected {size}")
        if ids is not None and not _ascend(ids, size):
            raise self._error(
                "returned a distribution whose ids do not ascend within the vocabulary"
            )
        total = float(distribution.weights.sum(dtype=float))
        if not (0 < total < math.inf and (distribution.weights >= 0).all()):
            raise self._error(f"returned weights that are negative or add up to {total:g}")
        if not distribution.of(token) > 0:
            raise self._error(f"proposed token {token}, whose probability in its distribution is 0")

    def _error(self, problem: str) -> DrafterError:
        return DrafterError(f"the drafter '{self.name}' {problem}")


def _ascend(ids: Ids, size: int) -> bool:
    is_inside = ((ids >= 0) & (ids < size)).all()
    return bool(is_inside and (ids[1:] > ids[:-1]).all())
