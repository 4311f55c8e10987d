"""The cost table of a loaded bundle: stored on this machine, else measured at load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from specedge.bundle import store
from specedge.errors import SpecEdgeError
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS

from . import cost_files
from .cost_table import CostTable, assumed


class KnownCosts:
    """The `table` that requests plan with; a request that began keeps the one it began with.

    Without a `key`, in a pipeline that was not loaded, nothing is stored and costs are assumed.
    `note` says in one line why a stored table is not used.
    """

    def __init__(self, key: cost_files.Key | None = None) -> None:
        self._key = key
        stored, self.note = (None, None) if key is None else cost_files.read(key)
        self.table = stored or assumed(MAX_EXPORTED_DRAFT_TOKENS)

    @property
    def is_measured(self) -> bool:
        """Return True if the table is this bundle's on this machine."""
        return self.table.origin != "assumed"

    def complete(self, measure: Callable[[], CostTable]) -> None:
        """Measure where nothing is stored, and store that unless another process was first.

        Where it cannot be stored it serves this process.
        """
        if not self.is_measured:
            self.table = measure()
            if self._key is not None:
                with contextlib.suppress(OSError):
                    self.table = cost_files.write_first(self._key, self.table)

    def remember(self, table: CostTable) -> Path:
        """Use these costs from now on, in later processes too. Raises SpecEdgeError."""
        if self._key is None:
            raise SpecEdgeError("costs of a pipeline that was not loaded are not stored")
        path = cost_files.write(self._key, table)
        self.table = table
        return path

    def remember_as_default(self, table: CostTable) -> Path:
        """Store costs for pipelines that are given no number of threads. Raises SpecEdgeError."""
        if self._key is None:
            raise SpecEdgeError("costs of a pipeline that was not loaded are not stored")
        return cost_files.write(replace(self._key, threads=0), table)

    def check_writable(self) -> None:
        """Raise OSError where costs could not be stored now."""
        if self._key is not None:
            store.check_writable(self._key.path)
