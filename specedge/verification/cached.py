"""A language model whose cache the audit can look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from specedge.runtime.decoding.protocols import LanguageModel

Array = NDArray[Any]


class Cached(LanguageModel, Protocol):
    """A model whose cache can be looked at."""

    def cache_rows(self, start: int, end: int) -> Sequence[Array]:
        """A copy of rows of every buffer."""
        ...

    def twin(self) -> Cached:
        """The same model with a cache of its own."""
        ...
