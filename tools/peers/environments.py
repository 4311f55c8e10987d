"""An environment for each peer, made when it is first needed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
WITHOUT = "# without: "  # packages that another one asks for, and that must not be there


class UnavailableError(Exception):
    """Why a peer is not measured, in a line for the table."""


@dataclass(frozen=True)
class Peer:
    """A library, the precisions that it has here, and whether it runs in specedge's environment."""

    name: str
    label: str
    precisions: tuple[str, ...]
    own_environment: bool = True
    variable: str = ""  # what must be set
    plans: bool = False  # chooses K round by round

    @property
    def worker(self) -> Path:
        return HERE / "workers" / f"{self.name}_worker.py"

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / f"{self.name}.txt"


ANY: tuple[str, ...] = ()  # whatever `specedge export` knows
PEERS = {
    peer.name: peer
    for peer in (
        Peer("specedge", "specedge", ANY, own_environment=False, plans=True),
        Peer("transformers", "transformers", ("fp32",)),
        Peer("genai", "ORT GenAI", ("fp32", "int4")),
        Peer("openvino", "OpenVINO", ("fp32", "int8", "int4")),
        Peer("llamacpp", "llama.cpp", ("fp32", "int8", "int4"), variable="LLAMA_CPP"),
    )
}


def check_precision(peer: Peer, precision: str) -> None:
    """Refuse what a peer has no conversion for."""
    if peer.precisions != ANY and precision not in peer.precisions:
        raise UnavailableError(f"{precision} is not measured: no conversion to it here")


def python_of(peer: Peer, cache: Path, given: dict[str, str]) -> str:
    """The Python of a peer's worker: `given` by the peer's name, or of an environment in `cache`.

    Raises UnavailableError.
    """
    if peer.variable and not os.environ.get(peer.variable):
        raise UnavailableError(f"not built: {peer.variable} names no folder")
    if found := given.get(peer.name):
        return found
    if not peer.own_environment:
        return sys.executable
    return str(_environment(peer, cache) / "bin" / "python")


def _environment(peer: Peer, cache: Path) -> Path:
    """Made again when the requirements change; half an environment is never used."""
    text = peer.requirements.read_text("utf-8")
    folder = cache / f"{peer.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    complete = folder / "complete"
    if complete.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet"]
    _run(peer, [*pip, "install", "-r", str(peer.requirements)])
    for line in text.splitlines():
        if line.startswith(WITHOUT):
            _run(peer, [*pip, "uninstall", "--yes", *line.removeprefix(WITHOUT).split()])
    complete.touch()
    return folder


def _run(peer: Peer, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UnavailableError(f"not installed: {last}")
