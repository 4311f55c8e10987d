"""Ctrl-C while the command starts: exit 130 with one line, where Python would show a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process at once; SIGINT that is ignored, as under nohup, stays so."""
    try:
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread, to which Python gives signals
        return


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"specedge: interrupted\n")
    os._exit(130)
