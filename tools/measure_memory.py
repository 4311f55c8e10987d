"""Measure the memory of a loaded bundle and of an export. Linux only.

    python tools/measure_memory.py bundle BUNDLE ... [--ops OPS]
    python tools/measure_memory.py export TARGET [--draft DRAFT] [--precision int8]

`bundle`: a new process loads the bundle and fills its context, greedily and at temperature 1; its
peak is compared with the peak estimate. `export`: time and peaks by step and in total, of resident
memory, of anonymous memory, which the system cannot reclaim, and of the bytes on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from harness import MB, process_memory, table_header, table_row
from specedge.bundle import Bundle
from specedge.runtime.requests.loader import load, memory_of

NEW_TOKENS = 64
Sample = tuple[float, int, int, int]  # time, resident, anonymous and stored bytes
BUNDLE_COLUMNS = (
    *("bundle", "weights", "caches", "predicted: opening", "running"),
    *("measured: loaded", "at the end", "peak", "predicted over measured"),
)


@click.group()
def main() -> None:
    """Measure memory."""


@main.command("bundle")
@click.argument("bundles", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--ops", default="auto", show_default=True, help="Graph variant to run.")
@click.option("--fill", is_flag=True, hidden=True)
def measure_bundles(bundles: tuple[Path, ...], ops: str, fill: bool) -> None:
    """Compare the predicted and the measured peak of each bundle."""
    if fill:
        click.echo(" ".join(map(str, fill_context(bundles[0], ops))))
        return
    click.echo(table_header(*BUNDLE_COLUMNS))
    for bundle in bundles:
        need = memory_of(Bundle.read(bundle), ops)
        command = [sys.executable, __file__, "bundle", "--fill", "--ops", ops, str(bundle)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        measured = list(map(int, output.split()))
        weights = need.target.weights + (need.draft.weights if need.draft else 0)
        sizes = [weights, need.parts["caches"], need.opening, need.running, *measured]
        cells = [f"{size / MB:.0f} MB" for size in sizes]
        click.echo(table_row(bundle.name, *cells, f"{need.peak / measured[-1]:.3f}"))


def fill_context(bundle: Path, ops: str) -> tuple[int, int, int]:
    """Load a bundle and fill its context; return the bytes after loading, at the end, and peak."""
    pipeline = load(bundle, ops=ops)
    loaded = process_memory("VmRSS")
    prompt = [1] * (pipeline.bundle.context_length - NEW_TOKENS)
    for temperature in (0.0, 1.0):
        pipeline.forget()
        pipeline.generate(prompt, NEW_TOKENS, temperature, seed=1, ignore_eos=True)
    return loaded, process_memory("VmRSS"), process_memory("VmHWM")


@main.command("export")
@click.argument("target", type=click.Path(exists=True, path_type=Path))
@click.option("--draft", help="Checkpoint of the draft model, or self:N. [default: none]")
@click.option("--precision", default="fp32", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Folder for the temporary bundle.")
@click.option("--output", hidden=True)
def measure_export(
    target: Path, draft: str | None, precision: str, folder: Path | None, output: str | None
) -> None:
    """Export a checkpoint and print the seconds and the memory of each step."""
    if output:
        _export(draft, target, output, precision)
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, __file__, "export", str(target), "--precision", precision]
        command += ["--output", os.path.join(scratch, "bundle")]
        command += ["--draft", draft] if draft else []
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        samples: list[Sample] = []
        sampler = threading.Thread(target=_sample, args=(process, Path(scratch), samples))
        start = time.time()
        sampler.start()
        lines, _ = process.communicate()
        sampler.join()
    click.echo(table_header("step", "seconds", "CPU seconds", "resident", "anonymous", "on disk"))
    steps = list(map(json.loads, lines.splitlines()))
    whole = ("whole process", (start, 0.0), (time.time(), steps[-1][2][1] if steps else 0.0))
    for step, before, after in (*steps, whole):
        peaks = [sizes for when, *sizes in samples if before[0] <= when <= after[0]] or [[0, 0, 0]]
        sizes = [f"{max(column) / MB:.0f} MB" for column in zip(*peaks, strict=True)]
        times = [f"{b - a:.1f}" for a, b in zip(before, after, strict=True)]
        click.echo(table_row(step, *times, *sizes))
    if process.returncode:
        raise click.ClickException("the export failed")


def _export(draft: str | None, target: Path, output: str, precision: str) -> None:
    """Export in this process; print name, start and end of each step as a JSON line."""
    from specedge.errors import SpecEdgeError
    from specedge.exporter import Progress, export

    class TimedProgress(Progress):
        @contextlib.contextmanager
        def shown(self, description: str, total: int | None) -> Iterator[Any]:
            start = time.time(), time.process_time()
            yield lambda amount: None
            print(json.dumps([description, start, (time.time(), time.process_time())]), flush=True)

    try:
        export(draft, target, output, precision=precision, progress=TimedProgress())
    except SpecEdgeError as error:
        raise click.ClickException(str(error)) from error


def _sample(process: subprocess.Popen[str], folder: Path, samples: list[Sample]) -> None:
    """Append time, resident and anonymous bytes, and bytes in a folder every 50 milliseconds."""
    while process.poll() is None:
        with contextlib.suppress(OSError, StopIteration):  # a file, or the process, has just ended
            sizes = [process_memory(name, process.pid) for name in ("VmRSS", "RssAnon")]
            on_disk = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            samples.append((time.time(), *sizes, on_disk))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
