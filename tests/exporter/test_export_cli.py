"""`specedge export` as a user runs it."""

from dataclasses import replace
from functools import partial

import pytest

import installed
from specedge.errors import ExportError
from specedge.exporter import export
from specedge.exporter.request import ExportRequest

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
