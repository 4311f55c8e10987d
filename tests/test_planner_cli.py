"""`specedge tune`, `--num-draft-tokens auto`, `--explain` and `--replay`, as a user runs them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")

from specedge.benchmarks import tune as tuning
from specedge.bundle import store
from specedge.cli import cli

pytestmark = pytest.mark.usefixtures("own_costs")

PROMPT = "def read_config(path):"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS", 1e-9)
    monkeypatch.setattr(tuning, "TEXT_TOKENS", 24)
    monkeypatch.setattr(tuning, "fastest_threads", lambda *_: None)


def run(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_tune_prints_and_stores_costs():
    result = run("tune")
    assert result.exit_code == 0
    for part in ("target, 9 tokens", "draft, 8 passes", "temperature 0", "K = 8:", "optimal"):
        assert part in result.stdout
    (path,) = store.costs_folder().iterdir()
    assert f"wrote {path}" in result.stderr
    explained = run("generate", PROMPT, "-n", 20, "--explain")
    assert "measured by 'specedge tune'" in explained.stderr


@pytest.mark.slow
def test_explain_names_no_drafter_that_the_request_has_not():
    assert "model" not in run("generate", PROMPT, "--drafter", "lookup", "--explain").stderr


def test_tune_prints_json():
    found = json.loads(run("tune", "--json").stdout)
    assert found["origin"] == "tune"
    assert len(found["greedy"]["target"]) == len(found["lengths"])


def test_the_first_request_is_planned_with_costs_measured_at_load():
    for _ in range(2):
        explained = run("generate", PROMPT, "-n", 20, "--explain").stderr
        assert "measured at the first load on this machine" in explained


def test_a_seed_repeats_its_text_in_later_processes_above_temperature_0():
    options = ("-n", 40, "--temperature", 0.9, "--seed", 3, "--json")
    first, later = (json.loads(run("generate", PROMPT, *options).stdout) for _ in range(2))
    assert (first["tokens"], first["plan"]) == (later["tokens"], later["plan"])


def test_json_has_the_plan_and_replay_repeats_it(tmp_path):
    options = ("-n", 50, "--temperature", 0.9, "--seed", 3)
    first = run("generate", PROMPT, *options, "--json")
    file = tmp_path / "run.json"
    file.write_text(first.stdout, "utf-8")
    run("tune")
    again = run("generate", PROMPT, *options, "--replay", file, "--json")
    one, two = json.loads(first.stdout), json.loads(again.stdout)
    assert one["num_draft_tokens"] == "auto"
    for name in ("text", "tokens", "plan"):
        assert two[name] == one[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "not valid JSON"),
        ("[]", "has no 'plan'"),
        ('{"plan": 3}', "replay must be a list"),
        ('{"plan": [["model", 4]]}', "[drafter, K, number of rounds]"),
        ('{"plan": [["model", 99, 1]]}', "between 0 and 64"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_an_invalid_replay_prints_one_line_and_exits_1(tmp_path, content, message, monkeypatch):
    import sys

    from specedge.cli import main

    file = tmp_path / "run.json"
    if content is not None:
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
    monkeypatch.setattr(sys, "argv", ["specedge", "generate", PROMPT, "--replay", str(file)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    result = run("generate", PROMPT, "--replay", file)
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_replay_needs_the_rounds_to_fit(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"plan": [["model", 2, 3]]}', "utf-8")
    result = run("generate", PROMPT, "-n", 50, "--replay", file)
    assert "ends after 3 rounds" in str(result.exception)
    file.write_text('{"plan": [["tables", 2, 30]]}', "utf-8")
    assert "rounds of 'tables'" in str(run("generate", PROMPT, "--replay", file).exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", "many"], "'many' is not a valid integer"),
        (["-k", "65"], "65 is not in the range"),
        (["-k", "3", "--replay", "x"], "excludes --num-draft-tokens"),
    ],
)
def test_a_bad_number_of_draft_tokens_is_refused(arguments, message):
    result = run("generate", PROMPT, *arguments)
    assert result.exit_code
    assert message in result.stderr


@pytest.mark.slow
def test_a_damaged_table_is_one_note_and_no_error():
    run("tune")
    (path,) = store.costs_folder().iterdir()
    path.write_text("{", "utf-8")
    result = run("generate", PROMPT, "-n", 20)
    assert result.exit_code == 0
    (note,) = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert str(path) in note


def test_compare_takes_auto_and_predicts_its_speedup():
    found = json.loads(run("compare", PROMPT, "-n", 20, "--repeats", 1, "--json").stdout)
    assert found["num_draft_tokens"] == "auto"
    assert found["predicted_speedup"] > 0
    assert found["same_tokens"]
    assert "by the planner" in run("compare", PROMPT, "-n", 20, "--repeats", 1).stdout
