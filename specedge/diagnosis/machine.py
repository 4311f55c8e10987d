"""What devices stand on here, packages, ONNX Runtime and NVIDIA's driver, and what is wrong."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from . import packages
from .child import Answer, ask
from .packages import Package

TEGRA = Path("/etc/nv_tegra_release")
CPU_EXTRA, GPU_EXTRA = 'pip install "specedge[cpu]"', 'pip install "specedge[gpu]"'


@dataclass(frozen=True)
class Finding:
    """What is wrong, and what would put it right, if anything is known to."""

    what: str
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}" if self.fix else self.what


class Machine:
    """This machine, each part looked at when it is first asked for."""

    @cached_property
    def packages(self) -> tuple[Package, ...]:
        """Those that bring ONNX Runtime."""
        return packages.runtimes()

    @cached_property
    def runtime(self) -> Answer:
        """The module that Python imports."""
        return ask("runtime")

    @cached_property
    def driver(self) -> Answer:
        """NVIDIA's, and the GPUs that it shows."""
        return ask("driver")

    @cached_property
    def jetson(self) -> str | None:
        """The release of a Jetson's system."""
        if platform.machine() != "aarch64":
            return None
        try:
            return TEGRA.read_text("utf-8", "replace").splitlines()[0].lstrip("# ")
        except (OSError, IndexError):
            return None

    @property
    def has_driver(self) -> bool:
        """Whether NVIDIA's driver is there, in whatever state."""
        return "missing" not in self.driver.facts

    @property
    def extra(self) -> str:
        """The command that installs the right ONNX Runtime for this machine."""
        wants_gpu = any("gpu" in one.name for one in self.packages) or self.has_driver
        return GPU_EXTRA if wants_gpu and self.jetson is None else CPU_EXTRA

    @cached_property
    def broken(self) -> Finding | None:
        """Why ONNX Runtime runs on no device at all."""
        facts, again = self.runtime.facts, self._again()
        if facts.get("absent") or "hollow" in facts:
            left = f" ({', '.join(facts['hollow'])} is left of one)" if facts.get("hollow") else ""
            if self.packages:
                return Finding(f"{self._names} is installed, but its files are gone{left}", again)
            return Finding(f"ONNX Runtime is not installed{left}", self.extra)
        if reason := facts.get("error") or self.runtime.ended:
            what = self._names or "a module onnxruntime of no package"
            return Finding(f"{what} is installed but cannot be loaded ({reason})", again)
        return None

    @cached_property
    def findings(self) -> list[Finding]:
        """What is wrong with the packages."""
        found = [self.broken] if self.broken else []
        if len(self.packages) > 1:
            found.append(
                Finding(
                    f"{self._names} are installed together and overwrite each other's files",
                    self._again(),
                )
            )
        found += [
            Finding(
                f"{one} is older than {one.floor}, the oldest that specedge takes",
                f'pip install --upgrade "{one.name}>={one.floor}"',
            )
            for one in self.packages
            if one.is_old
        ]
        version = self.runtime.facts.get("version")
        theirs = {packages.numbers(one.version, 3) for one in self.packages}
        if version and theirs and packages.numbers(version, 3) not in theirs:
            found.append(
                Finding(
                    f"{self._names} is installed, but Python imports ONNX Runtime {version} "
                    f"from {self.runtime.facts['folder']}",
                    self._again(),
                )
            )
        return found

    @property
    def gpu_missing(self) -> list[Finding]:
        """Why there is no NVIDIA GPU to run on."""
        if sys.platform not in ("linux", "win32"):
            return [Finding("NVIDIA's GPUs need Linux or Windows")]
        facts = self.driver.facts
        container = "in a container, start it with --gpus all"
        if "missing" in facts:
            return [
                Finding(
                    f"there is no NVIDIA driver: {facts['missing']} is not found",
                    f"where there is an NVIDIA GPU, install its driver, 580 or newer; {container}",
                )
            ]
        if reason := self.driver.ended or facts.get("error"):
            return [Finding(f"NVIDIA's driver does not answer: {reason}", _REINSTALL)]
        found = self._old_driver()
        if not facts.get("gpus"):
            found.append(Finding("NVIDIA's driver shows no GPU", _hidden() or container))
        return found

    def _old_driver(self) -> list[Finding]:
        has, wanted = self.driver.facts.get("cuda"), self.runtime.facts.get("cuda") or "13.0"
        if not has or packages.numbers(has)[0] >= packages.numbers(wanted)[0]:
            return []
        version = self.driver.facts.get("version")
        return [
            Finding(
                f"NVIDIA's driver{f' {version}' if version else ''} runs CUDA {has} and older, and "
                f"ONNX Runtime needs CUDA {wanted}",
                "install driver 580 or newer (the last onnxruntime-gpu for CUDA 12 is 1.26.0, and "
                f"specedge takes {packages.FLOORS['onnxruntime-gpu']} and newer)",
            )
        ]

    @property
    def _names(self) -> str:
        return " and ".join(map(str, self.packages))

    def _again(self) -> str:
        """The commands that take away every ONNX Runtime and install one."""
        names = " ".join(one.name for one in self.packages)
        return f"pip uninstall -y {names} && {self.extra}" if names else self.extra


_REINSTALL = "see what nvidia-smi says; install the driver, 580 or newer, again and restart"


def _hidden() -> str | None:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if value is None else f"CUDA_VISIBLE_DEVICES is '{value}': unset it"
