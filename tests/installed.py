"""Bundles among the user's own, and the command line run over them."""

import os
import subprocess
import sys

from manifests import make_bundle
from specedge import library, store
from specedge.bundle import FORMAT, MANIFEST

COMMAND = [sys.executable, "-m", "specedge"]


def run(*arguments, stdin="", **variables):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=120,
    )


def install(name="pair"):
    """A bundle among the user's."""
    folder = store.bundles_folder() / name
    make_bundle(folder)
    return folder


def listed():
    return {entry.name: entry for entry in library.entries()}


def everything_below(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def spoil(folder):
    (folder / "target/weights.bin").write_bytes(b"short")


def age(folder):
    text = (folder / MANIFEST).read_text("utf-8")
    (folder / MANIFEST).write_text(text.replace(f'"format": {FORMAT}', '"format": 1'), "utf-8")


def garble(folder):
    (folder / MANIFEST).write_bytes(b"\xff{")


def strip(folder):
    (folder / MANIFEST).unlink()
