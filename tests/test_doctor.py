"""`specedge doctor` on any machine: right about this one, and about those that are made up here."""

import functools
import json
import os
from pathlib import Path

import onnxruntime as ort
import pytest

from cases import slow
from distributions import install, only
from installed import run
from specedge.cli import cli
from specedge.diagnosis import doctor, probe
from specedge.diagnosis.doctor import Machine, ask

POSIX = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
GONE = "raise ModuleNotFoundError(\"No module named 'onnxruntime'\", name='onnxruntime')"
FAKE = """
import os, numpy
from specedge.diagnosis import probe

__version__, cuda_version = "1.31.1", "13.0"
SessionOptions = type("SessionOptions", (), {"add_session_config_entry": lambda *x: None})

def get_available_providers():
    return ["CUDAExecutionProvider", "CPUExecutionProvider"]

def preload_dlls():
    print("what a library prints is no answer")

class InferenceSession:
    def __init__(self, path, options, providers, enable_fallback):
        assert not enable_fallback
        OPEN

    def get_providers(self):
        return FIRST

    def run(self, outputs, inputs):
        weights, bias = probe.constants()
        right = numpy.maximum(inputs["x"] @ weights + bias, 0)
        return [RESULT]
"""


PROBED = functools.cache(ask)


@pytest.fixture
def probed_once(monkeypatch):
    """Ask this machine each question once for all tests."""
    monkeypatch.setattr(doctor, "ask", PROBED)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make Python import another onnxruntime, and pip know of these packages alone."""

    def make(content, *installed):
        folder = tmp_path / "site"
        (folder / "onnxruntime").mkdir(parents=True)
        (folder / "onnxruntime/__init__.py").write_text(content)
        for name, version in installed:
            install(folder, name, version)
        monkeypatch.syspath_prepend(str(folder))
        only(monkeypatch, folder)
        monkeypatch.setattr(doctor.Machine, "driver", doctor.ProbeResult({"missing": "libcuda"}))

    return make


@pytest.fixture
def fake(module, monkeypatch):
    """An onnxruntime-gpu of Python alone."""

    def make(result="right", first='["CUDAExecutionProvider"]', opening="pass"):
        content = FAKE.replace("RESULT", result).replace("FIRST", first).replace("OPEN", opening)
        module(content, ("onnxruntime-gpu", "1.31.1"))
        monkeypatch.setattr(doctor.Machine, "driver", doctor.ProbeResult({"gpus": [{}]}))

    return make


def diagnosis(*arguments):
    result = run("doctor", "--json", *arguments)
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


@pytest.mark.usefixtures("probed_once")
def test_the_diagnosis_of_this_machine_is_correct():
    code, found = diagnosis()
    assert code == 0
    assert found["onnxruntime"]["version"] == ort.__version__
    assert found["devices"].keys() == {"cpu", "cuda", "tensorrt", "rtx"}
    assert found["devices"]["cpu"]["works"]
    assert found["devices"]["cpu"]["facts"]["products"] in ("as they are", "unsigned")
    for name, provider in list(probe.PROVIDERS.items())[1:3]:
        if provider not in ort.get_available_providers():
            assert not found["devices"][name]["works"]
            assert len(found["devices"][name]["reasons"]) == 1
    assert found["driver"].keys() & {"missing", "gpus", "error"}


@pytest.mark.usefixtures("probed_once")
def test_text_has_a_line_for_each_device_and_the_commands_that_help():
    result = run("doctor")
    assert result.returncode == 0
    assert f"ONNX Runtime     {ort.__version__}" in result.stdout
    assert "\ncpu              works\n  a test graph gave the expected output" in result.stdout
    for name in ("cuda", "tensorrt", "rtx"):
        assert f"\n{name:16} " in result.stdout
    assert result.stdout.count("there is no NVIDIA driver: libcuda.so.1 is not found\n  fix") <= 1


@pytest.mark.usefixtures("probed_once")
def test_why_not_returns_one_line():
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        line = doctor.why_not("cuda")
        assert line.startswith("cuda does not work here: ")
        assert "\n" not in line


def test_modules_of_the_current_folder_are_not_imported(tmp_path, monkeypatch):
    tmp_path.joinpath("onnxruntime.py").write_text("raise ImportError('the wrong file')")
    monkeypatch.chdir(tmp_path)
    assert Machine().runtime.answers["version"] == ort.__version__


@pytest.mark.parametrize(
    ("content", "installed", "what", "fix"),
    [
        (GONE, [], "ONNX Runtime is not installed", 'pip install "specedge[cpu]"'),
        (
            GONE,
            [("onnxruntime", "1.31.0")],
            "onnxruntime 1.31.0 is installed, but its files are missing",
            'pip uninstall -y onnxruntime && pip install "specedge[cpu]"',
        ),
        (
            "raise ImportError('libfoo.so.1: cannot open shared object file')",
            [("onnxruntime-gpu", "1.31.0")],
            "onnxruntime-gpu 1.31.0 is installed but cannot be loaded (libfoo.so.1: cannot open",
            'pip uninstall -y onnxruntime-gpu && pip install "specedge[gpu]"',
        ),
        pytest.param(
            "import os; os.kill(os.getpid(), 11)",
            [("onnxruntime", "1.31.0")],
            "cannot be loaded (ended by signal 11 (SIGSEGV) while importing onnxruntime)",
            "pip uninstall -y onnxruntime && ",
            marks=POSIX,
        ),
        (
            "print('a half')",
            [("onnxruntime", "1.31.0")],
            "site/onnxruntime remains)",
            "pip uninstall -y onnxruntime && ",
        ),
    ],
)
def test_a_broken_onnx_runtime_is_a_finding(module, content, installed, what, fix):
    module(content, *installed)
    result = run("doctor", "--device", "cpu")
    assert result.returncode == 1
    assert result.stdout.count(what) == 1 + 1  # the device points there
    assert f"  fix: {fix}" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("installed", "what", "uninstalled"),
    [
        (
            [("onnxruntime", "1.31.1"), ("onnxruntime-gpu", "1.31.1")],
            "onnxruntime 1.31.1 and onnxruntime-gpu 1.31.1 are installed",
            "onnxruntime onnxruntime-gpu",
        ),
        (
            [("onnxruntime-gpu", "1.32.0")],
            "but Python imports ONNX Runtime 1.31.1 from",
            "onnxruntime-gpu",
        ),
    ],
)
def test_conflicting_onnxruntime_packages_are_a_finding(module, installed, what, uninstalled):
    module(FAKE.replace("RESULT", "right"), *installed)
    _, found = diagnosis("--device", "cpu")
    (finding,) = found["findings"]
    assert what in finding["what"]
    assert finding["fix"] == f'pip uninstall -y {uninstalled} && pip install "specedge[gpu]"'


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (
            {"result": "0 * right"},
            "its results are wrong: 60 of 128 numbers: y[0, 0] is 0, expected",
        ),
        slow({"result": "right * numpy.nan"}, "its results are wrong: 128 of 128 numbers"),
        slow({"result": "right[:3]"}, "its results are wrong: shape [3, 32], expected [4, 32]"),
        ({"opening": "os._exit(3)"}, "failed: ended with exit code 3 while opening a session"),
    ],
)
def test_a_provider_that_fails_is_a_finding(fake, made, what):
    fake(**made)
    code, found = diagnosis("--device", "cuda")
    assert code == 1
    assert what in found["devices"]["cuda"]["reasons"][-1]["what"]


def test_session_on_fallback_provider_is_a_failure(fake):
    fake(first='["CPUExecutionProvider"]')
    _, found = diagnosis("--device", "cuda")
    assert not found["devices"]["cuda"]["works"]
    assert found["devices"]["cuda"]["facts"]["error"].endswith("CPUExecutionProvider instead")


def test_hanging_provider_is_terminated(module):
    module("import time; time.sleep(60)")
    answer = ask("runtime", seconds=3)
    assert answer.ended == "no response within 3 s while importing onnxruntime"


@pytest.mark.usefixtures("probed_once")
def test_report_file_contains_the_json_output(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{Path.home()}/lib")
    path = tmp_path / "report.json"
    result = run("doctor", "--device", "cpu", "--report", path)
    assert result.returncode == 0
    assert result.stderr == f"wrote {path}\n"
    found = json.loads(path.read_text("utf-8"))
    assert found["devices"]["cpu"]["works"]
    assert found["environment"]["LD_LIBRARY_PATH"] == "~/lib"
    assert str(Path.home()) not in path.read_text("utf-8")
    assert os.listdir(tmp_path) == ["report.json"]


@pytest.mark.usefixtures("probed_once")
def test_existing_report_file_requires_overwrite(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("mine")
    result = run("doctor", "--device", "cpu", "--report", path)
    assert result.returncode == 1
    assert "exists; specify another file, or use --overwrite" in result.stderr
    assert path.read_text() == "mine"
    assert run("doctor", "--device", "cpu", "--report", path, "--overwrite").returncode == 0
    assert json.loads(path.read_text("utf-8"))


@pytest.mark.usefixtures("probed_once")
def test_failed_report_write_leaves_no_file(tmp_path, monkeypatch):
    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result = run("doctor", "--device", "cpu", "--report", tmp_path / "report.json")
    assert result.returncode == 1
    assert "No space left on device" in result.stderr
    assert os.listdir(tmp_path) == []


def test_device_option_lists_all_probed_devices():
    (device,) = [one for one in cli.commands["doctor"].params if one.name == "device"]
    assert list(device.type.choices) == list(probe.PROVIDERS)


def test_the_probe_graph_matches_its_expected_result():
    onnx = pytest.importorskip("onnx")
    model = onnx.load(probe.GRAPH)
    assert [node.op_type for node in model.graph.node] == ["MatMul", "Add", "Relu"]
    stored = [onnx.numpy_helper.to_array(one) for one in model.graph.initializer]
    for found, wanted in zip(stored, probe.constants(), strict=True):
        assert found.dtype == wanted.dtype
        assert (found == wanted).all()
