"""Time of a round by part: a stopwatch, and a model wrapper that times its passes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any, cast

from ..sampling.logits import Logits
from ..sampling.source import Source
from .observed_states import Array
from .protocols import (
    DraftHeadModel,
    DraftingModel,
    Feed,
    LanguageModel,
    SourceModel,
)
from .verification import Draft, DraftRequest


class Stopwatch:
    """Seconds by part; an inner part interrupts the outer one.

    As a context manager, it counts the time inside the `with` block, as the part at the end of the
    block before, first as "other".

    Attributes:
        seconds: Seconds by part.
        time: `time.perf_counter()` at the last change of the part.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._part: str | None = None
        self._paused: str | None = "other"
        self.time = 0.0

    def __enter__(self) -> None:
        self.switch(self._paused)

    def __exit__(self, *_: object) -> None:
        self._paused = self.switch(None)

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.seconds.values())

    def part(self, name: str) -> _Part:
        """Count the time inside a `with` block as `name`."""
        return _Part(self, name)

    def switch(self, name: str | None) -> str | None:
        """Count the time from now on as `name`; return the part before."""
        now = time.perf_counter()
        if self._part is not None:
            self.seconds[self._part] += now - self.time
        previous, self._part, self.time = self._part, name, now
        return previous


class _Part:
    """Context manager of a part; a class, which has less overhead than a generator."""

    def __init__(self, stopwatch: Stopwatch, name: str) -> None:
        self._stopwatch, self._name = stopwatch, name
        self._outer: str | None = None

    def __enter__(self) -> None:
        self._outer = self._stopwatch.switch(self._name)

    def __exit__(self, *_: object) -> None:
        self._stopwatch.switch(self._outer)


class TimedModel:
    """Language model whose passes are counted and timed as one part of a request.

    A pass of the target that includes prompt tokens counts as "prefill". Other attributes are those
    of the model.

    Attributes:
        is_draft: True for a draft model.
    """

    def __init__(self, model: LanguageModel, stopwatch: Stopwatch, part: str) -> None:
        self.model = model
        self._stopwatch = stopwatch
        self._part = part
        self.is_draft = part == "draft"
        self.num_passes = 0
        self._prompt_pass_seconds = self._prompt_pass_share = 0.0
        self._other_pass_seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def length(self) -> int:
        return self.model.length

    def forward(
        self, tokens: Sequence[int], num_rows: int | None = None, hidden: Array | None = None
    ) -> Logits:
        length, stopwatch = len(tokens), self._stopwatch
        num_rows = length if num_rows is None else num_rows
        outer = stopwatch.switch(self._part_of(length, num_rows))
        begin = stopwatch.time
        try:
            logits = cast(Logits, Feed(self.model, tokens, num_rows, hidden).run())
        finally:
            stopwatch.switch(outer)
        self._count(length, num_rows, stopwatch.time - begin)
        return logits

    def record(self, feed: Feed, seconds: float) -> None:
        """Record the time of a pass that the model shared with others."""
        length = len(feed.tokens)
        self._stopwatch.seconds[self._part_of(length, feed.num_rows)] += seconds
        if feed.num_rows:
            self._count(length, feed.num_rows, seconds)

    def _part_of(self, length: int, num_rows: int) -> str:
        """Return the part of a pass; without logits, "prefill" before the first other one."""
        if num_rows:
            return "prefill" if num_rows < length and not self.is_draft else self._part
        return self._part if self.num_passes else "prefill"

    def _count(self, length: int, num_rows: int, seconds: float) -> None:
        self.num_passes += 1
        if num_rows < length:
            self._prompt_pass_seconds = seconds
            self._prompt_pass_share = seconds * num_rows / length
        else:
            self._other_pass_seconds.append(seconds)

    @property
    def seconds_of_first(self) -> float:
        """Verify time within the pass that included prompt tokens.

        It is the mean of the other passes or, without any, proportional to the rows with logits.
        """
        if not self._other_pass_seconds:
            return self._prompt_pass_share
        return min(self._prompt_pass_seconds, fmean(self._other_pass_seconds))

    def draft(
        self, tokens: Sequence[int], request: DraftRequest, hidden: Array | None = None
    ) -> Draft | None:
        """Draft on the device if the model supports it, which counts as a pass for each token."""
        with self._stopwatch.part(self._part):
            draft = cast(DraftingModel, self.model).draft(tokens, request, hidden)
        if draft is not None:
            self.num_passes += request.max_tokens
        return draft

    def prefill(self, tokens: Sequence[int], hidden: Array | None = None) -> None:
        with self._stopwatch.part(self._part_of(len(tokens), 0)):
            Feed(self.model, tokens, 0, hidden).run()

    def fuse(self, hidden: Array) -> Array:
        with self._stopwatch.part(self._part_of(len(hidden), 0)):
            return cast(DraftHeadModel, self.model).fuse(hidden)

    def open(self, source: Source) -> None:
        with self._stopwatch.part(self._part_of(0, 0)):
            cast(SourceModel, self.model).open(source)
