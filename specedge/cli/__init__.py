"""The command line: text to stdout, all else to stderr.

Exit 1 on errors, 130 on Ctrl-C, 143 on SIGTERM. Under --json an error is JSON on stdout, too.
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
from specedge.cli.terminal import lines, one_line
from specedge.cli.theory import theory
from specedge.cli.tune import tune
from specedge.cli.verify import verify
from specedge.errors import SpecEdgeError
from specedge.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="specedge")
def cli() -> None:
    """Export a draft and a target model to ONNX and generate with lossless speculative decoding."""


for command in (
    *(export, embed, generate, compare, tune, bench, inspect, verify),
    *(build, serve, list_, remove, theory, ngram, doctor),
):
    cli.add_command(command)


def main() -> None:
    """Run the command line and exit."""
    os.environ.setdefault(telemetry.VARIABLE, "1")  # of child processes, too
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe on Windows is not UTF-8 by itself
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
        if signals.last is not None:  # whatever a library made of it
            return _interrupted(signals.last)
        return _failed(error)


def _interrupted(number: int) -> int:
    click.echo(f"specedge: {'interrupted' if number == signal.SIGINT else 'terminated'}", err=True)
    # An interrupt that passed through source given to `exec`, as libraries do, has CPython end
    # `python -m` by the signal though it was caught; executing any source forgets that.
    exec("")
    return 128 + number


def _failed(error: BaseException) -> int:
    """Say what went wrong, under --json on stdout, too; a mistake of ours stays a traceback."""
    message = one_line(_message(error))
    if isinstance(error, click.ClickException):
        shown = io.StringIO()
        error.show(shown)
        text = shown.getvalue().replace(error.format_message(), message)
        click.echo(lines(text), err=True, nl=False)
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
        # Whether the reader of our output went away, as `head` does, or the disk under it is full:
        # what is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _message(error: BaseException) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.filename is None and error.strerror:
        return f"standard output: {error.strerror}"  # errors of files have names
    return str(error) or ("not enough memory" if isinstance(error, MemoryError) else "failed")


def asked_for_json(arguments: list[str]) -> bool:
    """Whether --json is among the options, though they may not be valid."""
    ends = arguments.index("--") if "--" in arguments else len(arguments)
    return "--json" in arguments[:ends]


class Signals:
    """SIGINT and SIGTERM as KeyboardInterrupt while a command runs; which one came last."""

    def __init__(self) -> None:
        self.last: int | None = None

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise them; afterwards Ctrl-C ends the process at once."""
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
