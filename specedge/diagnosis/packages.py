"""The packages that bring ONNX Runtime and what it needs, as pip knows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

# The oldest that specedge takes, as in pyproject.toml; a test compares them.
FLOORS = {"onnxruntime": "1.30", "onnxruntime-gpu": "1.31"}
RELATED = re.compile(r"(onnxruntime|ort-|nvidia-|tensorrt|torch$|numpy$|tokenizers$)")
PLUG_IN = "onnxruntime-ep-nv-tensorrt-rtx-cu13"


@dataclass(frozen=True)
class Package:
    """One that installs the module `onnxruntime`."""

    name: str
    version: str

    @property
    def is_old(self) -> bool:
        """Whether it is older than specedge takes."""
        return numbers(self.version) < numbers(self.floor)

    @property
    def floor(self) -> str:
        """The oldest version that specedge takes."""
        return FLOORS.get(self.name, FLOORS["onnxruntime"])

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def related() -> dict[str, str]:
    """Every package that bears on devices, with its version."""
    return {name: d.version for name, d in sorted(_distributions().items()) if RELATED.match(name)}


def runtimes() -> tuple[Package, ...]:
    """The packages that install the module `onnxruntime`; there should be one.

    Those with another name are known by their files: onnxruntime-extensions, say, has others.
    """
    return tuple(
        Package(name, found.version)
        for name, found in sorted(_distributions().items())
        if name in FLOORS
        or (
            name.startswith(("onnxruntime", "ort-"))
            and "onnxruntime/__init__.py" in map(str, found.files or ())
        )
    )


def numbers(version: str, count: int = 2) -> tuple[int, ...]:
    """The first numbers of a version, to compare by."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:count])


def _distributions() -> dict[str, metadata.Distribution]:
    """By name; of two with one name the first, which Python imports."""
    found: dict[str, metadata.Distribution] = {}
    for one in metadata.distributions():
        if one.name and one.version:  # what a broken installation left has neither
            found.setdefault(re.sub(r"[-_.]+", "-", one.name).lower(), one)
    return found
