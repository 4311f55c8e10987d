"""Store of compiled engines on disk: cache keys, lookup and atomic publication.

An engine is a graph compiled for one GPU architecture by one version of a library: a model of a
single EPContext node, `engine.onnx`, with its data next to it, in a folder named after its key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from specedge import staging
from specedge.bundle import Bundle, store
from specedge.bundle.manifest import GraphEntry, ModelEntry
from specedge.errors import DeviceError

ENGINE, KEY = "engine.onnx", "key.json"
FOLDER = "engines"  # in a bundle, and in the cache folder


@dataclass(frozen=True)
class EnginePlatform:
    """Part of an engine's cache key that describes the platform.

    Attributes:
        device: Compiler, "rtx" or "tensorrt".
        provider: Version of ONNX Runtime's provider, or of the plug-in.
        library: Version of TensorRT or TensorRT-RTX.
        gpu: Compute capability, such as "sm89".
        driver: Version of the NVIDIA driver; None if engines do not depend on it.
        jetpack: Version of a Jetson's system; None if engines do not depend on it.
    """

    device: str
    provider: str
    library: str
    gpu: str
    driver: str | None = None
    jetpack: str | None = None

    def __str__(self) -> str:
        versions = {"driver": self.driver, "JetPack": self.jetpack}
        suffix = "".join(f", {name} {version}" for name, version in versions.items() if version)
        name = "TensorRT-RTX" if self.device == "rtx" else "TensorRT"
        return f"{self.gpu}, {name} {self.library}{suffix}"


@dataclass(frozen=True)
class EngineKey:
    """Cache key of an engine: SHA-256 of its graph and weights, and its platform."""

    graph: str
    weights: str
    platform: EnginePlatform

    @property
    def name(self) -> str:
        """Name of the engine's folder."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def key_of(
    bundle: Bundle, model: ModelEntry, graph: GraphEntry, platform: EnginePlatform
) -> EngineKey:
    """Return the cache key of a graph's engine."""
    graph_file, weights = bundle.files[graph.file], bundle.files[model.weights]
    return EngineKey(graph_file.sha256, weights.sha256, platform)


def cache_folder() -> Path:
    """Return the user's folder for engines that are not part of a bundle."""
    return store.cache_folder() / FOLDER


def find(bundle: Bundle, key: EngineKey) -> Path | None:
    """Return the engine of a key from the bundle, else from the cache folder, else None."""
    folders = (bundle.folder / FOLDER, cache_folder())
    paths = (folder / key.name / ENGINE for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def require(
    bundle: Bundle, model: ModelEntry, graph: GraphEntry, platform: EnginePlatform, device: str
) -> Path:
    """Return the engine of a graph.

    Raises:
        DeviceError: The engine has not been built; the message has the command that builds it.
    """
    if graph.length is None:
        raise DeviceError(
            f"{model.source.id}: {device} runs fixed-shape graphs only, but the graph "
            f"'{graph.name}' for any pass length is needed; use --device cuda or cpu"
        )
    engine = find(bundle, key_of(bundle, model, graph, platform))
    if engine is None:
        raise DeviceError(
            f"{model.source.id}: no engine of {graph.file} for {device} ({platform}); build the "
            f"bundle's engines: specedge build --bundle {bundle.folder} --device {device}"
        )
    return engine


@contextlib.contextmanager
def publish(folder: Path, key: EngineKey) -> Iterator[Callable[[], Path] | None]:
    """Provide a path to build an engine at; move it to its key's folder on success.

    Yields:
        A function that returns the path, or None if the engine exists already.

    Raises:
        DeviceError: Another process is building the engine, or the compiler wrote none.
    """
    target = folder / key.name
    if (target / ENGINE).is_file():
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    work = staging.staging_folder(target)
    try:
        with staging.locked_folder(work):
            new = work / "new"
            new.mkdir()
            yield lambda: new / ENGINE
            text = json.dumps(asdict(key), indent=1)
            (new / KEY).write_text(text + "\n", "utf-8")
            if not (new / ENGINE).is_file():
                raise DeviceError(f"the compiler wrote no {ENGINE} for {target}")
            if target.exists():  # without its engine
                os.rename(target, work / "damaged")
            os.rename(new, target)
    except TimeoutError as error:
        raise DeviceError(
            f"another process is building {target}; wait for it, and try again"
        ) from error
