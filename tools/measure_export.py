"""Measure commands that export a model: time, memory, temporary files and size. Linux only.

    python tools/measure_export.py [--rounds N] [--steps] NAME=COMMAND ...

A command of the shell writes {folder}/result, and may write other files to {folder}, which is
temporary. Commands take turns between rounds, importing libraries included. Memory is anonymous
memory, which the system cannot reclaim, of all processes. Temporary bytes are the peak of all files
less the result. docs/export.md has the commands of specedge and of other libraries.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from harness import MB, table_header, table_row

COLUMNS = ("seconds", "CPU seconds", "anonymous memory", "temporary files", "result")


@dataclass(frozen=True)
class Sample:
    """Measurement of running processes: CPU seconds, and bytes in memory and on disk."""

    time: float
    cpu_seconds: float
    anonymous: int
    stored: int


@dataclass(frozen=True)
class Export:
    """Finished export: samples, its steps with start and end, and the bytes of its result."""

    samples: list[Sample]
    steps: list[tuple[str, float, float]]
    result: int

    def cells(self, start: float, end: float) -> list[str]:
        """Return the cells of a table for the samples between two times."""
        samples = [s for s in self.samples if start <= s.time <= end]
        samples = samples or [min(self.samples, key=lambda s: abs(s.time - end))]
        sizes = max(s.anonymous for s in samples), max(s.stored for s in samples)
        cpu = samples[-1].cpu_seconds - samples[0].cpu_seconds
        return [f"{end - start:.1f}", f"{cpu:.1f}", *(f"{size / MB:.0f} MB" for size in sizes)]

    def row(self) -> list[str]:
        """Return the cells of the whole export."""
        *cells, _ = self.cells(self.samples[0].time, self.samples[-1].time)
        temporary = max(max(s.stored for s in self.samples) - self.result, 0)
        return [*cells, f"{temporary / MB:.0f} MB", f"{self.result / MB:.0f} MB"]


def run_export(command: str, folder: Path) -> Export:
    """Run a command that writes to a folder. Raises ClickException."""
    samples: list[Sample] = []
    steps: list[tuple[str, float, float]] = []
    environment = os.environ | {"TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command.replace("{folder}", str(folder)), shell=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    sampler = threading.Thread(target=_sample, args=(process.pid, folder, samples))
    sampler.start()
    lines = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if step := re.fullmatch(r"(.+): (\d+\.\d) s\n", line):
            end = time.monotonic()
            steps.append((step[1], end - float(step[2]), end))
    sampler.join()
    if process.wait():
        raise click.ClickException(lines[-1].strip() if lines else "the command printed no error")
    return Export(samples, steps, _size(folder / "result"))


def _sample(pid: int, folder: Path, samples: list[Sample]) -> None:
    """Append a sample every 50 milliseconds until a process has ended."""
    process = psutil.Process(pid)
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        # A file, or a process, may have just ended.
        with contextlib.suppress(OSError, psutil.Error):
            family = [process, *process.children(recursive=True)]
            cpu = sum(sum(p.cpu_times()[:4]) for p in family)  # with children that have ended
            usage = [p.memory_info() for p in family]
            memory = sum(u.rss - u.shared for u in usage)
            samples.append(Sample(time.monotonic(), cpu, memory, _size(folder)))
        time.sleep(0.05)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else (p for p in path.rglob("*") if p.is_file())
    return sum(512 * p.stat().st_blocks for p in files)


@click.command()
@click.argument("commands", nargs=-1, required=True, metavar="NAME=COMMAND...")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--steps", is_flag=True, help="Also print the steps of specedge's exports.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder of temporary files.")
def main(commands: tuple[str, ...], rounds: int, steps: bool, folder: Path | None) -> None:
    """Run each COMMAND and print a row for it."""
    load = os.getloadavg()[0]
    click.echo(f"{platform.machine()}, {os.cpu_count()} CPUs, load average {load:.1f} before")
    click.echo(table_header("export", *COLUMNS))
    step_tables = []
    for name, _, command in (text.partition("=") for text in commands * rounds):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            try:
                export = run_export(command, Path(temporary).absolute())
            except click.ClickException as error:
                click.echo(table_row(name, f"failed: {error}", *[""] * (len(COLUMNS) - 1)))
                continue
        click.echo(table_row(name, *export.row()))
        if steps and export.steps:
            rows = [[step, *export.cells(*times)] for step, *times in export.steps]
            step_tables.append((name, rows))
    for name, rows in step_tables:
        click.echo("\n" + table_header(name, *COLUMNS[:3], "files"))
        click.echo("\n".join(table_row(*row) for row in rows))


if __name__ == "__main__":
    main()
