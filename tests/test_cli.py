"""Command line: output streams, exit codes and one-line errors."""

import json
import os
import re
import subprocess
import sys

import pytest

from installed import COMMAND, run, run_process
from manifests import make_bundle
from specedge.bundle import MAX_EAGER_HASH_SIZE
from specedge.runtime.decoding import decoding, verification

pytestmark = pytest.mark.usefixtures("shared_costs")
PROMPT = "def read_config(path):"


def test_generate_prints_text_to_stdout_and_one_line_to_stderr(pipeline):
    result = run_process("generate", PROMPT, "-n", 40, "-k", 4, "--threads", 1)
    assert result.returncode == 0
    assert result.stdout == pipeline.generate(PROMPT, 40).text + "\n"
    summary = r"40 tokens in [\d.]+ s .*tokens per round.*acceptance rate \d+%\n"
    assert re.fullmatch(summary, result.stderr)


def test_generate_reads_standard_input(pipeline):
    by_stdin = run("generate", "-", "-n", 10, stdin=PROMPT)
    assert by_stdin.stdout == pipeline.generate(PROMPT, 10).text + "\n"


def test_json_has_the_names_of_the_api(pipeline):
    options = ["--json", "--temperature", 0.8, "--seed", 4, "-k", 4]
    result = run("generate", PROMPT, "-n", 30, *options)
    expected = pipeline.generate(PROMPT, 30, 0.8, seed=4, num_draft_tokens=4)
    found = json.loads(result.stdout)
    for name in ("text", "tokens", "finish_reason", "seed", "num_draft_tokens"):
        assert found[name] == getattr(expected, name)
    for name in ("tokens_per_round", "accepted_over_tested", "acceptance_by_position"):
        assert found["stats"][name] == getattr(expected.stats, name)


def test_every_sampling_option_reaches_the_sampler(pipeline):
    options = ["--temperature", 1.1, "--top-k", 20, "--top-p", 0.9, "--min-p", 0.01, "--seed", 7]
    result = run("generate", PROMPT, "-n", 30, "-k", 2, "--ignore-eos", *options)
    expected = pipeline.generate(
        PROMPT, 30, 1.1, top_k=20, top_p=0.9, min_p=0.01, seed=7, num_draft_tokens=2,
        ignore_eos=True,
    )  # fmt: skip
    assert result.stdout == expected.text + "\n"
    assert "seed 7" in result.stderr


def test_stop_option_is_repeatable():
    result = run("generate", PROMPT, "--stop", "zzz", "--stop", "\n", "-n", 40)
    assert result.returncode == 0
    assert "\n" not in result.stdout.rstrip("\n")


def test_ctrl_c_inside_executed_source_exits_130(tmp_path):
    source = """
from specedge import cli
cli.cli.main = lambda **_: exec("raise KeyboardInterrupt")
cli.main()
"""
    (tmp_path / "interrupted.py").write_text(source)
    command = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 130


def test_closed_pipe_exits_without_traceback():
    process = subprocess.Popen(
        [*COMMAND, "generate", "x", "-n", "300", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    assert process.wait(60) == 1


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_closed_stdout_exits_without_traceback():
    line = f"{sys.executable} -m specedge generate x -n 3 >&-"
    result = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    assert result.returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_closed_stdin_is_one_line_error():
    line = f"{sys.executable} -m specedge generate - <&-"
    result = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert result.returncode == 1
    assert "standard input is closed" in result.stderr


def test_compare_prints_identical_text_once_with_statistics(pipeline):
    result = run("compare", PROMPT, "-n", 40, "-k", 4, "--repeats", 2)
    assert result.returncode == 0
    assert result.stdout.count(pipeline.generate(PROMPT, 40).text) == 1
    for word in ("speed-up", "predicted", "tokens per round", "acceptance rate", "same tokens"):
        assert word in result.stdout
    as_json = json.loads(run("compare", PROMPT, "-n", 40, "--repeats", 1, "--json").stdout)
    assert as_json["same_tokens"] is True
    assert as_json["speedup"] > 0
    assert as_json["predicted_speedup"] > 0


def test_compare_without_a_draft_has_no_prediction():
    as_json = json.loads(run("compare", PROMPT, "-n", 9, "-k", 0, "--json").stdout)
    assert as_json["predicted_speedup"] is None


def test_compare_exits_1_if_the_tokens_differ(monkeypatch):
    def accept_all(draft, *rest):
        count = len(draft.tokens)
        return verification.Verdict(count, 5) if count else verification.verify(draft, *rest)

    monkeypatch.setattr(decoding.SpeculativeDecoder, "accept_rule", staticmethod(accept_all))
    result = run("compare", PROMPT, "-n", 20, "-k", 4, "--repeats", 1)
    assert result.returncode == 1
    assert "plain decoding differ from new token" in result.stderr


def test_inspect_shows_the_bundle_and_its_json(pipeline):
    shown = run("inspect")
    assert shown.returncode == 0
    for word in ("target", "draft", "parity", "license", "invariant"):
        assert word in shown.stdout
    assert run("inspect", "--json").stdout == pipeline.bundle.to_json()


def test_inspect_predicts_memory(pipeline):
    from specedge.runtime.requests.loader import memory_of

    found = json.loads(run("inspect", "--memory", "--json").stdout)
    need = memory_of(pipeline.bundle)
    assert (found["peak"], found["parts"]) == (need.peak, need.parts)
    assert found["free"] is None or found["free"] > 0
    shown = run("inspect", "--memory")
    assert shown.returncode == 0
    for name in ("peak", "available", *need.parts):
        assert name in shown.stdout
    assert "device must be" in run("inspect", "--memory", "--device", "abacus").stderr
    assert run("inspect", "--memory", "--device", "auto").returncode == 0


def test_inspect_check_hashes_every_file(tmp_path):
    make_bundle(tmp_path, weights_size=MAX_EAGER_HASH_SIZE + 1)
    assert "all 5 files" in run("inspect", "--check", "--bundle", tmp_path).stderr
    weights = tmp_path / "draft" / "weights.bin"
    facts = weights.stat()
    with weights.open("r+b") as file:
        file.write(b"\xff")
    os.utime(weights, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert run("inspect", "--bundle", tmp_path).returncode == 0  # remembered by size and time
    result = run("inspect", "--check", "--bundle", tmp_path)
    assert result.returncode == 1
    assert "draft/weights.bin" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_environment_variable_selects_bundle(tmp_path):
    make_bundle(tmp_path)
    assert str(tmp_path) in run("inspect", SPECEDGE_BUNDLE=str(tmp_path)).stdout


def test_help_imports_no_heavy_module():
    code = "import sys; sys.argv = ['specedge', '--help']\n"
    code += "import specedge.cli\ntry: specedge.cli.main()\nexcept SystemExit: pass\n"
    code += "assert not {'numpy', 'onnxruntime', 'torch', 'rich'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
