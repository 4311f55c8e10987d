"""Scripts of Node.js, beside the packages that they import."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "javascript"
SET_UP = "run tools/hosts/setup.sh DIR and set SPECEDGE_HOST_TOOLS to DIR"


def node_script(name, folder):
    """The command of a script, copied to a folder where it finds its packages; skips without."""
    packages = Path(os.environ.get("SPECEDGE_HOST_TOOLS") or "none", "clients", "node_modules")
    if not packages.exists():
        pytest.skip(f"no packages for clients in JavaScript; {SET_UP}")
    if not (node := shutil.which("node")):
        pytest.skip("node is missing; install Node.js 20 or later")
    (folder / "node_modules").symlink_to(packages.resolve())
    return [node, shutil.copy(SCRIPTS / name, folder)]


def output(command, *arguments):
    """Return the output of a script, or fail with its error output."""
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
