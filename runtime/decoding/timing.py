"""Time of a round by part: a stopwatch, and a model wrapper that times its passes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from specedge.sampling_options import Sampling

from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.logits import Logits
from .protocols import LanguageModel
from .verification import Draft


class Stopwatch:
    """Seconds by part; an inner part interrupts the outer one."""

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

    A pass that includes prompt tokens counts as "prefill".
    """

    def __init__(self, model: LanguageModel, stopwatch: Stopwatch, part: str) -> None:
        self.model = model
        self._stopwatch = stopwatch
        self._part = part
        self.num_passes = 0
        self._prompt_pass_seconds = self._prompt_pass_share = 0.0
        self._other_pass_seconds: list[float] = []

    @property
    def length(self) -> int:
        return self.model.length

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        self.num_passes += 1
        begin = time.perf_counter()
        reads_prompt = num_rows is not None and num_rows < len(tokens)
        with self._stopwatch.part("prefill" if reads_prompt else self._part):
            logits = self.model.forward(tokens, num_rows)
        seconds = time.perf_counter() - begin
        if reads_prompt:
            self._prompt_pass_seconds = seconds
            self._prompt_pass_share = seconds * (num_rows or 0) / len(tokens)
        else:
            self._other_pass_seconds.append(seconds)
        return logits

    @property
    def seconds_of_first(self) -> float:
        """Verify time within the pass that included prompt tokens.

        It is the mean of the other passes or, without any, proportional to the rows with logits.
        """
        if not self._other_pass_seconds:
            return self._prompt_pass_share
        return min(self._prompt_pass_seconds, fmean(self._other_pass_seconds))

    def draft(
        self,
        tokens: Sequence[int],
        count: int,
        history: History,
        sampling: Sampling,
        uniforms: Floats,
    ) -> Draft | None:
        """Draft on the device if the model supports it, which counts as `count` passes."""
        if not hasattr(self.model, "draft"):
            return None
        with self._stopwatch.part(self._part):
            draft: Draft | None = self.model.draft(tokens, count, history, sampling, uniforms)
        if draft is not None:
            self.num_passes += count
        return draft

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens: "prefill" before the first pass, this model's part afterwards."""
        with self._stopwatch.part(self._part if self.num_passes else "prefill"):
            self.model.prefill(tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        return self.model.reuse(tokens)

    def truncate(self, length: int) -> None:
        self.model.truncate(length)
