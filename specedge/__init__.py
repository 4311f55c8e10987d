"""Lossless speculative decoding on ONNX Runtime.

    import specedge
    print(specedge.load().generate("def read_config(path):").text)

Importing this package imports neither NumPy nor ONNX Runtime: names are resolved on first use. It
does not change the process: no signal handlers, environment variables or logging.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specedge.runtime.decoding.verification import Draft
    from specedge.runtime.requests.loader import load
    from specedge.runtime.requests.pipeline import Pipeline
    from specedge.runtime.requests.stream import Generation
    from specedge.runtime.sampling.distribution import Distribution
    from specedge.runtime.sampling.source import Source

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
    from .sampling_options import Sampling
    from .version import __version__

_MODULES = {
    "Bundle": "specedge.bundle",
    "Sampling": "specedge.sampling_options",
    "Distribution": "specedge.runtime.sampling.distribution",
    "Draft": "specedge.runtime.decoding.verification",
    "Generation": "specedge.runtime.requests.stream",
    "Pipeline": "specedge.runtime.requests.pipeline",
    "Source": "specedge.runtime.sampling.source",
    "load": "specedge.runtime.requests.loader",
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
    "Source",
    "SpecEdgeError",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("specedge.errors")
    if name not in __all__:
        raise AttributeError(f"module 'specedge' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES.get(name, "specedge.errors")), name)


def __dir__() -> list[str]:
    return __all__
