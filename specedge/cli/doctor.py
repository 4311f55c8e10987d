"""Command `specedge doctor`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options
from specedge.cli.terminal import progress_reports, sanitize_line

if TYPE_CHECKING:
    from specedge.diagnosis.doctor import DeviceDiagnosis, Diagnosis, Problem

DEVICES = ("cpu", "cuda", "tensorrt", "rtx")


@click.command()
@click.option(
    "--device",
    type=click.Choice(DEVICES),
    help="Test this device only; exit 1 if it does not work.",
)
@click.option("--report", metavar="FILE", help="Write the full diagnosis as JSON, for bug reports.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@options.as_json
def doctor(device: str | None, report: str | None, overwrite: bool, as_json: bool) -> None:
    """Diagnose devices and packages.

    Shows which devices work on this machine, and how to fix those that do not.
    """
    if overwrite and report is None:
        raise click.UsageError("--overwrite requires --report")
    if report is not None:
        options.check_output(report, [], overwrite, "--report")
    from specedge.diagnosis.doctor import diagnose

    with progress_reports("diagnosing") as show:
        diagnosis = diagnose([device] if device else DEVICES, lambda step: show(next_=step))
    text = json.dumps(diagnosis.as_dict(), ensure_ascii=False, indent=1)
    click.echo(text if as_json else "\n".join(map(sanitize_line, _lines(diagnosis))))
    if report is not None:
        options.write_output(report, text + "\n", overwrite, "--report")
    if not any(device.works for device in diagnosis.devices):
        raise click.exceptions.Exit(1)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    values = diagnosis.as_dict()
    yield f"specedge         {values['specedge']}, Python {values['python']}"
    yield f"platform         {values['platform']}, {values['cores']} cores"
    if values["jetson"]:
        yield f"Jetson           {values['jetson']}"
    yield f"ONNX Runtime     {_runtime(diagnosis)}"
    yield f"NVIDIA driver    {_driver(values['driver'])}"
    for gpu in values["driver"].get("gpus", []):
        yield f"GPU              {_gpu(gpu)}"
    for problem in diagnosis.machine.problems:
        yield ""
        yield f"packages         {problem.what}"
        yield from _fix(problem)
    shown = [*diagnosis.machine.problems]
    for device in diagnosis.devices:
        yield ""
        yield from _device(device, shown)
        shown += device.reasons


def _runtime(diagnosis: Diagnosis) -> str:
    answers, names = diagnosis.machine.runtime.answers, diagnosis.machine.names
    if "version" not in answers:
        return f"cannot be imported{f' ({names})' if names else ''}"
    cuda = f", for CUDA {answers['cuda']}" if answers["cuda"] else ""
    return f"{answers['version']}{cuda} ({names or 'not installed by pip'})"


def _driver(answers: dict[str, Any]) -> str:
    if "missing" in answers:
        return "none"
    if "cuda" not in answers:
        return "does not respond"
    return f"{answers['version'] or 'unknown version'}, supports CUDA {answers['cuda']}"


def _gpu(gpu: dict[str, Any]) -> str:
    free = "" if gpu["free"] is None else f", {gpu['free'] / 1e9:.1f} GB free"
    major, minor = gpu["capability"]
    return f"{gpu['name']}, compute capability {major}.{minor}, {gpu['memory'] / 1e9:.1f} GB{free}"


def _device(device: DeviceDiagnosis, shown: list[Problem]) -> Iterator[str]:
    yield f"{device.name:16} {'works' if device.works else 'does not work'}"
    for note in device.notes:
        yield f"  {note}"
    for reason in device.reasons:
        if reason in shown:
            yield f"  {reason.what} (see above)"
        else:
            yield f"  {reason.what}"
            yield from _fix(reason)


def _fix(problem: Problem) -> Iterator[str]:
    if problem.fix:
        yield f"  fix: {problem.fix}"
