"""Bundles among the user's own, and the command line run over them."""

import io
import os
import signal
import subprocess
import sys
from unittest import mock

from manifests import make_bundle
from specedge import bundle_library
from specedge.bundle import FORMAT, MANIFEST, store

COMMAND = [sys.executable, "-m", "specedge"]


def run(*arguments, stdin="", **variables):
    """The command line in this process, which saves the second that a new one takes to start."""
    from specedge.cli import main

    streams = [io.TextIOWrapper(io.BytesIO((stdin or "").encode()), "utf-8")]
    streams += [io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2)]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    argv = ["specedge", *map(str, arguments)]
    with (
        mock.patch.multiple(sys, argv=argv, stdin=streams[0], stdout=streams[1], stderr=streams[2]),
        mock.patch.dict(os.environ, variables),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    for stream in streams[1:]:
        stream.flush()
    outputs = [stream.buffer.getvalue().decode() for stream in streams[1:]]
    return subprocess.CompletedProcess(argv, code, *outputs)


def run_process(*arguments, stdin="", **variables):
    """The command line as a user's shell runs it."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=300,
    )


def install(name="pair"):
    """A bundle among the user's."""
    folder = store.bundles_folder() / name
    make_bundle(folder)
    return folder


def listed():
    return {entry.name: entry for entry in bundle_library.entries()}


def everything_below(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def corrupt(folder):
    (folder / "target/weights.bin").write_bytes(b"short")


def age(folder):
    text = (folder / MANIFEST).read_text("utf-8")
    (folder / MANIFEST).write_text(text.replace(f'"format": {FORMAT}', '"format": 1'), "utf-8")


def garble(folder):
    (folder / MANIFEST).write_bytes(b"\xff{")


def strip(folder):
    (folder / MANIFEST).unlink()
