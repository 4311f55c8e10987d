"""The file that is sent back from a machine with a GPU: what its tests and measurements found.

    {"doctor": what `specedge doctor` says, "tests": by name, "bench": by device}

`pytest -m gpu tests/gpu --gpu-report FILE` and `gpu_bench.py run FOLDER --report FILE` each write
their part and keep the other's; `gpu_bench.py show FILE` prints all for people. Development only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PARTS = ("tests", "bench")


class Report:
    """A report that is there, or begins. ValueError where it is none, or not of this machine."""

    def __init__(self, path: Path, doctor: dict[str, Any] | None = None) -> None:
        self.path = path
        if path.exists():
            read(path)
        self._doctor = doctor or _doctor()
        self.read()

    def read(self) -> dict[str, Any]:
        """What the file has, if this machine and these versions wrote it."""
        if not self.path.exists():
            return {"doctor": self._doctor}
        found = read(self.path)
        before, now = _machine(found["doctor"]), _machine(self._doctor)
        if differing := [name for name, value in now.items() if before[name] != value]:
            said = "; ".join(f"{name} {before[name]}, now {now[name]}" for name in differing)
            raise ValueError(f"{self.path} is of another machine ({said}); name another file")
        return found | {"doctor": self._doctor}

    def put(self, part: str, values: dict[str, Any]) -> None:
        """Write values of a part over those of the same names, and keep the rest."""
        assert part in PARTS
        found = self.read()
        found[part] = found.get(part, {}) | values
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        os.replace(new, self.path)


def read(path: Path) -> dict[str, Any]:
    """A report. ValueError where a file is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no report but other text; name another file") from error
    if not isinstance(found, dict) or not isinstance(found.get("doctor"), dict):
        raise ValueError(f"{path} is no report of a GPU; name another file")
    return found


def tests_table(tests: dict[str, Any]) -> str:
    """How many tests ended how, what they measured, and why some did not pass."""
    counts = Counter(one["outcome"] for one in tests.values())
    lines = [", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))]
    for name, one in sorted(tests.items()):
        said = ", ".join(f"{key} {value}" for key, value in one["measured"].items())
        why = f": {_first_error(one['why'])}" if one["why"] else ""
        if said or why:
            lines.append(f"{one['outcome']} {name}{f' ({said})' if said else ''}{why}")
    return "\n".join(lines)


def _first_error(why: str) -> str:
    """One line of what pytest says of a test; it marks the error itself by an E."""
    lines = why.strip().splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])


def _doctor() -> dict[str, Any]:
    command = [sys.executable, "-m", "specedge", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _machine(doctor: dict[str, Any]) -> dict[str, Any]:
    """What two runs have in common that belong in one report."""
    driver = doctor.get("driver", {})
    return {
        "specedge": doctor.get("specedge"),
        "ONNX Runtime": doctor.get("onnxruntime", {}).get("version"),
        "driver": driver.get("version"),
        "GPUs": [gpu["name"] for gpu in driver.get("gpus", [])],
    }
