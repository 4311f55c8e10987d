"""`specedge export` as a user runs it."""

import contextlib
import os
import re
import subprocess
from dataclasses import replace
from functools import partial

import pytest

import installed
from specedge.errors import ExportError
from specedge.exporter import Progress, export
from specedge.exporter.request import ExportRequest
from traces import WITH_TRACES

run = partial(installed.run, "export")
run_process = partial(installed.run_process, "export")


def test_export_error_is_one_line(pairs, tmp_path):
    draft = pairs.checkpoint("gpt2")[0]
    result = run("--draft", draft, "--target", tmp_path / "missing", "--output", tmp_path / "out")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("specedge: target ")


@pytest.mark.slow
def test_hub_id_without_network_is_one_line_error(tmp_path):
    result = run("--draft", "a/b", "--target", "a/c", "--output", tmp_path / "out")
    assert result.returncode == 1
    assert "hub cannot be reached" in result.stderr
    assert result.stderr.count("\n") == 1


def test_missing_extra_is_one_line_error_with_pip_command(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')", "utf-8")
    result = run_process("--draft", "a/b", "--target", "a/c", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert 'pip install "specedge[cpu,export]"' in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--precision", "fp32", "--compute", "fp32"), "omit compute"),
        (("--precision", "int8", "--compute", "bf16"), "cannot be dequantized to bf16"),
    ],
)
def test_invalid_combination_of_options_is_usage_error(tmp_path, options, reason):
    result = run("--target", tmp_path, "--draft", "none", *options, "--output", tmp_path / "out")
    assert result.returncode == 1
    assert reason in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX terminal")
def test_export_in_a_terminal_shows_one_bar_with_the_remaining_time(pairs, tmp_path):
    import pty

    ours, theirs = pty.openpty()
    command = [*WITH_TRACES, "export", "--target", pairs.checkpoint("gpt2")[1], "--ops", "onnx"]
    process = subprocess.Popen(
        [*command, "--max-length", "32", "--output", tmp_path / "bundle"],
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"}, stderr=theirs, stdout=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while block := os.read(ours, 4096):
            shown += block
    os.close(ours)
    assert process.wait() == 0
    during, _, end = re.sub(r"\x1b\[[\d;?]*\w", "", shown.decode()).partition("target: ")
    frames = [frame.strip() for frame in during.split("\r") if frame.strip()]
    assert any(re.search(r"Tracing the target .* about 0:\d\d left", frame) for frame in frames)
    assert len({*frames}) > len(frames) / 2 > 2
    assert re.search(r"\d+\.\d s: loading the target .* hashing \d", end)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_all_steps_are_predicted(pairs, tmp_path, precision):
    progress = Progress()
    draft, target = pairs.checkpoint("gpt2")
    options = {"max_length": 32, "ops": "onnx", "precision": precision, "rounding": "nearest"}
    export(draft, target, tmp_path / "bundle", progress=progress, **options)
    assert [*progress.seconds] == [*progress.predicted]
    assert min(progress.predicted.values()) > 0


def test_compute_type_of_float_checkpoint_is_refused_in_one_line(pairs, tmp_path):
    target = pairs.checkpoint("gpt2")[1]
    with pytest.raises(ExportError, match="compute in fp32; omit compute"):
        export(None, target, tmp_path / "bundle", compute="fp32")


def test_compute_type_of_quantized_checkpoint_needs_no_precision():
    request = ExportRequest(None, "quantized", compute="fp32")
    assert replace(request, precision="keep").compute == "fp32"


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_bits_option_with_other_precision_is_one_line_error(tmp_path, precision):
    with pytest.raises(ExportError, match=f"--bits applies to --precision int4, not {precision}"):
        export(None, tmp_path, tmp_path / "bundle", precision=precision, bits=5.0)
