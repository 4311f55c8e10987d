"""Why a device does not work, on machines that are made up."""

import pytest

from specedge.diagnosis import machine, packages, providers
from specedge.diagnosis.child import Answer
from specedge.diagnosis.machine import Machine

GPU = {"name": "A card", "capability": [8, 6], "memory": 8 << 30, "free": 1 << 30}
DRIVER = {"version": "580.95", "cuda": "13.0", "gpus": [GPU]}
NOT_THERE = "cannot open shared object file: No such file or directory"


def on(monkeypatch, driver, name, facts, ended=None):
    """What is said of a device on a made-up machine with such a driver."""
    monkeypatch.setattr(machine.sys, "platform", "linux")
    here = Machine()
    here.packages = (packages.Package("onnxruntime-gpu", "1.31.1"),)
    here.runtime = Answer({"version": "1.31.1", "cuda": "13.0"})
    here.driver, here.jetson = Answer(driver), None
    monkeypatch.setattr(providers, "ask", lambda *question: Answer(facts, ended))
    return providers.check(name, here).reasons


@pytest.mark.parametrize(
    ("driver", "name", "facts", "what", "fix"),
    [
        (
            {"missing": "libcuda.so.1"},
            "cuda",
            {"error": "no"},
            "there is no NVIDIA driver: libcuda.so.1 is not found",
            "install its driver, 580 or newer",
        ),
        (
            DRIVER | {"cuda": "12.4", "version": "550.54"},
            "cuda",
            {"error": "no"},
            "driver 550.54 runs CUDA 12.4 and older, and ONNX Runtime needs CUDA 13.0",
            "driver 580 or newer (the last onnxruntime-gpu for CUDA 12 is 1.26.0, and specedge "
            "takes 1.31 and newer)",
        ),
        (DRIVER | {"gpus": []}, "cuda", {"error": "no"}, "driver shows no GPU", "--gpus all"),
        (
            DRIVER,
            "cuda",
            {"missing": {"libcublasLt.so.13": NOT_THERE}},
            "libcublasLt.so.13 (not found)",
            'pip install "nvidia-cublas~=13.0"',
        ),
        (
            DRIVER,
            "cuda",
            {"missing": {"libcublas.so.13": NOT_THERE, "libcudart.so.13": "file too short"}},
            "libcublas.so.13 (not found), libcudart.so.13 (file too short)",
            'pip install "specedge[gpu]"',
        ),
        (
            DRIVER,
            "cuda",
            {"missing": {"libcurand.so.10": NOT_THERE}, "found": {"libcurand.so.10": "/a/lib"}},
            "ONNX Runtime does not look into /a/lib, which has libcurand.so.10",
            'export LD_LIBRARY_PATH="/a/lib:$LD_LIBRARY_PATH"',
        ),
        (
            DRIVER,
            "tensorrt",
            {"missing": {"libnvinfer.so.10": NOT_THERE}, "tensorrt": ["libnvinfer.so.11"]},
            "libnvinfer.so.11 is here, of another version of TensorRT",
            'pip install "tensorrt-cu13>=10.15,<10.17"',
        ),
        (
            DRIVER | {"gpus": [GPU | {"capability": [10, 0]}]},
            "cuda",
            {"codes": ["sm_90a", "sm_120a"], "error": "no"},
            "compute capability 10.0, and this ONNX Runtime has code for sm_90a, sm_120a",
            "CMAKE_CUDA_ARCHITECTURES=100",
        ),
        (
            DRIVER | {"gpus": [GPU | {"capability": [9, 0]}]},
            "rtx",
            {"error": "no"},
            "compute capability 9.0, and TensorRT-RTX takes 8.6, 8.9 and 12.0 or newer",
            "--device cuda",
        ),
        (
            DRIVER,
            "cuda",
            {"error": "Failed to allocate memory for requested buffer of size 4096"},
            "the GPU has no memory left",
            "end what else uses it",
        ),
        (DRIVER, "cuda", {"error": "CUDA failure 999"}, "CUDA failure 999", "doctor --report FILE"),
        (DRIVER | {"error": "cuInit gave error 803"}, "cuda", {}, "error 803", "nvidia-smi"),
        (DRIVER, "tensorrt", {"lacking": True}, "onnxruntime-gpu has no TensorRT", None),
    ],
)
def test_the_first_reason_has_the_fix(monkeypatch, driver, name, facts, what, fix):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first = on(monkeypatch, driver, name, facts)[0]
    assert what in first.what
    assert fix == first.fix if fix is None else fix in first.fix


def test_of_several_gpus_the_one_of_the_number_counts(monkeypatch):
    facts = {"codes": ["sm_86"], "error": "CUDA failure 999"}
    gpus = [GPU, GPU | {"capability": [10, 0]}]
    (reason,) = on(monkeypatch, DRIVER | {"gpus": gpus}, "cuda:1", facts)
    assert "compute capability 10.0" in reason.what
    (reason,) = on(monkeypatch, DRIVER | {"gpus": gpus}, "cuda:2", {"error": "no such device"})
    assert reason.what == "NVIDIA's driver shows no GPU 2, only GPUs 0 to 1"


def test_of_several_gpus_the_first_is_the_one_that_counts(monkeypatch):
    facts = {"codes": ["sm_86"], "error": "CUDA failure 999"}
    other = GPU | {"capability": [10, 0]}
    (reason,) = on(monkeypatch, DRIVER | {"gpus": [GPU, other]}, "cuda", facts)
    assert reason.what == "ONNX Runtime fails: CUDA failure 999"
    (reason,) = on(monkeypatch, DRIVER | {"gpus": [other, GPU]}, "cuda", facts)
    assert "compute capability 10.0" in reason.what


def test_gpus_that_a_variable_hides(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (reason,) = on(monkeypatch, DRIVER | {"gpus": []}, "cuda", {"error": "no"})
    assert reason.fix == "CUDA_VISIBLE_DEVICES is '-1': unset it"


def test_the_package_for_the_cpu_beside_a_gpu(monkeypatch):
    here = Machine()
    here.packages = (packages.Package("onnxruntime", "1.32.0"),)
    here.runtime, here.driver, here.jetson = Answer({"version": "1.32.0"}), Answer(DRIVER), None
    monkeypatch.setattr(providers, "ask", lambda *question: Answer({"lacking": True}))
    assert providers.why_not("cuda", here) == (
        "cuda does not work here: the package onnxruntime has no CUDA; "
        'pip uninstall -y onnxruntime && pip install "specedge[gpu]"'
    )


def test_a_jetson_is_told_that_no_package_has_code_for_it(tmp_path, monkeypatch):
    release = tmp_path / "nv_tegra_release"
    release.write_text("# R36 (release), REVISION: 4.3\n")
    monkeypatch.setattr(machine, "TEGRA", release)
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    here = Machine()
    here.packages, here.runtime = (), Answer({"version": "1.32.0"})
    here.driver = Answer(DRIVER)
    monkeypatch.setattr(providers, "ask", lambda *question: Answer({"lacking": True}))
    first = providers.check("cuda", here).reasons[0]
    assert "this is a Jetson (R36 (release), REVISION: 4.3)" in first.what
    assert "sm_87" in first.fix
    assert here.extra == 'pip install "specedge[cpu]"'
