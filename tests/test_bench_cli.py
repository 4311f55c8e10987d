"""`specedge bench`: table, JSON, CSV and HTML output, and errors."""

import csv
import io
import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from click.testing import CliRunner

from benchmark_runs import LOSING, PROMPTS, figures, measured, runs
from specedge.benchmarks import tune
from specedge.benchmarks.summary import losing
from specedge.bundle import store
from specedge.cli import bench_output, bench_page, cli
from specedge.cli.bench_output import BenchmarkReport
from specedge.runtime.requests import loader

FACTS = {"target": "big <b>", "draft": "small", "processor": "a processor", "threads": 2}
FACTS |= {"ops": "gqa", "temperature": 0.0}


def report(found):
    some = figures(found)
    return BenchmarkReport(FACTS, some, losing(some), PROMPTS, found.runs)


GAINING = measured(runs(draft=0.1, verify=1.2, accepted=80))


def check(page):
    """Return the drawings of a page that loads nothing."""
    loads = r"<(script|link|img|iframe)|(src|href)=\"(?!#)|url\((?!#)|@import"
    assert not re.search(loads, page)
    drawn = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for one in drawn:
        ElementTree.fromstring(one)
    return drawn


def test_html_report_is_well_formed_and_self_contained():
    page = bench_page.page(report(GAINING))
    assert len(check(page)) == 3
    for part in ("draft tokens per round, K", "position in the draft", "model, predicted", "rest"):
        assert part in page


def test_the_pages_texts_are_escaped():
    page = bench_page.page(report(GAINING))
    assert "&lt;script&gt;alert(&#39;&amp;&#39;)" in page
    assert "big &lt;b&gt;" in page


def test_slower_settings_are_marked_in_every_output():
    lost = report(LOSING)
    text = bench_output.table_text(lost)
    assert "speculative decoding is SLOWER with every setting" in text
    assert "! model" in text
    page = bench_page.page(lost)
    check(page)
    assert "model loses" in page
    assert "speculative decoding is SLOWER" in page
    assert "Plain decoding is the fastest" in page
    assert json.loads(bench_output.json_text(lost))["settings"][1]["loses"] is True
    assert "LOSES" not in bench_output.table_text(report(GAINING))


def test_table_fits_terminal_width_without_truncation():
    plain, model = figures(GAINING)
    wide = {"low": 10.25, "high": 12.75, "draft_seconds": 0.6, "verify_seconds": 0.1}
    auto = replace(model, drafter="lookup", num_draft_tokens="auto", loses=True, **wide)
    text = bench_output.table_text(BenchmarkReport(FACTS, [plain, model, auto], [], PROMPTS, []))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "1.38" in text


def test_csv_has_row_per_setting_and_json_field_names():
    rows = list(csv.DictReader(io.StringIO(bench_output.csv_text(report(GAINING)))))
    assert [row["drafter"] for row in rows] == ["plain", "model"]
    settings = json.loads(bench_output.json_text(report(GAINING)))["settings"]
    assert [*rows[1]] == [*settings[1]]
    assert float(rows[1]["speedup"]) == settings[1]["speedup"]
    assert rows[1]["acceptance_by_position"] == "0.8"


def run(*arguments):
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


def test_a_small_benchmark_of_the_embedded_pair(tmp_path):
    prompts = tmp_path / "my <prompts>.txt"
    prompts.write_text("def read(path):\nclass Parser: # </pre><script>\n", "utf-8")
    table, page = tmp_path / "b.csv", tmp_path / "b.html"
    options = ("--prompts", prompts, "-k", "1-2,4", "-n", 5, "--repeats", 1)
    result = run(*options, "--json", "--csv", table, "--html", page)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    named = [(one["drafter"], one["num_draft_tokens"]) for one in found["settings"]]
    expected = [(name, k) for name in ("model", "suffix", "chain") for k in (1, 2, 4)]
    assert named == [("plain", 0), *expected, ("auto", "auto")]
    for one in found["settings"]:
        assert one["set_name"] == "my <prompts>.txt"
        assert one["num_new_tokens"] == 10
        assert 0 <= one["alpha"] <= 1
    assert len(check(page.read_text("utf-8"))) == 3
    assert "&lt;/pre&gt;&lt;script&gt;" in page.read_text("utf-8")
    assert len(table.read_text("utf-8").splitlines()) == 1 + len(named)
    assert found["draft"]
    assert len(found["runs"]) == 2 * (10 + 4)
    assert {run["num_new_tokens"] for run in found["runs"]} == {5}
    assert found["costs_of_held_out"] == "this run"
    again = run(*options, "--csv", table)
    assert again.exit_code != 0
    assert "exists; specify another file" in again.output


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX pipes and links")
def test_outputs_may_be_links_or_pipes(tmp_path):
    from specedge.cli.options import write_output

    real, link, pipe = (tmp_path / name for name in ("real.csv", "link.csv", "pipe"))
    real.write_text("old", "utf-8")
    link.symlink_to(real)
    write_output(str(link), "new", True, "--csv")
    assert link.is_symlink()
    assert real.read_text("utf-8") == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output(str(pipe), "new", False, "--csv")
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


@pytest.fixture
def short_bundle(tmp_path):
    """The embedded bundle with a context that no built-in prompt fits into."""
    folder = tmp_path / "short"
    shutil.copytree(store.embedded_folder(), folder)
    manifest = json.loads((folder / "bundle.json").read_text("utf-8"))
    for model in ("target", "draft"):
        manifest["models"][model]["context_length"] = 9
    (folder / "bundle.json").write_text(json.dumps(manifest), "utf-8")
    return folder


def test_built_in_prompts_that_do_not_fit_are_named_with_their_replacement(short_bundle):
    result = CliRunner().invoke(cli, ["bench", "--bundle", str(short_bundle)])
    assert result.exit_code == 1
    for part in ("built-in prompt of the set code", "more than the 8 tokens", "--prompts"):
        assert part in str(result.exception)


def test_threads_are_tuned_in_a_short_context(short_bundle, monkeypatch):
    pipeline = loader.load(short_bundle)
    monkeypatch.setattr(tune, "cpu_count", lambda: 2)
    monkeypatch.setattr(tune, "has_pool", lambda: False)
    monkeypatch.setattr(loader, "load", lambda bundle, threads, ops: pipeline)
    assert tune.fastest_threads(short_bundle, "auto") in (None, 1)
