"""Measure exports: time, memory, temporary files and size, beside converters of other libraries.

    python tools/measure_export.py TARGET [--draft DRAFT] [--precisions fp32,int8] [--steps]
    python tools/measure_export.py TARGET --exporters specedge,llamacpp,genai,optimum [--rounds N]

TARGET is a GGUF file or a checkpoint folder; other libraries get a GGUF file's weights as a float32
checkpoint. Each export is a process of its own, importing libraries included; exports alternate
between rounds. Memory is anonymous memory, which the system cannot reclaim, of all processes.
Temporary bytes are the peak of all files less the result. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import platformdirs
import psutil

from harness import MB, table_header, table_row

sys.path.append(str(Path(__file__).with_name("peers")))

from environments import EXPORTERS, UnavailableError, llama_cpp, python_of
from reference import Reference

CACHE = Path(platformdirs.user_cache_dir("specedge")).absolute()
ENVIRONMENTS = CACHE / "environments"
COLUMNS = ("seconds", "CPU seconds", "anonymous memory", "temporary files", "result")
Command = list[str | Path]


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

    def step_rows(self) -> Iterator[list[str]]:
        """Yield name and cells of each step."""
        for name, start, end in self.steps:
            yield [name, *self.cells(start, end)]


def specedge_commands(
    target: Path, draft: str | None, precision: str, result: Path
) -> list[Command]:
    """Return the command of `specedge export`."""
    command: Command = [sys.executable, "-m", "specedge", "export", "--target", target]
    command += ["--draft", draft] if draft else []
    return [[*command, "--precision", precision, "--output", result]]


def llamacpp_commands(checkpoint: Path, precision: str, result: Path) -> list[Command]:
    """Return the commands of llama.cpp: conversion to float16, then quantization."""
    programs = llama_cpp(ENVIRONMENTS)
    convert = next(programs.parents[1].glob("*/vendor/llama.cpp/convert_hf_to_gguf.py"))
    whole = result.with_name("whole.gguf") if precision != "f16" else result
    commands: list[Command] = [
        [sys.executable, convert, checkpoint, "--outtype", "f16", "--outfile", whole]
    ]
    if precision != "f16":
        commands.append([programs / "llama-quantize", whole, result, precision])
    return commands


def genai_commands(checkpoint: Path, precision: str, result: Path) -> list[Command]:
    """Return the command of onnxruntime-genai's model builder."""
    python = python_of(EXPORTERS["genai"], ENVIRONMENTS, {})
    options = ["-e", "cpu", "-c", result.with_name("scratch")]
    builder = [python, "-m", "onnxruntime_genai.models.builder"]
    return [[*builder, "-i", checkpoint, "-o", result, "-p", precision, *options]]


def optimum_commands(checkpoint: Path, precision: str, result: Path) -> list[Command]:
    """Return the command of optimum's ONNX export, with the key-value cache."""
    cli = Path(python_of(EXPORTERS["optimum"], ENVIRONMENTS, {})).with_name("optimum-cli")
    options = ["--task", "text-generation-with-past", "--dtype", precision]
    return [[cli, "export", "onnx", "--model", checkpoint, *options, result]]


PEER_COMMANDS: dict[str, Callable[[Path, str, Path], list[Command]]] = {
    "llamacpp": llamacpp_commands,
    "genai": genai_commands,
    "optimum": optimum_commands,
}


def run_export(commands: list[Command], result: Path) -> Export:
    """Run an export's commands in the folder of the result. Raises ClickException."""
    samples: list[Sample] = []
    steps: list[tuple[str, float, float]] = []
    environment = os.environ | {"TMPDIR": str(result.parent), "HF_HUB_OFFLINE": "1"}
    for command in commands:
        process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=environment, cwd=result.parent,
        )  # fmt: skip
        sampler = threading.Thread(target=_sample, args=(process.pid, result.parent, samples))
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
            last = lines[-1].strip() if lines else "it printed no error"
            raise click.ClickException(f"{Path(command[0]).name} failed: {last}")
    return Export(samples, steps, _size(result))


def _sample(pid: int, folder: Path, samples: list[Sample]) -> None:
    """Append a sample every 50 milliseconds until a process has ended."""
    before = samples[-1].cpu_seconds if samples else 0.0
    process = psutil.Process(pid)
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        # A file, or a process, may have just ended.
        with contextlib.suppress(OSError, psutil.Error):
            family = [process, *process.children(recursive=True)]
            cpu = sum(sum(p.cpu_times()[:2]) for p in family) + sum(process.cpu_times()[2:4])
            usage = [p.memory_info() for p in family]
            memory = sum(u.rss - u.shared for u in usage)
            samples.append(Sample(time.monotonic(), before + cpu, memory, _size(folder)))
        time.sleep(0.05)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else (p for p in path.rglob("*") if p.is_file())
    return sum(512 * p.stat().st_blocks for p in files)


@click.command()
@click.argument("target", type=click.Path(exists=True, path_type=Path))
@click.option("--draft", help="Draft model of specedge's exports, or self:N.  [default: none]")
@click.option(
    "--precisions", default="fp32,int8,int4,keep", show_default=True, help="Of specedge's exports."
)
@click.option(
    "--exporters", default="specedge", show_default=True,
    help=f"Comma-separated, of {', '.join(EXPORTERS)}.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--steps", is_flag=True, help="Also print the steps of specedge's exports.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder of temporary files.")
def main(
    target: Path,
    draft: str | None,
    precisions: str,
    exporters: str,
    rounds: int,
    steps: bool,
    folder: Path | None,
) -> None:
    """Export TARGET by each library and print a row for each export."""
    target, names = target.absolute(), exporters.split(",")
    if unknown := {*names} - {*EXPORTERS}:
        raise click.UsageError(f"no exporter {', '.join(unknown)}")
    checkpoint = target
    if target.is_file() and names != ["specedge"]:
        checkpoint = Reference(target, CACHE / "models").checkpoint
    load = os.getloadavg()[0]
    click.echo(f"{platform.machine()}, {os.cpu_count()} CPUs, load average {load:.1f} before")
    click.echo(table_header("exporter", *COLUMNS))
    step_tables = []
    for _ in range(rounds):
        for name in names:
            for precision in (
                precisions.split(",") if name == "specedge" else EXPORTERS[name].precisions
            ):
                label = f"{EXPORTERS[name].label} {precision}"
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    result = Path(scratch).absolute() / "result"
                    try:
                        if name == "specedge":
                            commands = specedge_commands(target, draft, precision, result)
                        else:
                            commands = PEER_COMMANDS[name](checkpoint, precision, result)
                        export = run_export(commands, result)
                    except (UnavailableError, click.ClickException) as error:
                        click.echo(table_row(label, error, *[""] * (len(COLUMNS) - 1)))
                        continue
                click.echo(table_row(label, *export.row()))
                if steps and export.steps:
                    step_tables.append((label, [*export.step_rows()]))
    for label, rows in step_tables:
        click.echo("\n" + table_header(label, *COLUMNS[:3], "files"))
        click.echo("\n".join(table_row(*row) for row in rows))


if __name__ == "__main__":
    main()
