"""Export of checkpoints to bundles: the only package that imports torch, transformers and onnx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specedge.errors import MissingExtraError
from specedge.telemetry import disabled_telemetry

if TYPE_CHECKING:
    from .bundle_export import export
    from .hosts.host_graphs import embed
    from .progress import Progress

__all__ = ["Progress", "embed", "export"]

_MODULES = {"embed": "hosts.host_graphs", "export": "bundle_export", "Progress": "progress"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'specedge.exporter' has no attribute '{name}'")
    import importlib

    try:
        with disabled_telemetry():
            return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("specedge"):
            raise
        raise MissingExtraError(
            f'exporting needs {error.name}; run: pip install "specedge[cpu,export]"'
        ) from error
