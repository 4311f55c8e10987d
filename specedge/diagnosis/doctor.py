"""Diagnosis of devices: a trial of each in a child process, and the cause and fix of failures."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specedge.cpu_count import cpu_count
from specedge.telemetry import VARIABLE
from specedge.version import __version__

from . import packages, plug_in
from .driver import jetson_number, jetson_release
from .packages import LIBRARIES, Package, version_numbers

NAMES = {"cuda": "CUDA", "tensorrt": "TensorRT"}
SECONDS = 120.0  # timeout: waking a GPU takes seconds, building an engine longer
LOG_CHARACTERS = 4000
RTX_CAPABILITIES = ((8, 6), (8, 9))  # and from 12.0; TensorRT-RTX 1.7.1
FAULT = "see nvidia-smi; to report a bug, attach the file of 'specedge doctor --report FILE'"
# JetPack and the package index of its CUDA version, by the major number of L4T.
_JETPACKS = {
    36: (" with JetPack 6", "jp6/cu126"),
    38: (" with JetPack 7.0 or 7.1", "sbsa/cu130"),
    39: (" with JetPack 7.2", "sbsa/cu130"),
}
_JETSON_INDEX, _JETSON_VERSION = "https://pypi.jetson-ai-lab.io", "1.24.0"
CONTAINER = "in a container, start it with --gpus all"
# Environment variables that change the libraries and GPUs that a process finds.
VARIABLES = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "CUDA_PATH", "CUDA_HOME"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "PYTHONPATH", "VIRTUAL_ENV"),
)


@dataclass(frozen=True)
class ProbeResult:
    """Result of a child process: reported values, abnormal end, and the last part of its log."""

    answers: dict[str, Any] = field(default_factory=dict)
    ended: str | None = None
    log: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return self.answers | {"ended": self.ended, "log": self.log}


@dataclass(frozen=True)
class Problem:
    """Cause of a failure, and the command or action that fixes it, if known."""

    what: str  # a key of `doctor --json`
    fix: str | None = None

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}" if self.fix else self.what


@dataclass(frozen=True)
class DeviceDiagnosis:
    """Result of a device's trial; `reasons` has the first cause of a failure."""

    name: str
    works: bool
    reasons: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        values = dataclasses.asdict(self)
        values["facts"] = values.pop("answers")
        return values


@dataclass(frozen=True)
class Diagnosis:
    """This machine and the devices that were tried."""

    machine: Machine
    devices: list[DeviceDiagnosis]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, without the names of this user and this machine."""
        values: dict[str, Any] = {
            "specedge": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cores": cpu_count(),
            "jetson": self.machine.jetson,
            "onnxruntime": self.machine.runtime.as_dict(),
            "packages": packages.related(),
            "driver": self.machine.driver.as_dict(),
            "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "findings": [dataclasses.asdict(problem) for problem in self.machine.problems],
            "devices": {device.name: device.as_dict() for device in self.devices},
        }
        text = re.sub(r"hostname=[^\s\"\\]+", "hostname=?", json.dumps(values))
        home = json.dumps(str(Path.home()))[1:-1]
        anonymous: dict[str, Any] = json.loads(text.replace(home, "~") if len(home) > 1 else text)
        return anonymous


def diagnose(
    names: Iterable[str], on_progress: Callable[[str], None] = lambda step: None
) -> Diagnosis:
    """Examine this machine and try devices by name."""
    machine, tried = Machine(), []
    for name in names:
        on_progress(f"trying {name}")
        tried.append(check(name, machine))
    return Diagnosis(machine, tried)


def why_not(device: str) -> str | None:
    """Return the cause of a device's failure and its fix, as one line; None if it works.

    This takes a second or two: the device is tried in a child process, which a broken driver may
    crash. The child imports the same packages as this process.

    Args:
        device: "cpu", "cuda", "tensorrt" or "rtx", optionally with a GPU number, as in "cuda:1".
    """
    device = device.removesuffix(":0")
    result = check(device, Machine())
    return None if result.works else f"{device} does not work here: {result.reasons[0]}"


def check(name: str, machine: Machine) -> DeviceDiagnosis:
    """Try a device, and determine the cause if it does not work."""
    if machine.broken:
        return DeviceDiagnosis(name, False, [machine.broken])
    device, _, number = name.partition(":")
    result = ask("device", device, number or "0")
    answers = result.answers
    if "wrong" in answers and answers["wrong"] is None:
        notes = [f"but its process {result.ended}"] if result.ended else []
        return DeviceDiagnosis(name, True, [], notes + _notes(answers), answers, result.log)
    cause = next(_causes(device, int(number or 0), machine, result))
    return DeviceDiagnosis(name, False, [cause], [], answers, result.log)


def ask(question: str, *arguments: str, seconds: float = SECONDS) -> ProbeResult:
    """Run a probe in a child process, which imports the same packages as this process."""
    if not sys.executable or getattr(sys, "frozen", False):
        return ProbeResult(
            ended="cannot be tested: the current executable is not a Python interpreter"
        )
    # As -P -m does, which requires Python 3.11: without the current folder among the paths.
    module = f"{__package__}.probe"
    run = f"runpy.run_module('{module}', run_name='__main__', alter_sys=True)"
    code = f"import runpy, sys; del sys.path[0]; {run}"
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        done = subprocess.run(
            [*command, question, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env={VARIABLE: "1"} | os.environ | {"PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired as error:
        return _read(error.stdout or b"", error.stderr or b"", f"no response within {seconds:g} s")
    return _read(done.stdout, done.stderr, _abnormal_end(done.returncode))


def _read(out: bytes, log: bytes, ended: str | None) -> ProbeResult:
    answers: dict[str, Any] = {}
    for line in out.splitlines(keepends=True):
        if line.endswith(b"\n"):  # the last line may be incomplete
            answers |= json.loads(line)
    stage = answers.pop("stage", None)
    if ended and stage:
        ended = f"{ended} while {stage}"
    return ProbeResult(answers, ended, log.decode("utf-8", "replace")[-LOG_CHARACTERS:])


def _abnormal_end(code: int) -> str | None:
    if code >= 0:
        return f"ended with exit code {code}" if code else None
    names = {int(number): f" ({number.name})" for number in signal.Signals}
    return f"ended by signal {-code}{names.get(-code, '')}"


class Machine:
    """This machine; each property is determined on first use."""

    @cached_property
    def packages(self) -> tuple[Package, ...]:
        """Packages that install ONNX Runtime."""
        return packages.runtimes()

    @cached_property
    def runtime(self) -> ProbeResult:
        """Probe of the module `onnxruntime`."""
        return ask("runtime")

    @cached_property
    def driver(self) -> ProbeResult:
        """Probe of the NVIDIA driver and its GPUs."""
        return ask("driver")

    @cached_property
    def jetson(self) -> str | None:
        """Release of a Jetson's system."""
        return jetson_release()

    @property
    def install(self) -> str:
        """Command that installs the right ONNX Runtime for this machine."""
        gpu = "missing" not in self.driver.answers or any("gpu" in p.name for p in self.packages)
        return f'pip install "specedge[{"gpu" if gpu and self.jetson is None else "cpu"}]"'

    @property
    def _reinstall(self) -> str:
        names = " ".join(package.name for package in self.packages)
        return f"pip uninstall -y {names} && {self.install}" if names else self.install

    @property
    def names(self) -> str:
        """Names and versions of the packages that install ONNX Runtime."""
        return " and ".join(map(str, self.packages))

    @cached_property
    def broken(self) -> Problem | None:
        """Problem that keeps ONNX Runtime from running at all."""
        answers = self.runtime.answers
        if answers.get("absent") or "hollow" in answers:
            remains = f" ({', '.join(answers['hollow'])} remains)" if answers.get("hollow") else ""
            if self.packages:
                cause = f"{self.names} is installed, but its files are missing{remains}"
                return Problem(cause, self._reinstall)
            return Problem(f"ONNX Runtime is not installed{remains}", self.install)
        if reason := answers.get("error") or self.runtime.ended:
            package = self.names or "a module onnxruntime that belongs to no package"
            problem = f"{package} is installed but cannot be loaded ({reason})"
            return Problem(problem, self._reinstall)
        return None

    @cached_property
    def problems(self) -> list[Problem]:
        """Problems of the installed packages."""
        problems = [self.broken] if self.broken else []
        if len(self.packages) > 1:
            cause = f"{self.names} are installed together and overwrite each other's files"
            problems.append(Problem(cause, self._reinstall))
        problems += [
            Problem(
                f"{package} is older than {package.floor}, the oldest supported version",
                f'pip install --upgrade "{package.name}>={package.floor}"',
            )
            for package in self.packages
            if package.is_old
        ]
        version = self.runtime.answers.get("version")
        installed = {version_numbers(package.version, 3) for package in self.packages}
        if version and installed and version_numbers(version, 3) not in installed:
            folder = self.runtime.answers["folder"]
            cause = f"{self.names} is installed, but Python imports ONNX Runtime {version}"
            problems.append(Problem(f"{cause} from {folder}", self._reinstall))
        return problems


def _causes(name: str, index: int, machine: Machine, result: ProbeResult) -> Iterator[Problem]:
    """Yield possible causes of a failure, the most fundamental first."""
    answers = result.answers
    if answers.get("mismatch"):
        yield Problem(*answers["mismatch"])
    if name != "cpu":
        yield from _gpu_causes(name, index, machine)
    if answers.get("wrong"):
        yield Problem(f"its results are wrong: {answers['wrong']}", FAULT)
    if result.ended:
        yield Problem(f"its test process failed: {result.ended}", FAULT)
    for library, reason in answers.get("missing", {}).items():
        if not library.startswith("libcuda.so"):  # the driver's
            reason = "not found" if "No such file" in reason else reason
            package = LIBRARIES[name].get(library)
            fix = f'pip install "{package}"' if package else None
            yield Problem(f"a library cannot be loaded: {library} ({reason})", fix)
    error = answers.get("error", "no answer")
    if "allocate memory" in error or "out of memory" in error:
        fix = "end other processes that use the GPU, as nvidia-smi lists, and try again"
        yield Problem(f"the GPU is out of memory ({error})", fix)
    if "no kernel image" in error:
        fix = "use another GPU, or build onnxruntime-gpu for this one (CMAKE_CUDA_ARCHITECTURES)"
        yield Problem(f"this ONNX Runtime has no machine code for the GPU ({error})", fix)
    yield Problem(f"ONNX Runtime fails: {error}", FAULT)


def _gpu_causes(name: str, index: int, machine: Machine) -> Iterator[Problem]:
    if machine.jetson and name != "rtx":
        jetpack, wheels = _JETPACKS.get(jetson_number(machine.jetson), ("", ""))
        install = f"pip install onnxruntime-gpu=={_JETSON_VERSION} --index-url {_JETSON_INDEX}/"
        yield Problem(
            f"this is a Jetson{jetpack} ({machine.jetson}), and PyPI's onnxruntime-gpu has no "
            "machine code for its GPU",
            f"{install}{wheels}" if wheels else "build onnxruntime-gpu for it, or use --device cpu",
        )
    if sys.platform not in ("linux", "win32"):
        yield Problem("NVIDIA GPUs need Linux or Windows")
    yield from _driver_causes(machine)
    gpus = machine.driver.answers.get("gpus", [])
    if index >= len(gpus):
        yield Problem(f"the NVIDIA driver shows no GPU {index} (GPUs: {len(gpus)})")
    elif name == "rtx":
        capability = tuple(gpus[index]["capability"])
        if capability not in RTX_CAPABILITIES and capability < (12, 0):
            cause = "{} has compute capability {}.{}".format(gpus[index]["name"], *capability)
            cause += ", and TensorRT-RTX supports 8.6, 8.9 and 12.0 or newer"
            yield Problem(cause, "use --device cuda on this GPU")
        (package,) = plug_in.RTX.packages
        if package not in packages.related():
            cause = f"NVIDIA's plug-in {package} is not installed"
            yield Problem(cause, f'pip install "{package}~=0.5"')
    elif name == "cuda" and plug_in.CUDA.is_installed:
        return  # ONNX Runtime needs no CUDA provider of its own
    elif f"{NAMES[name]}ExecutionProvider".lower() not in map(
        str.lower, machine.runtime.answers.get("providers", [])
    ):
        installed = machine.names or "onnxruntime"
        if any(package.name == "onnxruntime-gpu" for package in machine.packages):
            yield Problem(f"{installed} has no {NAMES[name]} on {platform.machine()}")
        else:
            extra = "tensorrt" if name == "tensorrt" else "gpu"
            names = " ".join(package.name for package in machine.packages)
            uninstall = f"pip uninstall -y {names} && " if names else ""
            cause = f"the package {installed} has no {NAMES[name]}"
            yield Problem(cause, f'{uninstall}pip install "specedge[{extra}]"')


def _driver_causes(machine: Machine) -> Iterator[Problem]:
    driver = machine.driver.answers
    if "missing" in driver:
        fix = f"if this machine has an NVIDIA GPU, install its driver, 580 or newer; {CONTAINER}"
        yield Problem(f"there is no NVIDIA driver: {driver['missing']} is not found", fix)
    elif reason := machine.driver.ended or driver.get("error"):
        fix = "see nvidia-smi; reinstall the driver, 580 or newer, and restart"
        yield Problem(f"the NVIDIA driver does not respond: {reason}", fix)
    else:
        is_old = plug_in.CUDA.is_installed and plug_in.CUDA.version[0].endswith("cuda12")
        oldest = "12.0" if is_old else "13.0"
        newest, needed = driver.get("cuda"), machine.runtime.answers.get("cuda") or oldest
        if newest and version_numbers(newest)[0] < version_numbers(needed)[0]:
            version = f" {driver['version']}" if driver.get("version") else ""
            yield Problem(
                f"the NVIDIA driver{version} supports CUDA {newest}, and ONNX Runtime needs CUDA "
                f"{needed}",
                "install driver 580 or newer",
            )
        if not driver.get("gpus"):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hint = CONTAINER if visible is None else f"unset CUDA_VISIBLE_DEVICES ('{visible}')"
            yield Problem("the NVIDIA driver shows no GPU", hint)


def _notes(answers: dict[str, Any]) -> list[str]:
    opening, running = answers["milliseconds"]
    notes = [f"a test graph gave the expected output (load {opening:.0f} ms, run {running:.1f} ms)"]
    if answers.get("plug_in"):
        notes.append(f"by the plug-in {answers['plug_in']}")
    if answers.get("products") == "unsigned":
        notes.append("int8 products are exact in unsigned mode only, which specedge selects")
    elif answers.get("products") == "never":
        notes.append("int8 products are wrong: int8 and int4 bundles cannot run")
    return notes
