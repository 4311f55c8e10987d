"""Multi-step draft graphs: K draft tokens in one call, with the same cache as passes.

Drafting by passes synchronizes GPU and host twice per token: at the end of a pass and for its best
logits. A multi-step graph needs no host between its steps. C columns of logits.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from specedge.bundle.gpu_signatures import NUM_SUMMARY_FIELDS, num_best, step_output
from specedge.sampling_options import Sampling

from ...decoding.verification import Draft, DraftRequest
from ...sampling.distribution import Distribution, Floats, Ids
from ...sampling.history import History
from ...sampling.logits_processors import text_columns
from ..buffers import Array
from ..kv_cache import KeyValueCache
from ..model_session import BoundPass, ModelSession

if TYPE_CHECKING:
    from typing_extensions import Self

_REPEATS = 5  # timings, of which the median is used
_LIMITS = np.finfo(np.float32)
_NON_FINITE = 1  # column of a step's summary that is set if logits are not finite


class DraftGraph(ABC):
    """Session of a multi-step draft graph, bound to one cache."""

    examples: Sequence[Sampling]  # one for each cost class of options

    def __init__(self, session: ModelSession, cache: KeyValueCache) -> None:
        self._session, self._cache = session, cache
        self._passes: dict[int, BoundPass] = {}
        self._costs: dict[bool, float] = {}  # of a call relative to a pass, by cost class

    def over(self, cache: KeyValueCache) -> Self:
        """Return the same graph bound to another cache."""
        other = copy.copy(self)
        other._cache, other._passes = cache, {}
        return other

    @property
    def num_steps(self) -> int:
        """Draft tokens of one call, K."""
        return self._session.num_drafted

    @abstractmethod
    def supports(self, history: History, sampling: Sampling) -> bool:
        """Return True if the graph implements these options after this text."""

    @abstractmethod
    def draft(
        self, tokens: Sequence[int], request: DraftRequest, hidden: Array | None = None
    ) -> Draft | None:
        """Draft `max_tokens` tokens after `tokens`, the last of a text.

        They are 1 or 2, or of a draft head any number, each with a `hidden` state [T, H]. The cache
        then contains all tokens but the last draft token. Steps beyond `max_tokens` also run, and
        their rows are stale. Returns None, without effect, on failure.
        """

    def is_faster(self, count: int, sampling: Sampling) -> bool:
        """Return True if calls were measured to draft `count` tokens faster than passes."""
        num_calls = -(-count // self.num_steps)
        return num_calls * self._costs.get(self._cost_class(sampling), math.inf) < count

    def _cost_class(self, sampling: Sampling) -> bool:
        """Return the class of options by which the cost of passes differs."""
        return False

    def warm_up(self) -> None:
        """Let a GPU capture the graph for the usual numbers of tokens; empties the cache."""
        longest = self.num_steps + 1 if self._session.model.reads_hidden else 2
        for length in range(longest, 0, -1):
            self._cache.truncate(0)
            self._run([0] * length)
        self._cache.truncate(0)

    def _run(
        self,
        tokens: Sequence[int],
        hidden: Array | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> BoundPass:
        """Call the graph once; the cache counts the rows of `tokens` alone.

        A pass that is too short starts at the token before, unless it is at the first position,
        where attention reads a single row and kernels do not differ. The graph of a draft head
        repeats the last token instead.
        """
        if hidden is not None:
            inputs = {**(inputs or {}), "hidden": hidden[np.newaxis]}
        elif len(tokens) < self._session.min_length and self._cache.length:
            tokens = [self._cache.last_token, *tokens]
            self._cache.truncate(self._cache.length - 1)
        length = len(tokens)
        bound = self._passes.get(length)
        if bound is None:
            is_usual = hidden is None or length <= self.num_steps + 1
            bound = self._session.bind(self._cache, length, 1, captured=is_usual)
            if is_usual:
                self._passes[length] = bound
        self._session.run(bound, tokens, inputs)
        return bound

    def _next_hidden(self, bound: BoundPass) -> Array | None:
        """Copy the hidden state that a draft head returned at the last step; None of others."""
        if "next_hidden" not in bound.arrays:
            return None
        states: Array = self._session.buffers.fetch(bound.arrays["next_hidden"])[0].copy()
        return states

    def measure(self, step: Callable[[Sampling], object], hidden: Array | None = None) -> bool:
        """Time a call against one draft token by passes; empties the cache.

        Args:
            step: Drafts a token by passes.
            hidden: State that a draft head reads. [1, H]

        Returns:
            True if calls are faster for any options.
        """
        self.warm_up()
        numbers = np.full(self.num_steps, 0.5)
        for sampling in self.examples:
            request = DraftRequest(History([0]), 1, sampling, numbers)
            call = partial(self.draft, [0], request, hidden)
            seconds = [self._median(method) for method in (call, partial(step, sampling))]
            self._costs[self._cost_class(sampling)] = seconds[0] / seconds[1]
        return min(self._costs.values()) < self.num_steps

    def _median(self, run: Callable[[], object]) -> float:
        seconds = []
        for _ in range(_REPEATS):
            self._cache.truncate(0)
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        self._cache.truncate(0)
        return statistics.median(seconds)


class GreedyDraftGraph(DraftGraph):
    """Multi-step graph that selects the most probable token at each step."""

    examples = (Sampling(),)

    def supports(self, history: History, sampling: Sampling) -> bool:
        return sampling.greedy and not sampling.edits

    def draft(
        self, tokens: Sequence[int], request: DraftRequest, hidden: Array | None = None
    ) -> Draft:
        drafted, count = list[int](), request.max_tokens
        while len(drafted) < count:
            bound = self._run(drafted[-1:] or tokens, hidden)
            new = self._session.buffers.fetch(bound.arrays["drafted"])[0].tolist()
            new = new[: count - len(drafted)]
            self._cache.extend(new[:-1])
            drafted += new
            if len(drafted) < count:
                hidden = self._next_hidden(bound)
        return Draft(drafted)


class DeviceDistribution(Distribution):
    """Distribution whose weights stay on a device until they are read.

    The drawn token, its weight and the sum of all weights are known on the host.
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


class SampledDraftGraph(DraftGraph):
    """Multi-step graph that samples, with options and uniforms as inputs."""

    examples = (Sampling(temperature=1.0, top_k=20), Sampling(temperature=1.0))

    def __init__(self, session: ModelSession, cache: KeyValueCache, ids: Ids | None) -> None:
        super().__init__(session, cache)
        self._ids, self._size = ids, session.model.num_columns
        # Shared by all caches: a call for one cache overwrites the weights of another.
        self._unread: list[weakref.ref[DeviceDistribution]] = []

    def supports(self, history: History, sampling: Sampling) -> bool:
        penalties = sampling.presence_penalty or sampling.frequency_penalty
        named = sampling.logit_bias or sampling.bad_words or sampling.constraint
        suppresses = sampling.suppress_tokens or sampling.no_repeat_ngram_size
        suppresses = suppresses or sampling.timestamps is not None
        begins = history.num_new_tokens == 0 and sampling.begin_suppress_tokens
        suppresses_end = history.num_new_tokens < sampling.min_new_tokens
        typical = sampling.typical_p < 1 and not sampling.greedy
        edits = penalties or named or suppresses or begins or suppresses_end
        return not (edits or typical or sampling.noise)

    def _cost_class(self, sampling: Sampling) -> bool:
        """Return True if passes fetch whole rows of logits."""
        few = sampling.greedy or 0 < sampling.top_k < num_best(self._size)
        return sampling.edits or not few

    def draft(
        self, tokens: Sequence[int], request: DraftRequest, hidden: Array | None = None
    ) -> Draft | None:
        """Draft `max_tokens` tokens; None if logits are not finite."""
        start, count = self._cache.length, request.max_tokens
        drafted, probs = list[int](), list[Distribution]()
        while (at := len(drafted)) < count:
            self._fetch_unread()
            inputs = self._inputs(request.after(drafted))
            bound = self._run(drafted[-1:] or tokens, hidden, inputs)
            rows = self._session.buffers.fetch(bound.arrays["drawn"])[: count - at]
            if rows[:, _NON_FINITE].any():
                self._cache.truncate(start)
                return None
            for i, row in enumerate(rows):
                token, distribution = self._read(row, bound.arrays[step_output(i, "weights")])
                drafted.append(token)
                probs.append(distribution)
            self._cache.extend(drafted[at:-1])
            if len(drafted) < count:
                hidden = self._next_hidden(bound)
        return Draft(drafted, None if request.sampling.greedy else probs)

    def _fetch_unread(self) -> None:
        """Fetch weights that are still referenced, before the next call overwrites them."""
        for reference in self._unread:
            if distribution := reference():
                _ = distribution.weights
        self._unread.clear()

    def _inputs(self, request: DraftRequest) -> Mapping[str, Any]:
        """Return the graph's inputs by role, with options clipped to float32."""
        sampling = request.sampling
        penalty = sampling.repetition_penalty
        inputs: dict[str, Any] = {
            "temperature": [0 if sampling.greedy else _clip(sampling.temperature)],
            "top_k": [min(sampling.top_k, self._size)],
            "top_p": [sampling.top_p],
            "min_p": [sampling.min_p],
            "repetition_penalty": [_clip(penalty)],
            "uniforms": np.resize(request.uniforms, self.num_steps),
        }
        if penalty != 1:
            inputs["seen"] = np.zeros(self._size, bool)
            inputs["seen"][text_columns(request.history, self._size, self._ids)[0]] = True
        return inputs

    def _read(self, row: Floats, all_weights: Any) -> tuple[int, Distribution]:
        """Return a step's token and the distribution that it was drawn from."""
        column, count = int(row[0]), int(row[2])
        token = column if self._ids is None else int(self._ids[column])
        num = num_best(self._size)
        if count > num:
            fetch = partial(self._fetch, all_weights)
            distribution = DeviceDistribution(fetch, self._ids, token, float(row[3]), float(row[4]))
            self._unread.append(weakref.ref(distribution))
            return token, distribution
        weights, columns = (
            row[at : at + count] for at in (NUM_SUMMARY_FIELDS, NUM_SUMMARY_FIELDS + num)
        )
        order = columns.argsort()
        sorted_columns = columns[order].astype(np.intp)
        ids = sorted_columns if self._ids is None else self._ids[sorted_columns]
        return token, Distribution(weights[order].astype(np.float32), ids)

    def _fetch(self, array: Any) -> Floats:
        weights: Floats = self._session.buffers.fetch(array)[0].copy()
        return weights


def _clip(number: float) -> float:
    return min(max(number, float(_LIMITS.tiny)), float(_LIMITS.max))
