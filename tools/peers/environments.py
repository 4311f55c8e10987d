"""Compared libraries, and a virtual environment for each, created when it is first needed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
WITHOUT = "# without: "  # dependencies to uninstall


class UnavailableError(Exception):
    """Error of a library that cannot be measured, with the reason in one line."""


@dataclass(frozen=True)
class Peer:
    """Library with its precisions; specedge runs in the environment of this tool."""

    name: str
    label: str
    precisions: tuple[str, ...]
    has_drafts: bool = False

    @property
    def worker(self) -> Path:
        return HERE / "workers" / f"{self.name}_worker.py"

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / f"{self.name}.txt"


DEFAULT_GGUF_TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_0")
GGUF_TYPES = (*DEFAULT_GGUF_TYPES, "Q3_K_M", "Q2_K", "IQ4_XS", "IQ4_NL")
KEEP = "keep "  # prefix of a GGUF type that specedge keeps
PRECISIONS = ("fp32", "int8", "int8-block", "int4", *(KEEP + name for name in GGUF_TYPES))
PEERS = {
    peer.name: peer
    for peer in (
        Peer("llamacpp", "llama.cpp", GGUF_TYPES),
        Peer("specedge", "specedge", PRECISIONS, has_drafts=True),
        Peer("openvino", "OpenVINO GenAI", ("int8",)),
        Peer("genai", "onnxruntime-genai", ("int4",)),
    )
}


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


def _environment(peer: Peer, cache: Path) -> Path:
    """Return the environment; create it if requirements changed or it is incomplete."""
    text = peer.requirements.read_text("utf-8")
    folder = cache / f"{peer.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
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
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["pip printed no error"])[-1]
        raise UnavailableError(f"not installed: {last}")
