"""What is installed on this machine, what works, and what would put the rest right."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specedge.cpu_count import cpu_count
from specedge.version import __version__

from . import packages, providers
from .machine import Finding, Machine
from .providers import Device

# What may change where libraries are found, or which GPUs are seen.
VARIABLES = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "CUDA_PATH", "CUDA_HOME"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "PYTHONPATH", "VIRTUAL_ENV"),
)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found."""

    machine: Machine
    devices: list[Device]

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with the packages, whichever device is meant."""
        return self.machine.findings

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, without the names of this user and this machine."""
        runtime, driver = self.machine.runtime, self.machine.driver
        found: dict[str, Any] = {
            "specedge": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cores": cpu_count(),
            "jetson": self.machine.jetson,
            "onnxruntime": _facts(runtime.facts) | {"ended": runtime.ended, "log": runtime.log},
            "packages": packages.related(),
            "driver": _facts(driver.facts) | {"ended": driver.ended, "log": driver.log},
            "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "findings": [dataclasses.asdict(one) for one in self.findings],
            "devices": {one.name: _device(one) for one in self.devices},
        }
        change = _without_names()
        return {name: _map(value, change) for name, value in found.items()}


def diagnose(names: Iterable[str], told: Callable[[str], None] = lambda what: None) -> Diagnosis:
    """Look at this machine and try these devices, telling what is being done."""
    machine, tried = Machine(), []
    for name in names:
        told(f"trying {name}")
        tried.append(providers.check(name, machine))
    return Diagnosis(machine, tried)


def _device(one: Device) -> dict[str, Any]:
    return {
        "works": one.works,
        "reasons": [dataclasses.asdict(reason) for reason in one.reasons],
        "notes": one.notes,
        "facts": _facts(one.facts),
        "log": one.log,
    }


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "stage"}


def _without_names() -> Callable[[str], str]:
    home = str(Path.home())

    def change(text: str) -> str:
        text = re.sub(r"hostname=\S+", "hostname=?", text)
        return text.replace(home, "~") if len(home) > 1 else text

    return change


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: _map(item, change) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map(item, change) for item in value]
    return value
