"""What tests of all sample hosts share: tools, libraries that they load, changed bundles."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

TOOLS = "SPECEDGE_HOST_TOOLS"
SET_UP = "run tools/hosts/setup.sh DIR and set SPECEDGE_HOST_TOOLS to DIR"


def host_tools(*needed: str) -> Path:
    """The folder that tools/hosts/setup.sh filled; skips the test if it lacks one of `needed`."""
    if not os.environ.get(TOOLS):
        pytest.skip(f"no tools for sample hosts; {SET_UP}")
    tools = Path(os.environ[TOOLS]).resolve()
    for name in needed:
        if not (tools / name).exists():
            pytest.skip(f"{tools / name} is missing; {SET_UP}")
    return tools


def onnxruntime_library() -> Path:
    """ONNX Runtime's native library of the Python that runs the tests."""
    import onnxruntime

    found = sorted(Path(onnxruntime.__file__, "../capi").resolve().glob("libonnxruntime.so*"))
    if not found:
        pytest.skip("this onnxruntime package has no libonnxruntime.so; use one for Linux")
    return found[0]


def libraries() -> dict[str, str]:
    """The environment in which a host finds the native libraries that it loads by path."""
    tools = host_tools("lib/libortextensions.so")
    return os.environ | {
        "SPECEDGE_ONNXRUNTIME": str(onnxruntime_library()),
        "SPECEDGE_EXTENSIONS": str(tools / "lib/libortextensions.so"),
    }


def changed(bundle: Path, output: Path, change) -> Path:
    """A copy of a bundle in `output` whose manifest, as a dict, went through `change`."""
    shutil.copytree(bundle, output)
    manifest = json.loads((output / "bundle.json").read_text("utf-8"))
    change(manifest)
    (output / "bundle.json").write_text(json.dumps(manifest), "utf-8")
    return output
