"""Tests and measurements of a GPU end in one file, which people can read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
pytest.importorskip("onnx", reason="needs the export extra")

import gpu_bench
from gpu_assisted import torch_device
from gpu_measuring import K
from gpu_report import Report

TESTS = Path(__file__).parent
DOCTOR = {
    "specedge": "1.0",
    "onnxruntime": {"version": "1.31.1"},
    "driver": {"version": "580.1", "gpus": [{"name": "L40", "free": 5}]},
}
ON_A_GPU = """
import pytest

pytestmark = pytest.mark.gpu

def test_passes(record_property):
    record_property("target gqa-fp16", 0.001)

def test_fails():
    assert 1 == 2

def test_is_skipped():
    pytest.skip("no GPU")

@pytest.mark.skipif(True, reason="elsewhere")
def test_is_left_out():
    pass
"""
ON_A_STAND_IN = """
def test_runs_without_a_gpu():
    pass
"""
ENDS_THE_PROCESS = """
import os

import pytest

@pytest.mark.gpu
def test_ends_the_process():
    os._exit(139)
"""


def bench():
    """What `gpu_bench.py run` puts in of one pair."""
    passes = {
        str(t): {"captured": {"median": 1.0 * t}, "eager": {"median": 2.0}} for t in (1, 2, K + 1)
    }
    requests = {
        "shares": {"sampling": 0.01, "other": 0.02},
        "plain": {"median": 10.0},
        "speculative": {"median": 4.0},
        "speedup": 2.5,
        "same_text": 9,
        "num_texts": 9,
    }
    one = {
        "target": {"passes": passes, "bound_milliseconds": 0.9},
        "draft": {"passes": passes},
        "requests": requests,
        "predicted_speedup": 2.6,
    }
    return {"bytes_per_second": 8e11, "pairs": {"gpt2-xl": {"fp16": one}}}


def pytest_on_a_gpu(folder, report):
    (folder / "gpu").mkdir()  # as the folder of these tests is called
    (folder / "gpu" / "test_one.py").write_text(ON_A_GPU)
    (folder / "gpu" / "test_other.py").write_text(ON_A_STAND_IN)
    paths = [TESTS.parent, TESTS, TESTS / "gpu/standin", TESTS.parent / "tools"]
    command = [sys.executable, "-m", "pytest", "-p", "gpu.conftest", "-q", str(folder)]
    return subprocess.run(
        [*command, "--gpu-report", str(report), "-p", "no:cacheprovider"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip


def test_tests_and_measurements_are_parts_of_one_file_that_is_shown(tmp_path):
    path = tmp_path / "gpu.json"
    done = pytest_on_a_gpu(tmp_path, path)
    assert f"4 tests on a GPU are in {path}" in done.stdout, done.stdout + done.stderr
    Report(path).put("bench", {"cuda": bench()})
    found = json.loads(path.read_text("utf-8"))
    assert [*found] == ["doctor", "tests", "bench"]
    ended = {name.partition("::")[2]: one["outcome"] for name, one in found["tests"].items()}
    assert ended == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_is_skipped": "skipped",
        "test_is_left_out": "skipped",
    }
    said = CliRunner().invoke(gpu_bench.main, ["show", str(path)]).output
    for part in (
        "1 failed, 1 passed, 2 skipped",
        "test_passes (target gqa-fp16 0.001)",
        "test_fails: assert 1 == 2",
        "test_is_skipped: Skipped: no GPU",
        "cuda: 800 GB/s",
        "| gpt2-xl | fp16 | 0.90 | 1.00 | 2.00 | 5.00 |",
    ):
        assert part in said


def test_what_was_found_before_a_driver_ends_the_process_is_kept(tmp_path):
    path = tmp_path / "gpu.json"
    (tmp_path / "test_two.py").write_text(ENDS_THE_PROCESS)
    assert pytest_on_a_gpu(tmp_path, path).returncode == 139
    found = json.loads(path.read_text("utf-8"))["tests"]
    assert [one["outcome"] for one in found.values()] == ["passed", "failed", "skipped", "skipped"]


def test_a_part_that_is_written_again_keeps_the_others_and_what_is_not_named(tmp_path):
    path = tmp_path / "gpu.json"
    Report(path, DOCTOR).put("tests", {"a": 1})
    Report(path, DOCTOR).put("bench", {"cuda": 1})
    Report(path, DOCTOR).put("bench", {"cuda:1": 2})
    Report(path, DOCTOR).put("tests", {"a": 3})
    found = json.loads(path.read_text("utf-8"))
    assert found == {"doctor": DOCTOR, "tests": {"a": 3}, "bench": {"cuda": 1, "cuda:1": 2}}
    assert [*tmp_path.iterdir()] == [path]


def test_another_machines_report_is_refused_and_stays(tmp_path):
    path = tmp_path / "gpu.json"
    Report(path, DOCTOR).put("tests", {"a": 1})
    other = DOCTOR | {"driver": {"version": "590", "gpus": [{"name": "L40", "free": 4}]}}
    with pytest.raises(
        ValueError, match=r"another machine \(driver 580.1, now 590\); name another"
    ):
        Report(path, other)
    assert json.loads(path.read_text("utf-8"))["tests"] == {"a": 1}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"doctor": 1}'])
def test_a_file_that_is_no_report_is_one_clear_error(tmp_path, text):
    path = tmp_path / "gpu.json"
    path.write_text(text)
    done = CliRunner().invoke(gpu_bench.main, ["run", str(tmp_path), "--report", str(path)])
    assert done.exit_code == 1
    assert "name another file" in done.output
    assert len(done.output.splitlines()) == 1
    assert path.read_text() == text


@pytest.mark.parametrize(("device", "wanted"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_transformers_runs_on_the_card_that_was_asked_for(device, wanted):
    assert torch_device(device) == wanted
