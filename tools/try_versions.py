"""Run the exporter's tests on the oldest and the newest libraries that pyproject.toml allows.

    PYTHONPATH=tests python tools/try_versions.py --constraints .ci/constraints.txt [tests/...]

Each set of versions is installed in a fresh virtual environment, which needs some gigabytes and
goes when its tests have run. If both ran, the table in docs/architectures.md is written anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

import tables

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "architectures.md"
SETS = ("oldest", "newest")
TESTS = ["tests/exporter"]


@dataclass(frozen=True)
class Run:
    """What was installed, and pytest's last line."""

    which: str
    versions: dict[str, str]
    summary: str
    passed: bool


def main() -> int:
    """Run what is asked for, write the table; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or folders of tests")
    parser.add_argument("--constraints", type=Path, help="a constraints file for pip")
    parser.add_argument("--sets", nargs="*", choices=SETS, default=SETS)
    parser.add_argument("--select", help="pytest's -k")
    options = parser.parse_args()
    chosen = [*options.tests, *(["-k", options.select] if options.select else [])]
    runs = [run(which, options.constraints, chosen) for which in options.sets]
    if len(runs) == len(SETS):
        write(runs, " ".join(["pytest", *chosen]))
    return 0 if all(one.passed for one in runs) else 1


def requirements() -> list[Requirement]:
    """Those of the export extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [Requirement(line) for line in project["optional-dependencies"]["export"]]


def pins(which: str) -> list[str]:
    """Lines of a constraints file that hold each library at its floor, or none."""
    if which == "newest":
        return []
    floors = (
        (requirement.name, next(s.version for s in requirement.specifier if s.operator == ">="))
        for requirement in requirements()
    )
    return [f"{name}=={version}" for name, version in floors]


def run(which: str, constraints: Path | None, tests: list[str]) -> Run:
    """Install one set in a new environment and run the tests there."""
    with tempfile.TemporaryDirectory(prefix="versions-") as folder:
        python = str(environment(Path(folder), which, constraints))
        listed = subprocess.run(
            [python, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
        )
        installed = {canonical(x["name"]): x["version"] for x in json.loads(listed.stdout)}
        names = [requirement.name for requirement in requirements()]
        result = subprocess.run(
            [python, "-m", "pytest", "-q", "-n", "auto", "--tb=line", "-rfE", *tests],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    print(result.stdout[-20000:], file=sys.stderr)
    summary = result.stdout.strip().splitlines()[-1].strip("= ")
    versions = {name: installed[canonical(name)] for name in names}
    return Run(which, versions, summary, result.returncode == 0)


def environment(folder: Path, which: str, constraints: Path | None) -> Path:
    """A virtual environment with this checkout and one set of versions; its Python."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    lines = constraints.read_text("utf-8").splitlines() if constraints else []
    given = {Requirement(line).name for line in lines if line and not line.startswith("#")}
    lines += [pin for pin in pins(which) if Requirement(pin).name not in given]
    (folder / "constraints.txt").write_text("\n".join(lines) + "\n", "utf-8")
    wanted = [f"{ROOT}[cpu,export,test]", "-c", str(folder / "constraints.txt")]
    subprocess.run([str(python), "-m", "pip", "install", "-q", "-e", *wanted], check=True)
    return python


def canonical(name: str) -> str:
    """One spelling for names that pip takes as equal."""
    return name.lower().replace("_", "-")


def write(runs: list[Run], command: str) -> None:
    """Put a column a set into the document's table."""
    rows = [
        "| | " + " | ".join(one.which for one in runs) + " |",
        "|---" * (len(runs) + 1) + "|",
        *(
            f"| {name} | " + " | ".join(one.versions[name] for one in runs) + " |"
            for name in runs[0].versions
        ),
        f"| `{command}` | " + " | ".join(one.summary for one in runs) + " |",
    ]
    tables.put(DOCUMENT, "versions", rows)


if __name__ == "__main__":
    sys.exit(main())
