"""The command as a user runs it: what goes where, exit codes, one line for what goes wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from installed import COMMAND, run, run_process
from manifests import make_bundle
from specedge.bundle import MAX_EAGER_HASH_SIZE

pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")

PROMPT = "def read_config(path):"
ROOT = Path(__file__).parents[1]


def test_generate_prints_text_to_stdout_and_one_line_to_stderr(pipeline):
    result = run_process("generate", PROMPT, "-n", 40, "-k", 4)
    assert result.returncode == 0
    assert result.stdout == pipeline.generate(PROMPT, 40).text + "\n"
    summary = r"40 tokens in [\d.]+ s .*tokens per round.*acceptance rate \d+%\n"
    assert re.fullmatch(summary, result.stderr)


def test_generate_reads_standard_input():
    by_stdin = run_process("generate", "-", "-n", 10, stdin=PROMPT)
    assert by_stdin.stdout == run("generate", PROMPT, "-n", 10).stdout


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


def test_stop_and_threads_are_options():
    result = run_process(
        "generate", PROMPT, "--stop", "zzz", "--stop", "\n", "-n", 40, "--threads", 1
    )
    assert result.returncode == 0
    assert "\n" not in result.stdout.rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "the prompt is empty"),
        (["generate", PROMPT, "--bundle", "nowhere"], "no bundle at nowhere"),
        (["generate", PROMPT * 1000], "shorten it"),
        (["generate", PROMPT, "-n", "0"], "-n"),
        (["generate", PROMPT, "-n", "many"], "many"),
        (["generate", PROMPT, "--temperature", "-1"], "--temperature"),
        (["generate", PROMPT, "--temperature", "nan"], "temperature"),
        (["generate", PROMPT, "--top-p", "0"], "--top-p"),
        (["generate", PROMPT, "-k", "65"], "-k"),
        (["generate", PROMPT, "--stop", ""], "stop string"),
        (["generate", PROMPT, "--colour"], "--colour"),
        (["generate"], "PROMPT"),
        (["compare", "", "--repeats", "1"], "the prompt is empty"),
        (["inspect", "--bundle", "README.md"], "README.md"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_bad_input_prints_one_line_and_fails(arguments, message):
    result = run(*arguments)
    assert result.returncode == 1
    assert result.stdout.strip() == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    last = [line for line in result.stderr.splitlines() if not line.startswith(("Usage", "Try"))]
    assert len([line for line in last if line.strip()]) == 1


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_prints_partial_text_and_exits_130():
    process = subprocess.Popen(
        [*COMMAND, "generate", "x", "-n", "400", "--ignore-eos", "-k", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).endswith("\n")
    assert "interrupted" in err
    assert "Traceback" not in err


def test_ctrl_c_inside_executed_source_exits_130(tmp_path):
    source = """
from specedge import cli
cli.cli.main = lambda **_: exec("raise KeyboardInterrupt")
cli.main()
"""
    (tmp_path / "interrupted.py").write_text(source)
    command = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 130


def test_a_closed_pipe_is_not_a_traceback():
    process = subprocess.Popen(
        [*COMMAND, "generate", "x", "-n", "300", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    assert process.wait(60) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_under_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*COMMAND, "generate", PROMPT, "-n", "5"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.returncode == 1
    assert "No space left" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("command", ["generate x -n 3 >&-", "inspect --json >&-"])
def test_a_closed_standard_output_is_not_a_traceback(command):
    line = f"{sys.executable} -m specedge {command}"
    result = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    assert result.returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_closed_standard_input_is_one_line():
    line = f"{sys.executable} -m specedge generate - <&-"
    result = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert result.returncode == 1
    assert "standard input is closed" in result.stderr


def test_compare_shows_a_text_that_is_the_same_once_and_the_figures(pipeline):
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


def test_compare_exits_1_if_the_tokens_differ():
    code = (
        "from specedge.runtime.decoding import verification, decoding\n"
        "from specedge.cli import main\n"
        "def wrong(draft, *rest):\n"
        "    return verification.Verdict(len(draft.tokens), 5)\n"
        f"import sys; sys.argv = ['specedge', 'compare', {PROMPT!r}, '-n', '20', '-k', '4']\n"
        "accept_rule = lambda d, *r: wrong(d) if d.tokens else verification.verify(d, *r)\n"
        "decoding.SpeculativeDecoder.accept_rule = staticmethod(accept_rule)\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
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


def test_the_variable_names_the_bundle(tmp_path):
    make_bundle(tmp_path)
    assert str(tmp_path) in run("inspect", SPECEDGE_BUNDLE=str(tmp_path)).stdout


def test_version():
    assert re.fullmatch(r"specedge, version \d+\.\d+\.\d+\n", run("--version").stdout)


def test_help_imports_no_heavy_module():
    code = "import sys; sys.argv = ['specedge', '--help']\n"
    code += "import specedge.cli\ntry: specedge.cli.main()\nexcept SystemExit: pass\n"
    code += "assert not {'numpy', 'onnxruntime', 'torch', 'rich'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
