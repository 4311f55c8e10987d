"""Ctrl-C during startup: exit status 130 with one line instead of a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType


def exit_on_interrupt() -> None:
    """Exit at once on SIGINT, unless SIGINT is ignored, as under nohup."""
    try:
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGINT, _end)
    except ValueError:  # only the main thread can set handlers
        return


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"specedge: interrupted\n")
    os._exit(130)
