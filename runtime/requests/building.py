"""Building a pair's engines ahead of time, for devices that run nothing else."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specedge.bundle import MANIFEST, Bundle, store
from specedge.errors import DeviceError

from ..backend.cuda import engines, tensorrt, tensorrt_rtx
from ..backend.cuda.fixed_shapes import FIXED_SHAPES
from ..backend.model_session import choose_ops
from ..backend.ort import onnxruntime
from ..backend.sessions import Device


@dataclass(frozen=True)
class Built:
    """An engine: where it lies, of which graph, and the seconds it took, None if it was there."""

    path: Path
    graph: str
    seconds: float | None


def build(
    bundle: str | os.PathLike[str] | None,
    device: str,
    gpu: str | None = None,
    output: str | os.PathLike[str] | None = None,
    ops: str = "auto",
    told: Callable[[str], None] = lambda graph: None,
) -> list[Built]:
    """Build what passes of a bundle need on a device, "rtx" or "tensorrt"; each graph is `told`.

    Engines go to the cache folder, or with `output` into a copy of the bundle, for machines with
    the same kind of GPU. `gpu` is that kind, such as "sm89", by default this machine's.

    Raises BundleError, or DeviceError, also for a graph that does not become one engine.
    """
    found = Bundle.read(store.find_bundle(bundle))
    store.verify_large_files(found)
    where = Device(device)
    if not where.supports_engines:
        raise DeviceError(
            f"{device} runs graphs as they are; engines are built for rtx or tensorrt"
        )
    chosen = {role: choose_ops(model, ops, where) for role, model in found.models.items()}
    platform = where.platform(gpu)
    folder = engines.cache_folder() if output is None else _copied(found, Path(output))
    made = []
    for role, model in found.models.items():
        for name in FIXED_SHAPES:
            graph = model.graph(name, chosen[role])
            told(graph.file)
            key = engines.key_of(found, model, graph, platform)
            start = time.perf_counter()
            with engines.publish(folder, key) as place:
                if place is not None:
                    _compile(where, found.path(graph.file), place(), platform, graph.ops)
            seconds = None if place is None else time.perf_counter() - start
            made.append(Built(folder / key.name / engines.ENGINE, graph.file, seconds))
    return made


def _compile(
    device: Device, graph: Path, target: Path, platform: engines.EnginePlatform, ops: str
) -> None:
    if device.type == "rtx":
        tensorrt_rtx.compile_graph(onnxruntime(), graph, target, platform, device.index)
    else:
        tensorrt.compile_graph(onnxruntime(), graph, target, device.index, ops)


def _copied(bundle: Bundle, folder: Path) -> Path:
    """The folder for engines of a bundle's copy, which is made where there is none yet."""
    if folder.exists() and any(folder.iterdir()):
        if {**Bundle.read(folder).files} != bundle.files:
            raise DeviceError(f"{folder} holds another bundle; name a new folder with --output")
        return folder / engines.FOLDER
    for name in (*bundle.files, MANIFEST):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(bundle.folder / name, folder / name)
    return folder / engines.FOLDER
