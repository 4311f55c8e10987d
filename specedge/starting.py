"""Ctrl-C while the command starts: exit 130 with one line, where Python would show a traceback.

Only where specedge is the command itself, whatever imports it otherwise keeps its own handlers.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from types import FrameType


def is_command() -> bool:
    """Whether this process was started as `specedge` or `python -m specedge`."""
    given = sys.argv[0] if sys.argv else ""
    if given == "-m":  # while Python looks for the module
        return ("-m", "specedge") in itertools.pairwise(sys.orig_argv)
    name = os.path.basename(given)
    folder = os.path.dirname(os.path.abspath(__file__))
    is_module = name == "__main__.py" and os.path.dirname(os.path.abspath(given)) == folder
    return is_module or name in ("specedge", "specedge.exe", "specedge-script.py")


def end_quietly_on_interrupt() -> None:
    """Let Ctrl-C end the process at once; SIGINT that is ignored, as under nohup, stays so."""
    try:
        if signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGINT, _end)
    except ValueError:  # not the main thread, to which Python gives signals
        return


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"specedge: interrupted\n")
    os._exit(130)
