"""Cause of a device's failure, on simulated machines."""

import pytest

from specedge.diagnosis import doctor, packages, plug_in
from specedge.diagnosis import driver as nvidia
from specedge.diagnosis.doctor import Machine, ProbeResult

GPU = {"name": "A card", "capability": [8, 6], "memory": 8 << 30, "free": 1 << 30}
DRIVER = {"version": "580.95", "cuda": "13.0", "gpus": [GPU]}
ABSENT = "cannot open shared object file: No such file or directory"
PROVIDERS = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]


@pytest.fixture
def reason(monkeypatch):
    """Diagnose a device on a machine with a driver, after a trial with these facts."""

    def diagnose(driver, name, facts, installed="onnxruntime-gpu", providers=PROVIDERS):
        monkeypatch.setattr(doctor.sys, "platform", "linux")
        machine = Machine()
        machine.packages = (packages.Package(installed, "1.31.1"),)
        machine.runtime = ProbeResult({"version": "1.31.1", "providers": providers})
        machine.driver = ProbeResult(driver)
        monkeypatch.setattr(doctor, "ask", lambda *question: ProbeResult(facts))
        (first,) = doctor.check(name, machine).reasons
        return first

    return diagnose


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
            "driver 550.54 supports CUDA 12.4, and ONNX Runtime needs CUDA 13.0",
            "driver 580 or newer",
        ),
        (DRIVER | {"gpus": []}, "cuda", {"error": "no"}, "driver shows no GPU", "--gpus all"),
        (
            DRIVER,
            "cuda",
            {"missing": {"libcublasLt.so.13": ABSENT, "libcublas.so.13": ABSENT}},
            "libcublasLt.so.13 (not found)",
            'pip install "nvidia-cublas~=13.0"',
        ),
        (
            DRIVER,
            "cuda",
            {"missing": {"libcudart.so.13": "file too short"}},
            "libcudart.so.13 (file too short)",
            'pip install "nvidia-cuda-runtime~=13.0"',
        ),
        (DRIVER, "cuda", {"missing": {"libdeep.so.1": ABSENT}}, "libdeep.so.1 (not found)", None),
        (
            DRIVER,
            "tensorrt",
            {"missing": {"libnvinfer.so.10": ABSENT}},
            "libnvinfer.so.10 (not found)",
            'pip install "tensorrt-cu13>=10.15,<10.17"',
        ),
        (
            DRIVER,
            "cuda",
            {"error": "CUDA error 209: no kernel image is available for execution on the device"},
            "no machine code for the GPU",
            "CMAKE_CUDA_ARCHITECTURES",
        ),
        (
            DRIVER | {"gpus": [GPU | {"capability": [9, 0]}]},
            "rtx",
            {"error": "no"},
            "compute capability 9.0, and TensorRT-RTX supports 8.6, 8.9 and 12.0 or newer",
            "--device cuda",
        ),
        (DRIVER, "rtx", {"error": "no"}, "is not installed", f'"{plug_in.RTX.packages[0]}~=0.5"'),
        (
            DRIVER,
            "cuda",
            {"error": "Failed to allocate memory for requested buffer of size 4096"},
            "the GPU is out of memory",
            "end other processes",
        ),
        (DRIVER, "cuda", {"error": "CUDA failure 999"}, "CUDA failure 999", "doctor --report FILE"),
        (DRIVER | {"error": "cuInit gave error 803"}, "cuda", {}, "error 803", "nvidia-smi"),
    ],
)
def test_the_first_cause_has_the_fix(monkeypatch, reason, driver, name, facts, what, fix):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(packages, "related", dict)
    first = reason(driver, name, facts)
    assert what in first.what
    assert fix == first.fix if fix is None else fix in first.fix


def test_gpus_are_selected_by_number(reason):
    gpus = DRIVER | {"gpus": [GPU, GPU | {"capability": [9, 0]}]}
    assert "compute capability 9.0" in reason(gpus, "rtx:1", {}).what
    assert reason(gpus, "cuda:2", {}).what == "the NVIDIA driver shows no GPU 2 (GPUs: 2)"
    assert "ONNX Runtime fails" in reason(gpus, "cuda:1", {}).what


def test_gpus_may_be_hidden_by_a_variable(monkeypatch, reason):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert reason(DRIVER | {"gpus": []}, "cuda", {}).fix == "unset CUDA_VISIBLE_DEVICES ('-1')"


def test_packages_without_a_provider_are_replaced(reason):
    first = reason(DRIVER, "cuda", {}, "onnxruntime", ["CPUExecutionProvider"])
    assert str(first) == (
        "the package onnxruntime 1.31.1 has no CUDA; "
        'pip uninstall -y onnxruntime && pip install "specedge[gpu]"'
    )
    first = reason(DRIVER, "tensorrt", {}, providers=["CUDAExecutionProvider"])
    assert "onnxruntime-gpu 1.31.1 has no TensorRT on " in first.what


@pytest.mark.parametrize(
    ("number", "jetpack", "fix"),
    [
        (35, "", "build onnxruntime-gpu"),
        (36, " with JetPack 6", "/jp6/cu126"),
        (39, " with JetPack 7.2", "/sbsa/cu130"),
    ],
)
def test_jetson_needs_a_dedicated_build(number, jetpack, fix, tmp_path, monkeypatch, reason):
    release = tmp_path / "nv_tegra_release"
    release.write_text(f"# R{number} (release), REVISION: 4.3\n")
    monkeypatch.setattr(nvidia, "TEGRA", release)
    monkeypatch.setattr(nvidia.platform, "machine", lambda: "aarch64")
    first = reason(DRIVER, "cuda", {})
    assert f"this is a Jetson{jetpack} (R{number} (release), REVISION: 4.3)" in first.what
    assert fix in first.fix
    machine = Machine()
    machine.driver = ProbeResult(DRIVER)
    assert machine.install == 'pip install "specedge[cpu]"'
