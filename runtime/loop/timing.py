"""Where the time of a round goes: a stopwatch by part, and a model whose passes it times."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from specedge.options import Sampling

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

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside the block as `name`."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, name: str | None) -> str | None:
        now = time.perf_counter()
        if self._part is not None:
            self.seconds[self._part] += now - self._since
        previous, self._part, self._since = self._part, name, now
        return previous


class Timed:
    """A language model whose passes are counted and timed as one part of a run.

    `firsts` are the seconds of each round's first pass, by how many tokens it read; `whole_rounds`
    those of all its passes, by the tokens of the first and how many there were. A pass that reads
    the end of a prompt, too, is in neither, and its time counts as "prefill".
    """

    def __init__(self, model: LanguageModel, watch: Stopwatch, part: str) -> None:
        self.model = model  # another of the same weights, until the first pass
        self._watch = watch
        self._part = part
        self.num_passes = 0
        self._shared = self._rows_share = 0.0
        self.firsts: defaultdict[int, list[float]] = defaultdict(list)
        self.whole_rounds: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._round: list[float] = []
        self._first_tokens = 0

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
            self._passed(len(tokens), [seconds])
        return scores

    @property
    def seconds_of_first(self) -> float:
        """Of the pass that read the end of a prompt, too, the round's own part: what the other
        rounds' first passes took on average, or if there are none its share of the tokens.
        """
        others = [seconds for some in self.firsts.values() for seconds in some]
        return min(self._shared, fmean(others)) if others else self._rows_share

    def _passed(self, num_tokens: int, took: list[float]) -> None:
        """Note passes' seconds, and how many tokens the first of them read."""
        if not self._round:
            self._first_tokens = num_tokens
            self.firsts[num_tokens].append(took[0])
        self._round += took

    def draft(
        self,
        tokens: Sequence[int],
        count: int,
        history: History,
        sampling: Sampling,
        uniforms: Floats,
    ) -> Draft | None:
        """Counted as so many passes, which took the same time each."""
        if not hasattr(self.model, "draft"):  # of one that hands on what it is asked, too
            return None
        begin = time.perf_counter()
        with self._watch.part(self._part):
            draft: Draft | None = self.model.draft(tokens, count, history, sampling, uniforms)
        if draft is not None:
            self.num_passes += count
            self._passed(len(tokens), [(time.perf_counter() - begin) / count] * count)
        return draft

    def prefill(self, tokens: Sequence[int]) -> None:
        """Counted as "prefill" before the first pass, as this model's part afterwards."""
        with self._watch.part(self._part if self.num_passes else "prefill"):
            self.model.prefill(tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        return self.model.reuse(tokens)

    def truncate(self, length: int) -> None:
        """The loop truncates once a round, at its end."""
        self.model.truncate(length)
        if self._round:
            self.whole_rounds[self._first_tokens, len(self._round)].append(sum(self._round))
            self._round = []
