"""Command `specedge theory`."""

import json
import os
import sys

import pytest

import papers
from installed import run

COSTS = ["--alpha", 0.8, "--draft-cost", 0.1]


def stdout(*arguments):
    result = run("theory", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def rows(text, title):
    """Return the cells of a printed table by row."""
    lines = text.split(title)[1].splitlines()
    end = lines.index("") if "" in lines[1:] else len(lines)
    return [line.split() for line in lines[3:end]]


def test_the_papers_tables_are_printed():
    text = stdout()
    tokens = rows(text, "Tokens per round")
    for row, (alpha, expected) in zip(tokens, papers.EXPECTED_TOKENS.items(), strict=True):
        assert row == [
            f"{alpha:g}",
            *(f"{e:.3f}" for e in expected[:-1]),
            "<",
            f"{expected[-1]:.2f}",
        ]
    best = rows(text, "Optimal K")
    costs = [i for i, cost in enumerate(papers.COSTS) if cost != 1.8 / 14.1]
    for row, alpha in zip(best, papers.ALPHAS, strict=True):
        found = list(zip(row[1::2], map(float, row[2::2]), strict=True))
        for (k, factor), i in zip(found, costs, strict=True):
            assert k == f"{papers.BEST_K[alpha][i]}:"
            assert factor == pytest.approx(papers.BEST_SPEEDUP[alpha][i], abs=6e-4)
    assert [tuple(map(float, row)) for row in rows(text, "Speed-up and operations")] == [
        (row.alpha, row.k, row.printed[1], row.printed[0]) for row in papers.OPERATIONS
    ]


def test_json_has_the_tables_too():
    tables = json.loads(stdout("--json"))
    assert tables["expected_tokens"][3]["by_num_draft_tokens"]["4"] == pytest.approx(3.3616)
    assert tables["expected_tokens"][3]["limit"] == pytest.approx(5)
    assert {"alpha": 0.5, "draft_cost": 0.5, "best_k": 0, "speedup": 1} in tables["best_k"]
    assert [row["speedup"] for row in tables["operations"]] == pytest.approx(
        [row.speedup for row in papers.OPERATIONS], abs=1e-6
    )


def test_costs_give_the_optimal_k_and_its_speedup():
    text = stdout(*COSTS)
    assert text.startswith("best K               6\nspeed-up             2.47\n")
    table = rows(text, "By K")
    assert [row[0] for row in table].index("*") == 1 + 6  # after the second line of its header
    assert table[1 + 4] == ["4", "3.362", "1.400", "2.401", "0.287", "0.590", "0.672"]


def test_verify_cost_may_depend_on_k():
    arguments = [*COSTS, "--verify-cost", "1,1.05,1.1,1.3,1.5,1.6", "--host-cost", 0.02]
    found = json.loads(stdout(*arguments, "--json"))
    assert found["best_k"] == 2
    assert found["verify_cost"] == [1, 1.05, 1.1, 1.3, 1.5, 1.6]
    assert len(found["by_num_draft_tokens"]) == 6
    at_4 = found["by_num_draft_tokens"][4]
    assert at_4["round_cost"] == pytest.approx(0.4 + 1.5 + 0.02)
    assert at_4["speedup"] == pytest.approx(3.3616 / 1.92)
    assert at_4["accepted_over_drafted"] == pytest.approx(0.5904)
    assert at_4["tokens_over_rows"] == pytest.approx(0.67232)


def test_a_draft_that_is_too_expensive_is_reported():
    text = stdout("--alpha", 0.2, "--draft-cost", 0.3)
    assert text.startswith("best K               0\n")
    assert "no speed-up" in text
    text = stdout("--alpha", 0.2, "--draft-cost", 2)
    assert rows(text, "By K")[2][4] == "never"


def test_theory_tables_include_the_runtimes_maximum_k():
    found = json.loads(stdout("--alpha", 1, "--draft-cost", 0, "--json"))
    assert found["best_k"] == 64
    assert found["tokens_per_round_limit"] is None
    assert len(found["by_num_draft_tokens"]) == 65


def test_figures_are_written_and_not_replaced_without_overwrite(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    (tmp_path / "best-k.svg").write_text("mine", "utf-8")
    result = run("theory", "--figures", tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert "best-k.svg exists; specify another folder, or use --overwrite" in result.stderr
    assert os.listdir(tmp_path) == ["best-k.svg"]
    assert run("theory", "--figures", tmp_path, "--overwrite").returncode == 0
    figures = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert [*sorted(figures)] == [
        "best-k.svg", "operations.svg", "tokens.svg", "verify-cost.svg",
    ]  # fmt: skip
    assert all(text.startswith("<?xml") for text in figures.values())


def test_figures_without_matplotlib_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("theory", "--figures", tmp_path / "new")
    assert result.returncode == 1
    assert result.stdout == stdout()
    assert 'pip install "specedge[plot]"' in result.stderr
    assert not (tmp_path / "new").exists()
