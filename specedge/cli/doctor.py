"""`specedge doctor`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options, progress
from specedge.cli.terminal import one_line

if TYPE_CHECKING:
    from specedge.diagnosis.doctor import Diagnosis
    from specedge.diagnosis.machine import Finding
    from specedge.diagnosis.providers import Device

DEVICES = ("cpu", "cuda", "tensorrt", "rtx")


@click.command()
@click.option(
    "--device", type=click.Choice(DEVICES), help="Try this one alone; exit 1 unless it works."
)
@click.option("--report", metavar="FILE", help="Write all that was found, as JSON, to send back.")
@click.option("--overwrite", is_flag=True, help="Replace a file that exists.")
@options.as_json
def doctor(device: str | None, report: str | None, overwrite: bool, as_json: bool) -> None:
    """Say what works on this machine, why the rest does not, and the command that helps."""
    if overwrite and report is None:
        raise click.UsageError("--overwrite needs --report")
    if report is not None:
        options.check_output(report, [], overwrite, "--report")
    from specedge.diagnosis.doctor import diagnose

    with progress.told("looking") as tell:
        found = diagnose([device] if device else DEVICES, lambda what: tell(next_=what))
    text = json.dumps(found.as_dict(), ensure_ascii=False, indent=1)
    click.echo(text if as_json else "\n".join(map(one_line, _lines(found))))
    if report is not None:
        options.write_output(report, text + "\n", overwrite, "--report")
    if not any(one.works for one in found.devices):
        raise click.exceptions.Exit(1)


def _lines(found: Diagnosis) -> Iterator[str]:
    facts = found.as_dict()
    yield f"specedge         {facts['specedge']}, Python {facts['python']}"
    yield f"platform         {facts['platform']}, {facts['cores']} cores"
    if facts["jetson"]:
        yield f"Jetson           {facts['jetson']}"
    yield f"ONNX Runtime     {_runtime(found)}"
    yield f"NVIDIA driver    {_driver(facts['driver'])}"
    for gpu in facts["driver"].get("gpus", []):
        yield f"GPU              {_gpu(gpu)}"
    for finding in found.findings:
        yield ""
        yield f"packages         {finding.what}"
        yield from _fix(finding)
    said = [*found.findings]
    for one in found.devices:
        yield ""
        yield from _device(one, said)
        said += one.reasons


def _runtime(found: Diagnosis) -> str:
    facts, names = found.machine.runtime.facts, ", ".join(map(str, found.machine.packages))
    if "version" not in facts:
        return f"none that can be imported{f' ({names})' if names else ''}"
    cuda = f", for CUDA {facts['cuda']}" if facts["cuda"] else ""
    return f"{facts['version']}{cuda} ({names or 'of no package that pip knows'})"


def _driver(facts: dict[str, Any]) -> str:
    if "missing" in facts:
        return "none"
    if "cuda" not in facts:
        return "does not answer"
    return f"{facts['version'] or 'of unknown version'}, for CUDA {facts['cuda']} and older"


def _gpu(gpu: dict[str, Any]) -> str:
    free = "" if gpu["free"] is None else f", {gpu['free'] / 1e9:.1f} GB free"
    major, minor = gpu["capability"]
    return f"{gpu['name']}, compute capability {major}.{minor}, {gpu['memory'] / 1e9:.1f} GB{free}"


def _device(one: Device, said: list[Finding]) -> Iterator[str]:
    yield f"{one.name:16} {'works' if one.works else 'does not work'}"
    for note in one.notes:
        yield f"  {note}"
    for reason in one.reasons:
        if reason in said:
            yield f"  {reason.what} (see above)"
        else:
            yield f"  {reason.what}"
            yield from _fix(reason)


def _fix(finding: Finding) -> Iterator[str]:
    if finding.fix:
        yield f"  fix: {finding.fix}"
