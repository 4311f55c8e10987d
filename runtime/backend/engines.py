"""Engines on disk: what each hangs on, where it lies, and how it gets there whole.

An engine is a graph compiled for one kind of GPU by one version of a library: a model of a single
EPContext node, `engine.onnx`, with its data beside it, in a folder named after its key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import platformdirs

from specedge import leftovers
from specedge.bundle import Bundle
from specedge.bundle.manifest import Graph, Model
from specedge.errors import DeviceError

ENGINE, KEY = "engine.onnx", "key.json"
FOLDER = "engines"  # of a bundle, and of the cache folder


@dataclass(frozen=True)
class Platform:
    """What the engines of a device hang on, beside their graphs: None where it does not matter.

    device: what compiles, "rtx" or "tensorrt"
    provider: the version of ONNX Runtime's part, or of the plug-in
    library: the version of TensorRT or TensorRT-RTX
    gpu: the compute capability, such as "sm89"
    driver, jetpack: versions of what the GPU runs under
    """

    device: str
    provider: str
    library: str
    gpu: str
    driver: str | None = None
    jetpack: str | None = None

    def __str__(self) -> str:
        others = {"driver": self.driver, "JetPack": self.jetpack}
        more = "".join(f", {name} {version}" for name, version in others.items() if version)
        name = "TensorRT-RTX" if self.device == "rtx" else "TensorRT"
        return f"{self.gpu}, {name} {self.library}{more}"


@dataclass(frozen=True)
class Key:
    """An engine's graph and weights, by their SHA-256, and its platform."""

    graph: str
    weights: str
    platform: Platform

    @property
    def name(self) -> str:
        """What its folder is called."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def key_of(bundle: Bundle, model: Model, graph: Graph, platform: Platform) -> Key:
    """The key of a graph's engine."""
    graph_file, weights = bundle.files[graph.file], bundle.files[model.weights]
    return Key(graph_file.sha256, weights.sha256, platform)


def cache_folder() -> Path:
    """Where engines go that no bundle has."""
    return platformdirs.user_cache_path("specedge", appauthor=False) / FOLDER


def find(bundle: Bundle, key: Key) -> Path | None:
    """The engine of a key, the bundle's own before that of the cache."""
    places = (bundle.folder / FOLDER, cache_folder())
    found = (place / key.name / ENGINE for place in places)
    return next((path for path in found if path.is_file()), None)


def require(bundle: Bundle, model: Model, graph: Graph, platform: Platform, device: str) -> Path:
    """The engine of a graph. DeviceError, with the command that builds it, where there is none."""
    if graph.length is None:
        raise DeviceError(
            f"{model.source.id}: {device} runs graphs of fixed lengths alone, and this needs "
            f"'{graph.name}', which takes any; use --device cuda or cpu"
        )
    found = find(bundle, key_of(bundle, model, graph, platform))
    if found is None:
        raise DeviceError(
            f"{model.source.id}: no engine of {graph.file} for {device} here ({platform}); build "
            f"those of the pair: specedge build --bundle {bundle.folder} --device {device}"
        )
    return found


@contextlib.contextmanager
def publishing(folder: Path, key: Key) -> Iterator[Callable[[], Path] | None]:
    """A place to build an engine in, which appears under its key's name when all went well.

    None where the engine is there. DeviceError where another process is building it.
    """
    place = folder / key.name
    if (place / ENGINE).is_file():
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    work = leftovers.folder_beside(place)
    try:
        with leftovers.locked(work):
            new = work / "new"
            new.mkdir()
            yield lambda: new / ENGINE
            text = json.dumps(asdict(key), indent=1)
            (new / KEY).write_text(text + "\n", "utf-8")
            if not (new / ENGINE).is_file():
                raise DeviceError(f"building {place} left no {ENGINE}")
            if place.exists():  # without an engine: somebody took it away
                os.rename(place, work / "damaged")
            os.rename(new, place)
    except TimeoutError as error:
        raise DeviceError(
            f"another process is building {place}; wait for it, and try again"
        ) from error
