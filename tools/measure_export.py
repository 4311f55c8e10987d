"""Time and memory of exports at the true sizes of published models. Development only.

    python tools/measure_export.py [NAME ...] [--folder FOLDER] [--json FILE]

writes a random checkpoint of each published shape (tools/shapes.py), exports it beside a draft of
one small layer, in both op sets, and prints a row of docs/measurements.md's table for each. The
yardstick of time is a plain copy of the checkpoint's weights, file by file, with nothing of them in
the system's cache before. Memory is asked for every 20 milliseconds: Linux only. --json has more:
the processors' time of each step, which says more on a busy machine, and memory by step.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import safetensors

import shapes
from specedge.errors import SpecEdgeError
from specedge.exporter import Progress, export

# A draft of one small layer: what a published shape has otherwise. It has the target's tokenizer.
_SMALL = {
    "vocab_size": shapes.VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
_SMALL_GPT2 = {"vocab_size": shapes.VOCAB_SIZE, "n_embd": 64, "n_layer": 1, "n_head": 2}
STEPS = ("Loading", "Tracing", "Writing", "Running", "Comparing")
GB = 1e9
NO_FILES = 4 * GB  # and the largest matrix in float64: the aim
HEADER = [
    "| shape | weights | copy | export | loading | tracing | writing | PyTorch | comparing "
    "| copies | resident | no file's, its aim | without comparing |",
    "|" + "---|" * 13,
]


@dataclass
class Measured:
    """One export: seconds, and peaks of memory in bytes, altogether and by step."""

    name: str
    size: int  # bytes of the weights
    largest: int  # numbers in the largest matrix
    copy: float
    seconds: float = 0.0
    steps: dict[str, float] = field(default_factory=dict)
    processors: dict[str, float] = field(default_factory=dict)  # seconds of all cores together
    resident: int = 0
    no_files: int = 0
    no_files_by_step: dict[str, int] = field(default_factory=dict)
    resident_by_step: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def copies(self) -> float:
        """What the export takes beside tracing, in copies of the weights."""
        return (self.seconds - self.steps.get("Tracing", 0)) / self.copy

    def row(self) -> str:
        """Its line in the table."""
        split = " | ".join(f"{self.steps.get(step, 0):.0f} s" for step in STEPS)
        before = max(self.no_files_by_step.get(step, 0) for step in STEPS[:3])
        return (
            f"| {self.name} | {self.size / GB:.2f} GB | {self.copy:.1f} s | {self.seconds:.0f} s "
            f"| {split} | {self.copies:.1f} | {self.resident / GB:.2f} GB "
            f"| {self.no_files / GB:.2f} of {(NO_FILES + 8 * self.largest) / GB:.2f} GB "
            f"| {before / GB:.2f} GB |"
        )


class Timed(Progress):
    """Writes a line of JSON for each step: its name, and when it began and ended."""

    @contextlib.contextmanager
    def shown(self, description: str, total: int | None) -> Iterator[Any]:
        """What the caller sees of a step."""
        start = _now()
        try:
            yield lambda amount: None
        finally:
            print(json.dumps([description, start, _now()]), flush=True)


def _now() -> tuple[float, float]:
    """The time, and what the processors have given this process of theirs."""
    return time.time(), time.process_time()


class Watch:
    """The memory of a process while it runs."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.resident = 0
        self.seen: list[tuple[float, int, int]] = []  # when, bytes of no file, and resident
        self._process = process
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def done(self) -> None:
        """Wait for the end of the process."""
        self._thread.join()

    def _look(self) -> None:
        status = Path(f"/proc/{self._process.pid}/status")
        while self._process.poll() is None:
            try:
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
            except OSError:
                break
            if "VmHWM" in lines:
                self.resident = max(self.resident, _bytes(lines["VmHWM"]))
                self.seen.append((time.time(), _bytes(lines["RssAnon"]), _bytes(lines["VmRSS"])))
            time.sleep(0.02)


def _bytes(text: str) -> int:
    return 1024 * int(text.split()[0])


def measure(name: str, place: Path) -> Measured:
    """Write a checkpoint, export it, and remove both."""
    shape = shapes.SHAPES[name]
    target = shapes.write(place / "target", shape)
    small = _SMALL_GPT2 if shape["model_type"] == "gpt2" else _SMALL
    shapes.write(place / "draft", {**shape, **small})
    files = sorted(target.glob("*.safetensors"))
    found = Measured(
        name, sum(f.stat().st_size for f in files), _largest(files), _copy_seconds(files, place)
    )
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, "--one", str(place)], stdout=subprocess.PIPE, text=True
    )
    watch = Watch(process)
    said, _ = process.communicate()
    found.seconds = time.perf_counter() - start
    watch.done()
    found.resident = watch.resident
    found.no_files = max((size for _, size, _ in watch.seen), default=0)
    for line in map(json.loads, said.splitlines()):
        if isinstance(line, str):
            found.error = line
        else:
            _add(found, watch, *line)
    if process.returncode:
        found.error = found.error or f"exit {process.returncode}"
    for part in ("target", "draft", "bundle"):
        shutil.rmtree(place / part, ignore_errors=True)
    return found


def _add(
    found: Measured, watch: Watch, step: str, start: tuple[float, float], end: tuple[float, float]
) -> None:
    """Count a step's time and memory with others of its kind, of both models."""
    kind = step.split()[0]
    for seconds, clock in ((found.steps, 0), (found.processors, 1)):
        seconds[kind] = seconds.get(kind, 0) + end[clock] - start[clock]
    seen = [sizes for when, *sizes in watch.seen if start[0] <= when <= end[0]]
    for place, peaks in enumerate((found.no_files_by_step, found.resident_by_step)):
        peaks[kind] = max((peaks.get(kind, 0), *(sizes[place] for sizes in seen)))


def _largest(files: list[Path]) -> int:
    sizes = []
    for file in files:
        with safetensors.safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                shape = tensors.get_slice(key).get_shape()
                sizes.append(shape[0] * shape[1] if len(shape) == 2 else 0)
    return max(sizes)


def _copy_seconds(files: list[Path], place: Path) -> float:
    """What reading the weights and writing as many bytes takes."""
    _forget(files)
    start = time.perf_counter()
    with (place / "copy").open("wb") as copy:
        for file in files:
            with file.open("rb") as source:
                shutil.copyfileobj(source, copy, 8 << 20)
    seconds = time.perf_counter() - start
    (place / "copy").unlink()
    _forget(files)
    return seconds


def _forget(files: list[Path]) -> None:
    """Drop files from the system's cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _export(place: Path) -> None:
    """What is measured, in a process of its own."""
    try:
        export(place / "draft", place / "target", place / "bundle", progress=Timed())
    except SpecEdgeError as error:
        print(json.dumps(str(error)), flush=True)
        sys.exit(1)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(shapes.SHAPES)))
@click.option("--folder", type=click.Path(path_type=Path), help="Where files of this size may go.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Append all figures to this.")
@click.option("--one", type=click.Path(path_type=Path), hidden=True)
def main(names: tuple[str, ...], folder: Path | None, path: Path | None, one: Path | None) -> None:
    """Export random models of published shapes (all if none is named); print what that took."""
    if one is not None:
        _export(one)
        return
    click.echo("\n".join(HEADER))
    for name in names or shapes.SHAPES:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            found = measure(name, Path(place))
        click.echo(found.row())
        if found.error:
            click.echo(f"{name}: {found.error}", err=True)
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
