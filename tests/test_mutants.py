"""Known mistakes, injected into a copy of the source, are caught by the tests named for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutants import MUTANTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_can_still_be_planted(mutant):
    assert (ROOT / mutant.file).read_text("utf-8").count(mutant.old) == 1
    file, _, test = mutant.killer.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text("utf-8")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project, whose source may be changed; the embedded pair is the same."""
    folder = tmp_path_factory.mktemp("copy") / "project"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "embedded", "*.egg-info")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    (folder / "models" / "embedded").symlink_to(ROOT / "models" / "embedded")
    return folder


def run(copy, *killers):
    """pytest's result for these tests on the copy, with the cases that are slow."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", ""]
    command = [sys.executable, "-m", "pytest", *options, *killers]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)


@pytest.mark.slow(exhaustive=True)
def test_what_kills_the_mutants_passes_without_them(copy):
    result = run(copy, *dict.fromkeys(m.killer for m in MUTANTS))
    assert result.returncode == 0, result.stdout


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_is_killed(mutant, copy):
    path = copy / mutant.file
    source = path.read_text("utf-8")
    path.write_text(source.replace(mutant.old, mutant.new), "utf-8")
    try:
        result = run(copy, mutant.killer)
    finally:
        path.write_text(source, "utf-8")
    # 1: a test failed. A mutant that cannot even be imported would be caught by anything.
    assert result.returncode == 1, result.stdout
    assert "1 failed" in result.stdout
