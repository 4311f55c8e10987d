"""`specedge tune`, `--num-draft-tokens auto`, `--explain` and `--replay`, as a user runs them."""

import json

import pytest
from click.testing import CliRunner

from specedge.benchmarks import tune as tuning
from specedge.bundle import Bundle, store
from specedge.cli import cli
from specedge.runtime.backend.sessions import Device
from specedge.runtime.planning import cost_files
from virtual import table

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
    path = max(store.costs_folder().iterdir(), key=cost_files.number_of)
    assert f"wrote {path}" in result.stderr
    for drafter in ("auto", "lookup"):
        explained = run("generate", PROMPT, "-n", 20, "--explain", "--drafter", drafter).stderr
        assert "measured by 'specedge tune'" in explained
        assert ("model" in explained) == (drafter == "auto")


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
    key = cost_files.cost_key(Bundle.read(store.embedded_folder()), Device(), Device(), "gqa, gqa")
    cost_files.write(key, table(draft=1.0))
    again = run("generate", PROMPT, *options, "--replay", file, "--json")
    one, two = json.loads(first.stdout), json.loads(again.stdout)
    assert one["num_draft_tokens"] == "auto"
    for name in ("text", "tokens", "plan"):
        assert two[name] == one[name]


def test_a_replay_needs_the_rounds_to_fit(tmp_path):
    file = tmp_path / "run.json"
    file.write_text('{"plan": [["model", 2, 3]]}', "utf-8")
    result = run("generate", PROMPT, "-n", 50, "--replay", file)
    assert "ends after 3 rounds" in str(result.exception)


def test_damaged_table_prints_one_note():
    key = cost_files.cost_key(Bundle.read(store.embedded_folder()), Device(), Device(), "gqa, gqa")
    path = cost_files.write(key, table())
    path.write_text("{", "utf-8")
    result = run("generate", PROMPT, "-n", 20)
    assert result.exit_code == 0
    (note,) = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert str(path) in note


def test_compare_supports_auto_and_predicts_its_speedup():
    found = json.loads(run("compare", PROMPT, "-n", 20, "--repeats", 1, "--json").stdout)
    assert found["num_draft_tokens"] == "auto"
    assert found["predicted_speedup"] > 0
    assert found["same_tokens"]
    assert "by the planner" in run("compare", PROMPT, "-n", 20, "--repeats", 1).stdout
