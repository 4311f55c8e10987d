"""Drawing a draft in one call of a device: the host hands over settings and uniforms, and fetches
a kilobyte a token. C columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from specedge.bundle.gpu_signatures import SUMMARY, made_by, num_best
from specedge.options import Sampling

from ..decoding.verify import Draft
from ..sampling.distribution import Distribution, Floats, Ids
from ..sampling.history import History
from ..sampling.logit_edits import counts_of
from .cache import Cache
from .model_session import ModelSession
from .unrolled import OneCall

_LIMITS = np.finfo(np.float32)
_WRONG = 1  # which number of a step's says that logits are not finite


class Lent(Distribution):
    """A distribution whose weights lie on a device until they are asked for; that a token was drawn
    from it, the token's weight and the sum of all are known.
    """

    _fetch: Callable[[], Floats]
    _token: int
    _weight: float
    _total: float

    def __init__(
        self, fetch: Callable[[], Floats], ids: Ids | None, token: int, weight: float, total: float
    ) -> None:
        self.__dict__.update(ids=ids, _fetch=fetch, _token=token, _weight=weight, _total=total)

    @cached_property
    def weights(self) -> Floats:
        return self._fetch()

    @property
    def total(self) -> float:
        return self._total

    def of(self, token: int) -> float:
        return self._weight / self._total if token == self._token else super().of(token)


class Sampled(OneCall):
    """A graph of steps that draw."""

    examples = (Sampling(temperature=1.0, top_k=20), Sampling(temperature=1.0))

    def __init__(self, session: ModelSession, cache: Cache, ids: Ids | None) -> None:
        super().__init__(session, cache)
        self._ids, self._size = ids, session.model.num_columns
        # Of all caches, as what a call writes for one may be where it has written for another.
        self._lent: list[weakref.ref[Lent]] = []

    def knows(self, history: History, sampling: Sampling) -> bool:
        penalties = sampling.presence_penalty or sampling.frequency_penalty
        named = sampling.logit_bias or sampling.bad_words or sampling.constraint
        held_back = history.num_new_tokens < sampling.min_new_tokens
        typical = sampling.typical_p < 1 and not sampling.greedy
        return not (penalties or named or held_back or typical or sampling.noise)

    def _kind(self, sampling: Sampling) -> bool:
        """Whether passes fetch whole rows."""
        few = sampling.greedy or 0 < sampling.top_k < num_best(self._size)
        return sampling.edits or not few

    def draft(
        self,
        tokens: Sequence[int],
        count: int,
        history: History,
        sampling: Sampling,
        uniforms: Floats,
    ) -> Draft | None:
        """None where logits are not finite."""
        start = self._cache.length
        drafted, probs = list[int](), list[Distribution]()
        while (at := len(drafted)) < count:
            self._take_back()
            told = self._told(history.then(drafted), sampling, uniforms[at:])
            bound = self._run(drafted[-1:] or tokens, told)
            rows = self._session.buffers.fetch(bound.arrays["drawn"])[: count - at]
            if rows[:, _WRONG].any():
                self._cache.truncate(start)
                return None
            for i, row in enumerate(rows):
                token, distribution = self._read(row, bound.arrays[made_by(i, "weights")])
                drafted.append(token)
                probs.append(distribution)
            self._cache.extend(drafted[at:-1])
        return Draft(drafted, None if sampling.greedy else probs)

    def _take_back(self) -> None:
        """Fetch the weights that somebody may still ask for, before they are written anew."""
        for one in self._lent:
            if lent := one():
                _ = lent.weights
        self._lent.clear()

    def _told(self, text: History, sampling: Sampling, uniforms: Floats) -> Mapping[str, Any]:
        """What the graph is given after a text: settings within what float32 holds."""
        penalty = sampling.repetition_penalty
        told: dict[str, Any] = {
            "temperature": [0 if sampling.greedy else _narrow(sampling.temperature)],
            "top_k": [min(sampling.top_k, self._size)],
            "top_p": [sampling.top_p],
            "min_p": [sampling.min_p],
            "repetition_penalty": [_narrow(penalty)],
            "uniforms": np.resize(uniforms, self.num_steps),
        }
        if penalty != 1:
            told["seen"] = np.zeros(self._size, bool)
            told["seen"][counts_of(text, self._size, self._ids)[0]] = True
        return told

    def _read(self, row: Floats, all_weights: Any) -> tuple[int, Distribution]:
        """A step's token and the distribution that it was drawn from."""
        column, count = int(row[0]), int(row[2])
        token = column if self._ids is None else int(self._ids[column])
        num = num_best(self._size)
        if count > num:
            fetch = partial(self._fetch, all_weights)
            lent = Lent(fetch, self._ids, token, float(row[3]), float(row[4]))
            self._lent.append(weakref.ref(lent))
            return token, lent
        weights, columns = (row[at : at + count] for at in (SUMMARY, SUMMARY + num))
        order = columns.argsort()
        places = columns[order].astype(np.intp)
        ids = places if self._ids is None else self._ids[places]
        return token, Distribution(weights[order].astype(np.float32), ids)

    def _fetch(self, array: Any) -> Floats:
        weights: Floats = self._session.buffers.fetch(array)[0].copy()
        return weights


def _narrow(number: float) -> float:
    return min(max(number, float(_LIMITS.tiny)), float(_LIMITS.max))
