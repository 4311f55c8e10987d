"""A document's console sessions, run anew in a fresh clone and an empty home. Development only.

    python tools/transcript.py docs/transcript.md

runs what stands behind "$ " (and "> ", where it goes on) in its console blocks, one after another,
and puts what was printed in the place of what stood there.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import click

BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
TIMEOUT = 1800  # seconds a command


class Shell:
    """Runs commands where a first user would be: in a clone, with nothing in the home folder."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.home = folder / "specedge", folder / "home"
        self.home.mkdir()
        subprocess.run(["git", "clone", "-q", ".", self.clone], check=True)
        hidden = ("XDG_", "SPECEDGE_", "PYTHONPATH", "HF_")
        kept = {name: x for name, x in os.environ.items() if not name.startswith(hidden)}
        self.environment = {**kept, "HOME": str(self.home), "COLUMNS": "100"}

    def block(self, text: str) -> str:
        """The same commands with what they print now."""
        return "\n".join(f"$ {shown}\n{self.run(shown)}" for shown in commands(text))

    def run(self, shown: str) -> str:
        """What a command prints, and its exit code unless that is 0."""
        done = subprocess.run(
            ["bash", "-c", shown.replace("\n> ", "\n")],
            cwd=self.clone,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
        printed = done.stdout.replace(str(self.home), "~")
        if printed and not printed.endswith("\n"):
            printed += "\n"
        return printed + (f"(exit code {done.returncode})\n" if done.returncode else "")


def commands(block: str) -> list[str]:
    """The commands of a block, with the marks of the lines on which they go on."""
    return re.findall(r"^\$ (.*(?:\n> .*)*)", block, re.MULTILINE)


@click.command()
@click.argument("document", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(document: Path) -> None:
    """Run a document's console blocks and write what they print into it."""
    with tempfile.TemporaryDirectory() as folder:
        shell = Shell(Path(folder))
        text = BLOCK.sub(lambda block: shell.block(block[0]), document.read_text("utf-8"))
    document.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
