"""The CUDA plug-in of ONNX Runtime, over the stand-in for CUDA and a GPU on a private PCI bus.

The plug-in itself cannot be installed here. The CUDA provider of onnxruntime-gpu exports the same
interface and is registered in its place, in a package that says another version.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from gpu.conftest import PROMPT
from specedge.diagnosis import plug_in

if reason := standin.why_not():
    pytest.skip(reason, allow_module_level=True)

STANDIN = Path(standin.__file__).parent
MODULE = """
import os
import onnxruntime

def get_library_path():
    folder = os.path.dirname(onnxruntime.__file__)
    return os.path.join(folder, "capi", "libonnxruntime_providers_cuda.so")
"""
# With ONNX Runtime 1.31, whose matched plug-in is not published.
MATCHED = """
import dataclasses, json, sys
import onnxruntime
from specedge.diagnosis import plug_in
matched = {"0.9": ".".join(onnxruntime.__version__.split(".")[:2])}
plug_in.CUDA = dataclasses.replace(plug_in.CUDA, matched_runtimes=matched)
"""
GENERATE = """
import specedge
folder, prompt = sys.argv[1:]
pipeline = specedge.load(folder, device="cuda")
devices = [device.ep_name for device in onnxruntime.get_ep_devices()]
tokens = pipeline.generate(prompt, 12, ignore_eos=True, num_draft_tokens=4).tokens
print(json.dumps([devices, len(tokens), pipeline.target.ops]))
pipeline.close()
"""
PROBE = """
from specedge.diagnosis import probe
probe.PLUG_INS["cuda"] = plug_in.CUDA
probe._probe_device(lambda **answers: print(json.dumps(answers)), "cuda", sys.argv[1])
"""


@pytest.fixture
def package(tmp_path):
    """Return a function that installs the package in a folder of its own."""

    def install(version):
        (tmp_path / f"{plug_in.CUDA.module}.py").write_text(MODULE, "utf-8")
        name = plug_in.CUDA.packages[0]
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n", "utf-8")
        return tmp_path

    return install


def run(package, *arguments, **environment):
    """Run Python where there is a GPU on the PCI bus."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare")
    # rtx.sh shows the GPU, and run.sh puts the stand-in with cuBLAS first.
    command = ["sh", STANDIN / "rtx.sh", "sh", STANDIN / "run.sh", sys.executable, *arguments]
    paths = os.pathsep.join((str(package), *sys.path))
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths, **environment},
    )
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr.strip())
    return done


def test_cuda_sessions_use_the_matched_plug_in(package, pairs, tmp_path):
    counts = tmp_path / "counts.json"
    arguments = ("-c", MATCHED + GENERATE, pairs("fp32-fp16"), PROMPT)
    done = run(package("0.9.0"), *arguments, STANDIN_COUNTS=str(counts))
    assert done.returncode == 0, done.stderr
    devices, num_tokens, ops = json.loads(done.stdout)
    assert "CUDAExecutionProvider" in devices  # listed if it is a plug-in's
    assert (num_tokens, ops) == (12, "gqa-fp16")
    numbers = dict(line.split() for line in counts.read_text("utf-8").splitlines())
    assert int(numbers["captures"]) > 0
    assert int(numbers["graph_launches"]) > int(numbers["captures"])
    assert "failed_captures" not in numbers  # 0


def test_a_plug_in_for_another_onnxruntime_is_rejected_by_name(package, pairs):
    arguments = ("generate", "x", "--bundle", pairs("fp32-fp16"), "--device", "cuda")
    done = run(package("0.4.0"), "-m", "specedge", *arguments)
    assert done.returncode == 1
    assert "the plug-in onnxruntime-ep-cuda13 0.4.0 does not match ONNX Runtime" in done.stderr
    assert "0.2 with 1.30, 0.4 with 1.32" in done.stderr


def test_doctor_reports_the_plug_in(package):
    folder = package("0.4.0")
    done = run(folder, "-m", "specedge", "doctor", "--json", "--device", "cuda")
    (cause,) = json.loads(done.stdout)["devices"]["cuda"]["reasons"]
    assert "onnxruntime-ep-cuda13 0.4.0 does not match" in cause["what"]
    assert "pip uninstall onnxruntime-ep-cuda13" in cause["fix"]


def test_the_probe_runs_on_the_matched_plug_in(package):
    done = run(package("0.9.0"), "-c", MATCHED + PROBE, "0")
    assert done.returncode == 0, done.stderr
    assert '"plug_in": "onnxruntime-ep-cuda13 0.9.0"' in done.stdout
    assert '"wrong": "60 of 128 numbers' in done.stdout  # kernels of the stand-in do nothing
