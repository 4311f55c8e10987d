"""Memoized language model: thousands of short texts cost few passes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import numpy as np

from specedge.runtime.decoding.protocols import SourceModel, open_source, run_operations
from specedge.runtime.sampling.distribution import Floats, Ids
from specedge.runtime.sampling.history import common_prefix_length
from specedge.runtime.sampling.logits import Logits
from specedge.runtime.sampling.source import Source

MAX_BYTES = 256 * 2**20

Text = tuple[int, ...]


class MemoizedModel:
    """Model that caches its rows by the preceding text; `inner` runs new texts only.

    Rows after `horizon` or more tokens are zero: those tokens are dropped, and as draft and target
    agree there, tests of blocks that extend beyond it are those of shorter blocks.
    """

    def __init__(self, inner: SourceModel) -> None:
        self.horizon = sys.maxsize
        self.source: Source | None = None
        self._inner = inner
        self._tokens: list[int] = []
        self._rows: dict[Text, Floats] = {}  # of the source
        self._rows_by_source: dict[Source | None, dict[Text, Floats]] = {None: self._rows}
        self._bytes = 0
        self._num_columns = 0
        self._ids: Ids | None = None

    @property
    def length(self) -> int:
        return len(self._tokens)

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        self._tokens += tokens
        start = len(self._tokens) - (len(tokens) if num_rows is None else num_rows)
        keys = [tuple(self._tokens[: i + 1]) for i in range(start, len(self._tokens))]
        needed = [key for key in keys if len(key) < self.horizon]
        kept = list(itertools.takewhile(self._rows.__contains__, needed))
        rows = [self._rows[key] for key in kept]
        if len(kept) < len(needed):
            rows += self._computed(needed[len(kept) :])
        rows += [np.zeros(self._num_columns, np.float32)] * (len(keys) - len(needed))
        return Logits(np.stack(rows), self._ids)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def reuse(self, tokens: Sequence[int]) -> int:
        self.truncate(common_prefix_length(self._tokens, tokens))
        return self.length

    def truncate(self, length: int) -> None:
        del self._tokens[length:]

    def open(self, source: Source) -> None:
        """Return rows of another source from now on."""
        self.source = source
        self._rows = self._rows_by_source.setdefault(source, {})
        self.truncate(0)

    def forget(self) -> None:
        """Do nothing: rows of a source stay valid."""

    def refresh(self) -> None:
        """Empty the inner model's cache, but not the memoized rows."""
        self._inner.truncate(0)

    def _computed(self, keys: list[Text]) -> list[Floats]:
        """Compute the rows after texts that grow by one token each, in one pass."""
        run_operations(open_source(self._inner, self.source))
        text, start = keys[-1], len(keys[0]) - 1
        kept = self._inner.reuse(text[:start])
        self._inner.prefill(text[kept:start])
        logits = self._inner.forward(text[start:])
        rows, self._ids = [row.copy() for row in logits.array()], logits.ids
        self._num_columns = len(rows[0])
        for key, row in zip(keys, rows, strict=True):
            if self._bytes + row.nbytes <= MAX_BYTES:
                self._rows[key] = row
                self._bytes += row.nbytes
        return rows
