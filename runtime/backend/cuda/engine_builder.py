"""Ahead-of-time build of a bundle's engines, for devices that run only engines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specedge.bundle import Bundle, store
from specedge.destination import destination
from specedge.errors import DeviceError

from ..model_session import choose_ops
from ..ort import onnxruntime
from ..sessions import Device
from . import engines, tensorrt, tensorrt_rtx
from .fixed_shapes import FIXED_SHAPES


@dataclass(frozen=True)
class BuiltEngine:
    """Engine of a graph, and the seconds that its build took; None if it was cached."""

    path: Path
    graph: str
    seconds: float | None


def build_engines(
    bundle: str | os.PathLike[str] | None,
    device: str,
    gpu: str | None = None,
    output: str | os.PathLike[str] | None = None,
    ops: str = "auto",
    on_progress: Callable[[str], None] = lambda graph: None,
) -> list[BuiltEngine]:
    """Build the engines of a bundle.

    Args:
        bundle: Folder of the bundle.
        device: "rtx" or "tensorrt".
        gpu: GPU architecture, such as "sm89"; None is that of this machine.
        output: Folder for a copy of the bundle with its engines, for machines with the same GPU
            architecture; by default engines go to the cache folder.
        ops: Graph variant.
        on_progress: Called with the file of each graph before it is built.

    Raises:
        BundleError: There is no valid bundle.
        DeviceError: The device has no engines, or a graph does not become one engine.
    """
    source = Bundle.read(store.find_bundle(bundle))
    store.verify_large_files(source)
    target_device = Device(device)
    if not target_device.supports_engines:
        raise DeviceError(f"{device} does not use engines; they are built for rtx or tensorrt")
    ops_by_role = {
        role: choose_ops(model, ops, target_device) for role, model in source.models.items()
    }
    platform = target_device.platform(gpu)
    folder = engines.cache_folder() if output is None else _copy_bundle(source, Path(output))
    built = []
    for role, model in source.models.items():
        for name in FIXED_SHAPES:
            graph = model.graph(name, ops_by_role[role])
            on_progress(graph.file)
            key = engines.key_of(source, model, graph, platform)
            start = time.perf_counter()
            with engines.publish(folder, key) as engine_file:
                if engine_file is not None:
                    _compile(
                        target_device, source.path(graph.file), engine_file(), platform, graph.ops
                    )
            seconds = None if engine_file is None else time.perf_counter() - start
            built.append(BuiltEngine(folder / key.name / engines.ENGINE, graph.file, seconds))
    return built


def _compile(
    device: Device, graph: Path, target: Path, platform: engines.EnginePlatform, ops: str
) -> None:
    if device.type == "rtx":
        tensorrt_rtx.compile_graph(onnxruntime(), graph, target, platform, device.index)
    else:
        tensorrt.compile_graph(onnxruntime(), graph, target, device.index, ops)


def _copy_bundle(bundle: Bundle, folder: Path) -> Path:
    """Return the folder for engines in a copy of a bundle; copy the bundle if needed."""
    if folder.exists() and any(folder.iterdir()):
        if {**Bundle.read(folder).files} != bundle.files:
            raise DeviceError(
                f"{folder} contains another bundle; specify a new folder with --output"
            )
        return folder / engines.FOLDER
    with destination(folder, DeviceError) as work:
        bundle.copy_to(work)
    return folder / engines.FOLDER
