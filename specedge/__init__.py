"""Lossless speculative decoding on ONNX Runtime.

    import specedge
    print(specedge.load().generate("def read_config(path):").text)

Importing this module loads neither NumPy nor ONNX Runtime: names are fetched when first used.
"""

from __future__ import annotations

from . import starting

if starting.is_command():  # before anything that takes a while
    starting.end_quietly_on_interrupt()

import importlib
import os
from typing import TYPE_CHECKING, Any

from .errors import (
    BundleError,
    CheckpointError,
    ContextLengthError,
    DeviceError,
    DrafterError,
    ExportError,
    MissingExtraError,
    OptionError,
    PairError,
    ParityError,
    PromptError,
    ReplayError,
    SpecEdgeError,
)
from .version import __version__

if TYPE_CHECKING:
    from .bundle import Bundle
    from .options import Sampling
    from .runtime.loading import load
    from .runtime.loop.verify import Draft
    from .runtime.pipeline import Pipeline
    from .runtime.sampling.distribution import Distribution
    from .runtime.stream import Generation

# ONNX Runtime's official packages collect telemetry unless this is set before it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {
    "Bundle": "specedge.bundle",
    "Sampling": "specedge.options",
    "Distribution": "specedge.runtime.sampling.distribution",
    "Draft": "specedge.runtime.loop.verify",
    "Generation": "specedge.runtime.stream",
    "Pipeline": "specedge.runtime.pipeline",
    "load": "specedge.runtime.loading",
}

__all__ = [
    "Bundle",
    "BundleError",
    "CheckpointError",
    "ContextLengthError",
    "DeviceError",
    "Distribution",
    "Draft",
    "DrafterError",
    "ExportError",
    "Generation",
    "MissingExtraError",
    "OptionError",
    "PairError",
    "ParityError",
    "Pipeline",
    "PromptError",
    "ReplayError",
    "Sampling",
    "SpecEdgeError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specedge' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
