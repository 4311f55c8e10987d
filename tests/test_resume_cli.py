"""Resuming after a full disk or a signal, and early checks of write access."""

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from installed import run
from specedge.bundle import MANIFEST, store
from specedge.runtime.planning.cost_table import Measurement
from specedge.runtime.requests import loader
from virtual import untuned

COMMAND = [sys.executable, "-m", "specedge"]
PROMPTS = '{"prompt": "import"}\n{"prompt": "def", "id": "b"}\n{"prompt": "class"}\n'
OPTIONS = ["-n", "4", "--temperature", "0.8", "--seed", "5", "-k", "2"]


@pytest.fixture
def finished(jsonl, tmp_path):
    """A file of prompts, and its whole output."""
    jsonl.write_text(PROMPTS, "utf-8")
    output = tmp_path / "results.jsonl"
    assert run("generate", "--prompts", jsonl, "--output", output, *OPTIONS).returncode == 0
    return jsonl, output


def test_resume_runs_missing_lines_only(finished):
    prompts, output = finished
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (b"", lines[0], lines[0] + lines[1][:20], lines[0] + lines[1], whole):
        output.write_bytes(cut)
        result = run("generate", "--prompts", prompts, "--output", output, "--resume", *OPTIONS)
        assert result.returncode == 0, result.stderr
        assert output.read_bytes() == whole
        left = 3 - cut.decode().count("\n")
        assert f"{left} of {left} prompt" in result.stderr
    output.unlink()
    run("generate", "--prompts", prompts, "--output", output, "--resume", *OPTIONS)
    assert output.read_bytes() == whole


def test_resumed_lines_report_no_prefix_reuse(text, tmp_path):
    text.write_text("def read_config(path):\n" * 3, "utf-8")
    output = tmp_path / "results.jsonl"
    run("generate", "--prompts", text, "--output", output, *OPTIONS)
    whole = output.read_bytes()
    output.write_bytes(whole[: whole.index(b"\n") + 1])
    run("generate", "--prompts", text, "--output", output, "--resume", *OPTIONS)
    assert output.read_bytes() == whole


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"index": 0, "seed": 6}, "prompt 0 has another seed"),
        ({"index": 1, "id": "c", "seed": 6}, "prompt 1 has another id"),
        ({"index": 3}, "it is not a result of these prompts"),
        ([], "it is not a result of these prompts"),
    ],
)
def test_resume_rejects_output_of_another_run(finished, line, said):
    prompts, output = finished
    output.write_text(json.dumps(line) + "\n", "utf-8")
    before = output.read_bytes()
    result = run("generate", "--prompts", prompts, "--output", output, "--resume", *OPTIONS)
    assert result.returncode == 1
    assert f"results.jsonl, line 1: {said}" in result.stderr
    assert output.read_bytes() == before


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(
    ("prompts", "more"),
    [
        (PROMPTS, ["-n", "5"]),
        (PROMPTS, ["-k", "3"]),
        (PROMPTS, ["--ops", "onnx"]),
        (PROMPTS.replace("import", "assert"), []),
        (PROMPTS.replace('"import"', '"import", "top_k": 9'), []),
    ],
)
def test_resume_refuses_lines_of_other_options_and_prompts(finished, prompts, more):
    file, output = finished
    before = output.read_bytes()
    file.write_text(prompts, "utf-8")
    result = run("generate", "--prompts", file, "--output", output, "--resume", *OPTIONS, *more)
    assert result.returncode == 1
    assert "results.jsonl, line 1: prompt 0 " in result.stderr
    assert "it belongs to another run" in result.stderr
    assert output.read_bytes() == before


def test_resume_refuses_lines_of_another_bundle(finished, tmp_path):
    prompts, output = finished
    other = shutil.copytree(store.embedded_folder(), tmp_path / "pair")
    command = ["generate", "--prompts", prompts, "--output", output, "--resume", *OPTIONS]
    assert run(*command, "--bundle", other).returncode == 0
    manifest = json.loads((other / MANIFEST).read_text("utf-8"))
    (other / MANIFEST).write_text(json.dumps(manifest | {"chat_template": "Hi"}), "utf-8")
    result = run(*command, "--bundle", other)
    assert result.returncode == 1
    assert "prompt 0 or the bundle has changed" in result.stderr


def test_full_disk_leaves_complete_lines_and_is_reported(tmp_path):
    pytest.importorskip("resource")
    output = tmp_path / "results.jsonl"
    code = f"""if True:
        import resource, signal
        from specedge.cli.batch import NEW, open_output
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with open_output({str(output)!r}, NEW) as write:
                for _ in range(9):
                    write("x" * 299)
        except OSError as error:
            print(error.filename)"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == str(output), result.stderr
    assert output.read_bytes() == (b"x" * 299 + b"\n") * 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_names_the_file(jsonl):
    jsonl.write_text(PROMPTS, "utf-8")
    result = run("generate", "--prompts", jsonl, "--output", "/dev/full", "-n", 2)
    assert result.returncode == 1
    assert "/dev/full" in result.stderr.splitlines()[-1]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*COMMAND, "inspect"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.stderr == "specedge: standard output: No space left on device\n"


def test_tune_checks_write_access_first(pipeline, monkeypatch):
    from click.testing import CliRunner

    from specedge.benchmarks import tune as tuning
    from specedge.bundle import store
    from specedge.cli.tune import tune

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(store, "check_writable", full)
    monkeypatch.setattr(tuning, "measure", lambda *_: pytest.fail("it measured"))
    result = CliRunner().invoke(tune, [])
    assert isinstance(result.exception, OSError)
    assert str(store.costs_folder()) in str(result.exception)


def test_write_errors_leave_no_file(tmp_path):
    from specedge.bundle import store

    store.check_writable(tmp_path / "folder" / "file.json")
    assert list((tmp_path / "folder").iterdir()) == []
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(OSError, match="file") as caught:
        store.check_writable(tmp_path / "file" / "file.json")
    assert caught.value.filename


def test_summary_has_the_time_of_the_noise_measurement(pipeline):
    from specedge.cli.trace import near_tie_lines

    generation = pipeline.generate("x" * 30, max_new_tokens=3, num_draft_tokens=40, exact=True)
    measured = replace(generation.stats, noise_seconds=1.234)
    assert near_tie_lines(replace(generation, stats=measured), exact=True)[0] == (
        "measuring this device's noise for K = 40 took 1.23 s, once per process"
    )
    immediate = replace(generation.stats, noise_seconds=0.01)
    assert not near_tie_lines(replace(generation, stats=immediate), exact=True)


def test_resume_plans_with_the_costs_of_the_earlier_lines(
    replaced_costs, jsonl, tmp_path, monkeypatch
):
    """Costs that a load replaces meanwhile change no sampled text of an interrupted run."""
    options = ["-n", "24", "--temperature", "0.9", "--seed", "5"]
    jsonl.write_text(PROMPTS, "utf-8")
    output, whole = tmp_path / "results.jsonl", tmp_path / "whole.jsonl"

    def generate(draft, is_busy, file, *more):
        measured = Measurement(untuned(draft), busy=is_busy)
        monkeypatch.setattr(loader, "measure", lambda *_, **__: measured)
        return run("generate", "--prompts", jsonl, "--output", file, *options, *more)

    assert generate(0.01, True, whole).returncode == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    output.write_bytes(lines[0])
    resumed = generate(9.0, False, output, "--resume")
    assert "note: costs were measured again" in resumed.stderr
    assert output.read_bytes() == whole.read_bytes()
    assert generate(9.0, False, tmp_path / "new.jsonl").returncode == 0
    assert (tmp_path / "new.jsonl").read_bytes() != whole.read_bytes()
    for file in store.costs_folder().iterdir():
        file.unlink()
    output.write_bytes(lines[0])
    resumed = generate(9.0, False, output, "--resume")
    assert "note: the pass costs of the earlier lines are no longer stored" in resumed.stderr
