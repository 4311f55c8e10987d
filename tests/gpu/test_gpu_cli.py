"""The command line on a GPU, and the one line that it says where something is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from gpu.conftest import PROMPT, run

if reason := standin.why_not():
    pytest.skip(reason, allow_module_level=True)


def test_generate_command_on_cuda(cuda, pairs):
    done = run(
        "generate", PROMPT, "--bundle", str(pairs("fp32-fp16")), "--device", "cuda",
        "-n", "12", "--ignore-eos",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "12 tokens" in done.stderr


def test_cli_thread_pool_runs_cpu_draft_with_gpu_target(cuda, pairs):
    done = run(
        "generate", PROMPT, "--bundle", str(pairs("fp32-fp16")), "--device", "cuda",
        "--draft-device", "cpu", "-n", "12", "--ignore-eos", "-k", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "12 tokens" in done.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"STANDIN_DEVICES": 0}, "specedge: cuda does not work here: "),
        ({"STANDIN_DRIVER": 12040}, "specedge: cuda does not work here: "),
        ({"STANDIN_MEMORY_MB": 0}, "specedge: not enough memory on cuda for "),
    ],
)
def test_missing_gpu_component_is_one_line_error(cuda, pairs, setting, message):
    done = run(
        "generate", PROMPT, "--bundle", str(pairs("fp32-fp16")), "--device", "cuda", **setting
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_missing_library_is_one_line_error(cuda, pairs, tmp_path):
    folder = Path(cuda.build())
    for name in cuda.LIBRARIES[:3]:
        (tmp_path / name).symlink_to(folder / name)
    command = [sys.executable, "-m", "specedge", "generate", PROMPT, "--device", "cuda"]
    done = subprocess.run(
        [*command, "--bundle", str(pairs("fp32-fp16"))],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("specedge: cuda does not work here: ")
    assert len(done.stderr.splitlines()) == 1


def test_unknown_device_index_is_named_in_the_error(pairs, libraries):
    arguments = ("generate", PROMPT, "--bundle", str(pairs("fp32-fp16")), "--device", "cuda:7")
    done = run(*arguments, STANDIN_DIR=libraries)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "specedge: cuda:7 does not work here: the NVIDIA driver shows no GPU 7 (GPUs: 1)"
    )


def test_second_gpu_failure_reason_is_reported(pairs, libraries):
    arguments = ("generate", PROMPT, "--bundle", str(pairs("fp32-fp16")), "--device", "cuda:1")
    done = run(*arguments, STANDIN_DIR=libraries, STANDIN_DEVICES=2, STANDIN_DRIVER=12040)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "specedge: cuda:1 does not work here: the NVIDIA driver 580.95.05 supports CUDA 12.4"
    )
