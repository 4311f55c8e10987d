"""The command line: text to stdout, all else to stderr; exit 1 on errors, 130 on Ctrl-C."""

from __future__ import annotations

import io
import os
import sys

import click

from specedge.cli.bench import bench
from specedge.cli.compare import compare
from specedge.cli.export import export
from specedge.cli.generate import generate
from specedge.cli.inspect import inspect
from specedge.cli.library import list_, remove
from specedge.cli.ngram import ngram
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
    *(export, generate, compare, tune, bench, inspect, verify),
    *(list_, remove, theory, ngram),
):
    cli.add_command(command)


def main() -> None:
    """Run the command line and exit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe on Windows is not UTF-8 by itself
            stream.reconfigure(encoding="utf-8", errors="replace")
    sys.exit(_run())


def _run() -> int:
    try:
        code = cli.main(prog_name="specedge", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return 1
    except (click.Abort, KeyboardInterrupt):
        click.echo("specedge: interrupted", err=True)
        # An interrupt that passed through source given to `exec`, as libraries do, has CPython end
        # `python -m` by the signal though it was caught; executing any source forgets that.
        exec("")
        return 130
    except SpecEdgeError as error:
        click.echo(f"specedge: {error}", err=True)
        return 1
    except OSError as error:
        # Whether the reader of our output went away, as `head` does, or the disk under it is full:
        # what is left in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            click.echo(f"specedge: {error}", err=True)
        return 1
