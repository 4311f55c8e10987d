"""TensorRT-RTX compiles the exported graphs for a GPU that is not here.

NVIDIA's own compiler does, over a driver that is a stand-in: nothing can be run of what it makes.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from specedge.bundle import Bundle
from specedge.diagnosis.plug_in import RTX

SCRIPT = Path(standin.__file__).parent / "rtx.sh"


def why_not():
    if not RTX.is_installed:
        return "NVIDIA's plug-in for TensorRT-RTX is not installed"
    if not shutil.which("gcc") or not shutil.which("unshare"):
        return "no C compiler, or no unshare"
    done = subprocess.run(["sh", str(SCRIPT), "true"], capture_output=True, text=True)
    return done.stderr.strip() or None if done.returncode else None


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def run(*arguments, code=0):
    command = ["sh", str(SCRIPT), sys.executable, "-m", "specedge", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        *(("fp32-fp16", gpu) for gpu in ("sm86", "sm89", "sm120")),
        pytest.param("fp32-bf16", "sm89", marks=pytest.mark.slow),
        ("int4-qdq", "sm89"),
        ("int8-qdq", "sm89"),
        pytest.param("int8-block-qdq", "sm89", marks=pytest.mark.slow),
        pytest.param("int4-qdq", "sm120", marks=pytest.mark.slow),
    ],
)
def test_every_graph_of_a_pair_becomes_one_engine(pairs, name, gpu):
    onnx = pytest.importorskip("onnx")
    done = run("build", "--bundle", pairs(name), "--device", "rtx", "--gpu", gpu)
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert len({*paths}) == 8
    for path in paths:
        model = onnx.load(path, load_external_data=False)
        assert [node.op_type for node in model.graph.node] == ["EPContext"]
        key = json.loads((path.parent / "key.json").read_text("utf-8"))
        assert key["platform"]["gpu"] == gpu
    again = run("build", "--bundle", pairs(name), "--device", "rtx", "--gpu", gpu)
    assert again.stderr.count(" exists") == 8


def test_build_output_writes_engines_to_bundle_copy(pairs, tmp_path):
    copy = tmp_path / "copy"
    done = run("build", "--bundle", pairs("fp32-fp16"), "--device", "rtx", "--output", copy)
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert all(path.is_relative_to(copy / "engines") and path.is_file() for path in paths)
    assert Bundle.read(copy).files == Bundle.read(pairs("fp32-fp16")).files


def test_missing_engine_error_has_build_command(pairs):
    done = run("generate", "x", "--bundle", pairs("fp32-fp16"), "--device", "rtx", code=1)
    assert f"specedge build --bundle {pairs('fp32-fp16')} --device rtx" in done.stderr
    assert len(done.stderr.splitlines()) == 1
