"""Command line: results on stdout, everything else on stderr.

The exit status is 1 for errors, 130 for Ctrl-C and 143 for SIGTERM. With --json an error is also
written to stdout as JSON.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click

from specedge import interrupts, telemetry
from specedge.cli.bench import bench
from specedge.cli.build import build
from specedge.cli.compare import compare
from specedge.cli.doctor import doctor
from specedge.cli.embed import embed
from specedge.cli.export import export
from specedge.cli.generate import generate
from specedge.cli.inspect import inspect
from specedge.cli.library import list_, remove
from specedge.cli.ngram import ngram
from specedge.cli.serve import serve
from specedge.cli.terminal import sanitize, sanitize_line
from specedge.cli.transcribe import transcribe
from specedge.cli.tune import tune
from specedge.cli.verify import verify
from specedge.errors import SpecEdgeError
from specedge.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specedge")
def cli() -> None:
    """Export language models to ONNX and generate text with lossless speculative decoding."""


for command in (
    *(export, embed, generate, transcribe, compare, tune, bench, inspect, verify),
    *(build, serve, list_, remove, ngram, doctor),
):
    cli.add_command(command)


def main() -> None:
    """Run the command line and exit."""
    os.environ.setdefault(telemetry.VARIABLE, "1")  # also applies to child processes
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # pipes on Windows have another encoding
            stream.reconfigure(encoding="utf-8", errors="replace")
    sys.exit(_run())


def _run() -> int:
    signals = Signals()
    try:
        with signals.raised():
            code = cli.main(prog_name="specedge", standalone_mode=False)
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BaseException as error:
        if signals.last is not None:  # a library may have replaced the exception
            return _interrupted(signals.last)
        return _failed(error)


def _interrupted(number: int) -> int:
    click.echo(f"specedge: {'interrupted' if number == signal.SIGINT else 'terminated'}", err=True)
    # After an interrupt inside `exec`, which libraries use, CPython ends `python -m` by the signal
    # although it was caught; another `exec` resets that state.
    exec("")
    return 128 + number


def _failed(error: BaseException) -> int:
    """Report an error and return the exit status; unexpected errors keep their traceback."""
    message = sanitize_line(_message(error))
    if isinstance(error, click.ClickException):
        shown = io.StringIO()
        error.show(shown)
        text = shown.getvalue().replace(error.format_message(), message)
        click.echo(sanitize(text), err=True, nl=False)
    elif isinstance(error, click.Abort | KeyboardInterrupt):
        return _interrupted(signal.SIGINT)
    elif isinstance(error, SpecEdgeError | MemoryError | OSError):
        if not isinstance(error, BrokenPipeError):
            click.echo(f"specedge: {message}", err=True)
    else:
        raise error
    try:
        if asked_for_json(sys.argv[1:]) and not isinstance(error, BrokenPipeError):
            click.echo(json.dumps({"error": message}, ensure_ascii=False))
        sys.stdout.flush()
    except OSError:
        # The reader has closed the pipe, as `head` does, or the disk is full: flushing the buffer
        # must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _message(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        return f"standard output: {error.strerror}"  # an error of a file has its name
    return str(error) or ("not enough memory" if isinstance(error, MemoryError) else "failed")


def asked_for_json(arguments: list[str]) -> bool:
    """Return True if --json is among the arguments, which may be invalid."""
    ends = arguments.index("--") if "--" in arguments else len(arguments)
    return "--json" in arguments[:ends]


class Signals:
    """Conversion of SIGINT and SIGTERM to KeyboardInterrupt; `last` is the last signal."""

    def __init__(self) -> None:
        self.last: int | None = None

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Convert signals in this context; afterwards Ctrl-C ends the process at once."""
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    signal.signal(number, self._raise)
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) == self._raise:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            interrupts.exit_on_interrupt()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.last = number
        raise KeyboardInterrupt
