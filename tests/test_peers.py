"""The comparison with other libraries, with workers that only pretend to generate."""

import json
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

import compare
import environments
from environments import PEERS, Peer, UnavailableError
from measuring import Run, Setting, Tried, best, generate, in_turn, sweep
from processes import Loaded, Pool, Worker, WorkerError
from reporting import picture, row, table

WORKERS = Path(compare.__file__).parent / "workers"
PYTHON_1M = Path(__file__).parents[1] / "models/checkpoints/python-1m"
FAKE = """
    import os, subprocess, sys
    from serving import cached, serve

    class Fake:
        def convert(self, request):
            make = lambda place: place.mkdir()
            name = "fake-" + request["precision"]
            if request["precision"] == "int5":
                raise ValueError("five bits")
            target = cached(request["cache"], [request["model"]], name, make)
            return {"target": target, "draft": target}

        def load(self, target, draft, threads):
            print("a library prints")
            os.system("echo a child prints")
            self.speed = {1: 2.0, 2: 1.0}[threads]
            return {"version": "7"}

        def generate(self, prompt, tokens, k):
            if prompt[0] == 13:
                raise RuntimeError("unlucky\\nsecond line")
            if prompt[0] == 14:
                sys.exit("fell over")
            if prompt[0] == 15:
                subprocess.run(["sleep", "600"])
            seconds = self.speed * (0.5 + (k - 4) ** 2 / 100 if k else 1) * tokens
            found = {"prefill_seconds": 1.0, "decode_seconds": seconds}
            return {"tokens": [t + prompt[0] for t in range(tokens)], **found}

    serve(Fake())
"""


@pytest.fixture
def fake(tmp_path):
    """The command of a worker, and its log."""
    path = tmp_path / "fake_worker.py"
    path.write_text(textwrap.dedent(FAKE))
    return [sys.executable, str(path)], tmp_path / "log.txt", {"PYTHONPATH": str(WORKERS)}


def loaded(peer="specedge", precision="fp32", draft=None, threads=1):
    return Loaded(peer, precision, draft, threads)


def run(setting, turn, prompt, seconds, tokens=(1, 2), **counts):
    return Run(setting, turn, prompt, tokens, 0.0, seconds, **counts)


class Answers:
    """A pool whose times are a function of the setting."""

    def __init__(self, seconds, tokens=lambda loaded, k: 0):
        self.seconds, self.tokens, self.asked = seconds, tokens, []

    def ask(self, loaded, prompt, tokens, k):
        self.asked.append((loaded, k))
        seconds = self.seconds(loaded, k)
        if seconds is None:
            raise WorkerError("has no such thing")
        ids = [self.tokens(loaded, k)] * tokens
        return {"tokens": ids, "prefill_seconds": 0.0, "decode_seconds": seconds}


def test_a_worker_answers_in_lines_whatever_its_library_prints(fake):
    with Worker(*fake) as worker:
        assert worker.ask("load", target="t", draft=None, threads=1)["version"] == "7"
        found = worker.ask("generate", prompt=[5], tokens=3, k=0)
        assert found["tokens"] == [5, 6, 7]
        assert found["decode_seconds"] == 6.0
        assert 1e6 < found["peak_bytes"] < 1e9
    assert "a library prints" in fake[1].read_text()
    assert "a child prints" in fake[1].read_text()


def test_a_failed_request_is_one_line_and_the_worker_goes_on(fake):
    with Worker(*fake) as worker:
        worker.ask("load", target="t", draft=None, threads=1)
        with pytest.raises(WorkerError, match=r"^RuntimeError: unlucky$"):
            worker.ask("generate", prompt=[13], tokens=3, k=0)
        assert worker.ask("generate", prompt=[5], tokens=1, k=0)["tokens"] == [5]
        with pytest.raises(WorkerError, match="unknown op other"):
            worker.ask("other")


def test_a_worker_that_ends_says_its_last_words(fake):
    with Worker(*fake) as worker:
        worker.ask("load", target="t", draft=None, threads=1)
        with pytest.raises(WorkerError, match="ended with 1: fell over"):
            worker.ask("generate", prompt=[14], tokens=3, k=0)


def test_a_worker_that_hangs_is_ended_with_what_it_started(fake):
    with Worker(*fake, patience=1.0) as worker:
        worker.ask("load", target="t", draft=None, threads=1)
        with pytest.raises(WorkerError, match=r"^no answer to generate in 1 seconds$"):
            worker.ask("generate", prompt=[15], tokens=3, k=0)
        group = str(worker._process.pid)
        assert [s for s in _stats() if s[4] == group and s[2] != "Z"] == []


def _stats():
    """The fields of every process's stat, by proc(5)."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            yield [*name.split("(", 1), *rest.split()]


def test_a_conversion_is_kept_until_its_source_changes(fake, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights").write_text("1")
    request = {"model": str(source), "precision": "int8", "cache": str(tmp_path / "cache")}
    with Worker(*fake) as worker:
        first = worker.ask("convert", **request)["target"]
        assert worker.ask("convert", **request)["target"] == first
        (source / "weights").write_text("12")
        assert worker.ask("convert", **request)["target"] != first
    assert not list((tmp_path / "cache").glob(".new*"))


class Started:
    """A worker for a pool."""

    def __init__(self, loaded, log):
        self.loaded, self.log = loaded, log
        log.append(("start", loaded.peer))

    def ask(self, op, **request):
        return {"tokens": [], "peak_bytes": 4.0}

    def close(self):
        self.log.append(("end", self.loaded.peer))


def test_a_pool_keeps_what_fits_and_ends_what_was_used_longest_ago():
    log = []
    pool = Pool(lambda one: (Started(one, log), {"seconds": 1}), lambda one: 3.0, 9.0)
    for name in ("a", "b", "a", "c", "a", "b"):
        pool.ask(loaded(name))
    pool.close()
    assert log == [
        ("start", "a"), ("start", "b"), ("end", "b"), ("start", "c"), ("end", "c"), ("start", "b"),
        ("end", "a"), ("end", "b"),
    ]  # fmt: skip
    assert len(pool.answers[loaded("b")]) == 2
    assert pool.peak_bytes(loaded("a")) == 4.0


def test_a_sweep_takes_the_best_threads_and_then_drafts_and_k():
    def seconds(one, k):
        if k == 0:
            return 1.0 / one.threads
        return None if one.draft_precision == "int4" and k == 6 else 1 / k

    pool = Answers(seconds)
    tried = sweep(pool, "genai", "fp32", ["fp32", "int4"], [[1]], 5, [1, 2], [2, 4, 6])
    assert len(tried) == 2 + 2 * 3
    assert {one.setting.loaded.threads for one in tried[2:]} == {2}
    assert best(tried[:2]) == Setting(loaded("genai", threads=2), 0)
    assert best(tried[2:]) == Setting(loaded("genai", draft="fp32", threads=2), 6)
    assert [one.reason for one in tried if one.seconds is None] == ["has no such thing"]


def test_without_plain_decoding_no_draft_is_tried():
    tried = sweep(Answers(lambda one, k: None), "genai", "fp32", ["fp32"], [[1]], 5, [1], [2])
    assert [one.seconds for one in tried] == [None]
    assert best(tried) is None
    assert best([]) is None


def test_every_round_has_every_setting_and_begins_with_another():
    settings = [Setting(loaded(name), 0) for name in "abc"]
    pool = Answers(lambda one, k: None if one.peer == "c" else 1.0)
    *early, (runs, failed) = in_turn(pool, settings, [[1], [2]], 5, 3)
    assert len(early) == 2
    assert [one.peer for one, _ in pool.asked] == list("aabbcbbaaaabb")
    assert len(runs) == 3 * 2 * 2
    assert failed == {settings[2]: "has no such thing"}


def test_a_text_of_another_length_is_no_measurement():
    pool = Answers(lambda one, k: 1.0)
    pool.ask = lambda *_, **__: {"tokens": [1], "prefill_seconds": 0, "decode_seconds": 0}
    with pytest.raises(WorkerError, match="gave 1 tokens of 5"):
        generate(pool, Setting(loaded(), 0), (0, 0), [1], 5)


OURS, OURS_DRAFT = Setting(loaded(), 0), Setting(loaded(draft="int8"), 4)
THEIRS, THEIRS_DRAFT = Setting(loaded("genai"), 0), Setting(loaded("genai", draft="fp32"), 2)
RUNS = [
    *(run(OURS, turn, p, 4.0 + turn) for turn in range(3) for p in range(2)),
    *(run(OURS_DRAFT, turn, p, 2.0, accepted=3, drafted=4) for turn in range(3) for p in range(2)),
    *(run(THEIRS, turn, p, 8.0 + 2 * turn) for turn in range(3) for p in range(2)),
    *(run(THEIRS_DRAFT, turn, 0, 3.0) for turn in range(3)),
    *(run(THEIRS_DRAFT, turn, 1, 3.0, tokens=(1, 3)) for turn in range(3)),
]


def test_figures_are_of_rounds_and_ratios_of_runs_beside_each_other():
    plain = row(THEIRS, RUNS, 2.0, 3e9, "0.18")
    assert (plain.min_ms, plain.median_ms) == (4000, 5000)
    assert (plain.load_seconds, plain.memory_gb) == (2.0, 3.0)
    assert plain.times_ours == 2.0
    assert plain.speedup == 1.0
    ours = row(OURS_DRAFT, RUNS, 2.0, 3e9, "1")
    assert ours.speedup == 2.5
    assert ours.accepted == 0.75
    assert row(THEIRS_DRAFT, RUNS, 1, 1, "").times_ours == 1.5
    assert row(THEIRS_DRAFT, RUNS, 1, 1, "").accepted is None


def test_texts_are_compared_prompt_by_prompt():
    found = row(THEIRS_DRAFT, RUNS, 1, 1, "")
    assert (found.same_as_plain, found.same_as_ours) == ("1/2", "1/2")
    alone = row(THEIRS, [one for one in RUNS if one.setting == THEIRS], 1, 1, "")
    assert (alone.same_as_plain, alone.same_as_ours) == ("2/2", "")
    assert alone.times_ours is None


def test_the_table_lists_what_could_not_be_measured_with_its_reason():
    rows = [row(OURS, RUNS, 2.0, 3e9, "1"), row(THEIRS_DRAFT, RUNS, 2.0, 3e9, "2")]
    rows.append(compare.Row("llamacpp", "fp32", "plain", "not built: a|b"))
    lines = table(rows).splitlines()
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1
    assert "| 2000.0 (2500.0) |" in lines[2]
    assert "not built: a/b" in lines[4]
    drawn = picture(rows, "A pair")
    assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "llama" not in drawn
    assert "ORT GenAI fp32" in drawn


def test_a_peer_that_cannot_be_installed_says_why(tmp_path, monkeypatch):
    class Peerless(Peer):
        requirements = worker = tmp_path / "peerless.txt"

    Peerless.requirements.write_text("# without: pip\n")
    peer = Peerless("peerless", "Peerless", ("fp32",))
    made = []

    def create(folder, with_pip):
        made.append(folder)
        (folder / "bin").mkdir(parents=True)
        script = folder / "bin" / "python"
        script.write_text(
            f"#!/bin/sh\nif test -e {tmp_path}/broken; then echo no wheel >&2; exit 1; fi\n"
        )
        script.chmod(0o755)

    monkeypatch.setattr(environments.venv, "create", create)
    (tmp_path / "broken").touch()
    with pytest.raises(UnavailableError, match="not installed: no wheel"):
        environments.python_of(peer, tmp_path, {})
    (tmp_path / "broken").unlink()
    python = environments.python_of(peer, tmp_path, {})
    assert environments.python_of(peer, tmp_path, {}) == python
    assert len(made) == 2
    assert environments.python_of(peer, tmp_path, {"peerless": "/other"}) == "/other"


def test_a_build_that_is_not_named_and_a_precision_without_conversion_are_reasons(
    tmp_path, monkeypatch
):
    given = {"llamacpp": "/usr/bin/python"}
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    with pytest.raises(UnavailableError, match="not built: LLAMA_CPP names no folder"):
        environments.python_of(PEERS["llamacpp"], tmp_path, given)
    monkeypatch.setenv("LLAMA_CPP", "/built")
    assert environments.python_of(PEERS["llamacpp"], tmp_path, given) == "/usr/bin/python"
    with pytest.raises(UnavailableError, match="int8 is not measured"):
        environments.check_precision(PEERS["transformers"], "int8")
    environments.check_precision(PEERS["specedge"], "int8-block")
    assert environments.python_of(PEERS["specedge"], tmp_path, {}) == sys.executable


def test_the_whole_comparison_with_two_fakes(fake, tmp_path, monkeypatch):
    class Fake(Peer):
        worker = Path(fake[0][1])

    peers = {
        "specedge": Fake("specedge", "specedge", (), own_environment=False),
        "genai": Fake("genai", "ORT GenAI", ("fp32", "int5"), own_environment=False),
        "llamacpp": Peer("llamacpp", "llama.cpp", ("fp32",), variable="NO_SUCH_VARIABLE"),
    }
    for name, peer in peers.items():
        monkeypatch.setitem(PEERS, name, peer)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def f"}\n{"prompt": "class C"}\n')
    folder = tmp_path / "out"
    arguments = [str(PYTHON_1M), str(PYTHON_1M), "--prompts", str(prompts), "--output", str(folder)]
    arguments += [
        "--precision",
        "fp32,int8,int5",
        "--peers",
        "specedge,genai,llamacpp",
        "--tokens",
        "4",
    ]
    result = CliRunner().invoke(compare.main, [*arguments, "--cache", str(tmp_path / "cache")])
    assert result.exit_code == 0, result.output
    figures = json.loads((folder / "figures.json").read_text())
    rows = {(r["peer"], r["precision"], r["mode"]): r for r in figures["rows"]}
    assert len(rows) == len(figures["rows"]) == 3 * 3 * 2
    best_row = rows["genai", "fp32", "draft"]
    assert (best_row["k"], best_row["threads"]) == (4, 2)
    assert best_row["speedup"] == pytest.approx((1 + 4) / (1 + 2))
    assert best_row["same_as_ours"] == "2/2"
    assert rows["genai", "int8", "plain"]["reason"].startswith("int8 is not measured")
    reason = "not converted: ValueError: five bits"
    assert rows["genai", "int5", "plain"]["reason"] == reason
    assert "ORT GenAI fp32 with a draft in int8: int8 is not measured" in figures["notes"][0]
    assert rows["llamacpp", "fp32", "draft"]["reason"].startswith("not built")
    assert rows["specedge", "int8", "plain"]["min_ms"] == pytest.approx(1250)
    assert "NO_SUCH_VARIABLE" in (folder / "table.md").read_text()
    assert "<svg" in (folder / "picture.svg").read_text()


def test_a_draft_precision_may_be_one_librarys_alone():
    drafts = ["int8", "genai:int4", "openvino:int8-block"]
    plan = compare.Plan([], [], drafts, [], [], 0, 0)
    assert plan.drafts_of("genai") == ["int8", "int4"]
    assert plan.drafts_of("specedge") == ["int8"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--peers", "other"], "no peer other; there are specedge, transformers"),
        (["-k", "0,2"], "give whole numbers from 1"),
        (["--threads", "a"], "give whole numbers with commas between them"),
        ([], "has no prompts"),
    ],
)
def test_mistakes_are_told_before_anything_runs(change, message, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("")
    arguments = [str(PYTHON_1M), str(PYTHON_1M), "--prompts", str(prompts)]
    result = CliRunner().invoke(
        compare.main, [*arguments, "--output", str(tmp_path / "o"), *change]
    )
    assert result.exit_code == 2
    assert message in result.output


def test_failed_settings_are_not_the_best():
    setting = Setting(loaded(), 0)
    assert best([Tried(setting, None, "no"), Tried(setting, 1.0)]) == setting
