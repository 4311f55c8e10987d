"""Telemetry of ONNX Runtime, which its official packages collect."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "ORT_DISABLE_TELEMETRY"


@contextmanager
def disabled_telemetry() -> Iterator[None]:
    """Let ONNX Runtime be imported without telemetry, unless the app has set the variable.

    Its module reads the variable once, when it is imported; `disable_telemetry_events` comes too
    late to keep it from writing files and starting a thread.
    """
    if VARIABLE in os.environ or "onnxruntime" in sys.modules:
        yield
        return
    os.environ[VARIABLE] = "1"
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
