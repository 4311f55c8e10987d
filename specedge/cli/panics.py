"""Reports of Rust panics, kept from stderr: the command line has one line for each."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from specedge.errors import BundleError


@contextmanager
def hidden_panics() -> Iterator[None]:
    """Hide panics of tokenizers that are loaded in this context."""
    from specedge.runtime.text import tokenizing

    before, tokenizing.around_trial = tokenizing.around_trial, _hidden
    try:
        yield
    finally:
        tokenizing.around_trial = before


@contextmanager
def _hidden() -> Iterator[None]:
    """Keep back what is written to stderr, and write it after all unless there was a panic."""
    with tempfile.TemporaryFile() as kept:
        try:
            stderr = os.dup(2)
        except OSError:  # closed by whoever started us
            yield
            return
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BundleError:
            kept.truncate(0)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            kept.seek(0)
            if late := kept.read():
                os.write(2, late)
