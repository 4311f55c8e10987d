"""Which devices work here, by trying them, and why others do not."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import packages
from .child import ask
from .machine import Finding, Machine
from .shared_library import runs_on

NAMES = {"cuda": "CUDA", "tensorrt": "TensorRT"}
# What brings a library, by how its name starts; and the extra that brings all of a device's.
BRINGS = {
    "libcublas": "nvidia-cublas~=13.0",
    "libcudart": "nvidia-cuda-runtime~=13.0",
    "libcurand": "nvidia-curand~=10.0",
    "libcufft": "nvidia-cufft~=12.0",
    "libnvrtc": "nvidia-cuda-nvrtc~=13.0",
    "libcudnn": "nvidia-cudnn-cu13~=9.0",
    "libnvinfer": "tensorrt-cu13>=10.15,<10.17",
    "libnvonnxparser": "tensorrt-cu13>=10.15,<10.17",
}
RTX_CAPABILITIES = ((8, 6), (8, 9))  # and from 12.0; TensorRT-RTX 1.7.1
FAULT = "see what nvidia-smi says; send the file that 'specedge doctor --report FILE' writes"


@dataclass(frozen=True)
class Device:
    """What was found of one: the first reason why it does not work is the one to see to first."""

    name: str
    works: bool
    reasons: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    log: str = ""


def why_not(device: str, machine: Machine | None = None) -> str | None:
    """Why a device ("cpu", "cuda", "tensorrt" or "rtx", of several GPUs with a number, as in
    "cuda:1") does not work here, or None if it does.

    One line, which names the command that helps, for an error to show. It takes a second or two:
    the device is tried in a process of its own, which a broken driver may end. That imports what
    this process would, but by the search path that libraries had when this one began.
    """
    device = device.removesuffix(":0")
    found = check(device, machine or Machine())
    if found.works:
        return None
    others = len(found.reasons) - 1
    more = f" ({others} more: specedge doctor)" if others else ""
    return f"{device} does not work here: {found.reasons[0]}{more}"


def check(name: str, machine: Machine) -> Device:
    """Try a device, of several GPUs the first or that of a number: what is in its way."""
    if machine.broken:
        return Device(name, False, [machine.broken])
    kind, _, number = name.partition(":")
    index = int(number or 0)
    answer = ask("device", kind, str(index))
    facts = answer.facts
    works = "wrong" in facts and facts["wrong"] is None
    if works:
        note = [f"but its process {answer.ended}"] if answer.ended else []
        return Device(name, True, [], note + _notes(facts), facts, answer.log)
    reasons = list(_in_the_way(kind, index, machine, facts))
    if facts.get("wrong"):
        reasons.append(Finding(f"its results are wrong: {facts['wrong']}", FAULT))
    elif answer.ended:
        reasons.append(Finding(f"trying it {answer.ended}", FAULT))
    elif not reasons:
        reasons.append(_failure(facts.get("error", "it told nothing")))
    return Device(name, False, reasons, [], facts, answer.log)


def _in_the_way(
    name: str, index: int, machine: Machine, facts: dict[str, Any]
) -> Iterator[Finding]:
    """What would explain a failure, the most basic first."""
    if name == "cpu":
        return
    if machine.jetson and name != "rtx":
        yield _jetson(machine)
    yield from machine.gpu_missing
    gpus = machine.driver.facts.get("gpus", [])
    if gpus and index >= len(gpus):
        yield Finding(f"NVIDIA's driver shows no GPU {index}, only {_numbers(len(gpus))}")
    for gpu in gpus[index : index + 1]:
        yield from _unsupported(name, gpu, facts.get("codes", []))
    if facts.get("lacking"):
        yield _lacking(name, machine)
    yield from _libraries(name, facts)


def _numbers(count: int) -> str:
    return "GPU 0" if count == 1 else f"GPUs 0 to {count - 1}"


def _lacking(name: str, machine: Machine) -> Finding:
    if name == "rtx":
        return Finding(
            f"NVIDIA's plug-in {packages.PLUG_IN} is not installed",
            f'pip install "{packages.PLUG_IN}~=0.5"',
        )
    names = " and ".join(one.name for one in machine.packages) or "onnxruntime"
    if any(one.name == "onnxruntime-gpu" for one in machine.packages):
        on = f" on {platform.machine()}" if platform.machine() != "x86_64" else ""
        return Finding(f"{names} has no {NAMES[name]}{on}")
    extra = "tensorrt" if name == "tensorrt" else "gpu"
    return Finding(
        f"the package {names} has no {NAMES[name]}",
        f'pip uninstall -y {names.replace(" and ", " ")} && pip install "specedge[{extra}]"',
    )


def _libraries(name: str, facts: dict[str, Any]) -> Iterator[Finding]:
    """Those that are missing; the driver's own is another finding."""
    missing = {k: v for k, v in facts.get("missing", {}).items() if not k.startswith("libcuda.so")}
    found = facts.get("found", {})
    for folder in sorted({*found.values()}):
        names = ", ".join(library for library in missing if found.get(library) == folder)
        yield Finding(
            f"ONNX Runtime does not look into {folder}, which has {names}",
            f'export LD_LIBRARY_PATH="{folder}:$LD_LIBRARY_PATH"',
        )
    absent = [library for library in missing if library not in found]
    if not absent:
        return
    bring = {
        package
        for library in absent
        for start, package in BRINGS.items()
        if library.startswith(start)
    }
    extra = f'pip install "specedge[{"tensorrt" if name == "tensorrt" else "gpu"}]"'
    what = ", ".join(f"{library} ({_reason(missing[library])})" for library in absent)
    if others := facts.get("tensorrt"):
        what += f"; {', '.join(others)} is here, of another version of TensorRT"
    yield Finding(
        f"libraries cannot be loaded: {what}",
        f'pip install "{bring.pop()}"' if len(bring) == 1 else extra if bring else None,
    )


def _reason(text: str) -> str:
    return "not found" if "No such file" in text else text


def _unsupported(name: str, gpu: dict[str, Any], codes: list[str]) -> Iterator[Finding]:
    capability = (gpu["capability"][0], gpu["capability"][1])
    shown = f"{gpu['name']} has compute capability {capability[0]}.{capability[1]}"
    if name == "rtx":
        if capability not in RTX_CAPABILITIES and capability < (12, 0):
            yield Finding(
                f"{shown}, and TensorRT-RTX takes 8.6, 8.9 and 12.0 or newer",
                "use --device cuda on this GPU",
            )
    elif codes and not any(runs_on(code, capability) for code in codes):
        yield Finding(
            f"{shown}, and this ONNX Runtime has code for {', '.join(codes)} alone",
            "build onnxruntime-gpu for it, with CMAKE_CUDA_ARCHITECTURES="
            f"{capability[0]}{capability[1]}, or use another GPU",
        )


def _jetson(machine: Machine) -> Finding:
    return Finding(
        f"this is a Jetson ({machine.jetson}), and PyPI's onnxruntime-gpu has no code for its GPU",
        "build onnxruntime-gpu, 1.31 or newer, for it (sm_87 on Orin, sm_110 on Thor), or use "
        "--device cpu; not pip install 'specedge[gpu]'",
    )


def _failure(error: str) -> Finding:
    if "allocate memory" in error or "out of memory" in error:
        return Finding(
            f"the GPU has no memory left ({error})",
            "end what else uses it, as nvidia-smi lists, and try again",
        )
    return Finding(f"ONNX Runtime fails: {error}", FAULT)


def _notes(facts: dict[str, Any]) -> list[str]:
    opening, running = facts["milliseconds"]
    found = [f"a graph gave NumPy's numbers, opened in {opening:.0f} ms, run in {running:.1f} ms"]
    if (right := facts.get("products")) == "unsigned":
        found.append("products of bytes are right if both are unsigned, which specedge asks for")
    elif right == "never":
        found.append("products of bytes are wrong: int8 and int4 pairs cannot run")
    if codes := facts.get("codes"):
        found.append(f"machine code for {', '.join(codes)}")
    return found
