"""Telemetry of ONNX Runtime, which its official packages enable by default."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "ORT_DISABLE_TELEMETRY"


@contextmanager
def disabled_telemetry() -> Iterator[None]:
    """Disable telemetry while ONNX Runtime is imported, unless the user has set the variable.

    The module reads the variable once, on import; `disable_telemetry_events` is too late to prevent
    files and a thread.
    """
    if VARIABLE in os.environ or "onnxruntime" in sys.modules:
        yield
        return
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
