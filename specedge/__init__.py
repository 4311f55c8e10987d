"""Lossless speculative decoding on ONNX Runtime.

    import specedge
    print(specedge.load().generate("def read_config(path):").text)

Importing this module loads neither NumPy nor ONNX Runtime: names are fetched when first used. It
changes nothing in the process: no signal handler, no environment variable, no logging.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bundle import Bundle
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
    from .options import Sampling
    from .runtime.loading import load
    from .runtime.loop.verify import Draft
    from .runtime.pipeline import Pipeline
    from .runtime.sampling.distribution import Distribution
    from .runtime.stream import Generation
    from .version import __version__

_HOMES = {
    "Bundle": "specedge.bundle",
    "Sampling": "specedge.options",
    "Distribution": "specedge.runtime.sampling.distribution",
    "Draft": "specedge.runtime.loop.verify",
    "Generation": "specedge.runtime.stream",
    "Pipeline": "specedge.runtime.pipeline",
    "load": "specedge.runtime.loading",
    "__version__": "specedge.version",
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
    if name == "errors":
        return importlib.import_module("specedge.errors")
    if name not in __all__:
        raise AttributeError(f"module 'specedge' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES.get(name, "specedge.errors")), name)


def __dir__() -> list[str]:
    return __all__
