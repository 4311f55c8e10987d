"""Where the time of a round goes: a stopwatch by part, and a model whose passes it times."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from specedge.sampling_options import Sampling

from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.scores import Scores
from .model import LanguageModel
from .verify import Draft


class Stopwatch:
    """Adds up seconds by part; an inner part interrupts the outer one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._part: str | None = None
        self._since = 0.0

    def part(self, name: str) -> _Part:
        """Count the time inside a `with` block as `name`."""
        return _Part(self, name)

    def switch(self, name: str | None) -> str | None:
        """Count the time from now on as `name`; return the part before."""
        now = time.perf_counter()
        if self._part is not None:
            self.seconds[self._part] += now - self._since
        previous, self._part, self._since = self._part, name, now
        return previous


class _Part:
    """Context of a part: a class, as each round enters several and a generator costs more."""

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name
        self._outer: str | None = None

    def __enter__(self) -> None:
        self._outer = self._watch.switch(self._name)

    def __exit__(self, *_: object) -> None:
        self._watch.switch(self._outer)


class Timed:
    """A language model whose passes are counted and timed as one part of a run.

    A pass that reads the end of a prompt, too, counts as "prefill".
    """

    def __init__(self, model: LanguageModel, watch: Stopwatch, part: str) -> None:
        self.model = model  # another of the same weights, until the first pass
        self._watch = watch
        self._part = part
        self.num_passes = 0
        self._shared = self._rows_share = 0.0
        self._others: list[float] = []  # seconds of passes that read no prompt

    @property
    def length(self) -> int:
        return self.model.length

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Scores:
        self.num_passes += 1
        begin = time.perf_counter()
        with_prompt = num_rows is not None and num_rows < len(tokens)
        with self._watch.part("prefill" if with_prompt else self._part):
            scores = self.model.forward(tokens, num_rows)
        seconds = time.perf_counter() - begin
        if with_prompt:
            self._shared, self._rows_share = seconds, seconds * (num_rows or 0) / len(tokens)
        else:
            self._others.append(seconds)
        return scores

    @property
    def seconds_of_first(self) -> float:
        """Of the pass that read the end of a prompt, too, the round's own part: what the other
        passes took on average, or if there are none its share of the tokens.
        """
        return min(self._shared, fmean(self._others)) if self._others else self._rows_share

    def draft(
        self,
        tokens: Sequence[int],
        count: int,
        history: History,
        sampling: Sampling,
        uniforms: Floats,
    ) -> Draft | None:
        """Counted as so many passes."""
        if not hasattr(self.model, "draft"):  # of one that hands on what it is asked, too
            return None
        with self._watch.part(self._part):
            draft: Draft | None = self.model.draft(tokens, count, history, sampling, uniforms)
        if draft is not None:
            self.num_passes += count
        return draft

    def prefill(self, tokens: Sequence[int]) -> None:
        """Counted as "prefill" before the first pass, as this model's part afterwards."""
        with self._watch.part(self._part if self.num_passes else "prefill"):
            self.model.prefill(tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        return self.model.reuse(tokens)

    def truncate(self, length: int) -> None:
        self.model.truncate(length)
