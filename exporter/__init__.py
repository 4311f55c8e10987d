"""A checkpoint in, a bundle out: torch, transformers and onnx live here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specedge.errors import MissingExtraError
from specedge.telemetry import disabled_telemetry

if TYPE_CHECKING:
    from .exporting import export
    from .hosts.embedding import embed
    from .progress import Progress

__all__ = ["Progress", "embed", "export"]

_HOMES = {"embed": "hosts.embedding", "export": "exporting", "Progress": "progress"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specedge.exporter' has no attribute '{name}'")
    import importlib

    try:
        with disabled_telemetry():
            return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("specedge"):
            raise
        raise MissingExtraError(
            f'exporting needs {error.name}; run: pip install "specedge[cpu,export]"'
        ) from error
