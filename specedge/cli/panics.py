"""Suppression of Rust panic messages, which the command line reports as one line."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from specedge.errors import BundleError


@contextmanager
def hidden_panics() -> Iterator[None]:
    """Suppress panic messages of tokenizers loaded in this context."""
    from specedge.runtime.text import tokenizer

    before, tokenizer.around_trial = tokenizer.around_trial, _hidden
    try:
        yield
    finally:
        tokenizer.around_trial = before


@contextmanager
def _hidden() -> Iterator[None]:
    """Capture stderr, and write it at the end unless there was a panic."""
    with tempfile.TemporaryFile() as kept:
        try:
            stderr = os.dup(2)
        except OSError:  # closed by the parent process
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
