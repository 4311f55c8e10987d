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
from processes import Loaded, Pool, Worker, WorkerError

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
        pool.ask(Loaded(name, "fp32", None, 1))
    pool.close()
    assert log == [
        ("start", "a"), ("start", "b"), ("end", "b"), ("start", "c"), ("end", "c"), ("start", "b"),
        ("end", "a"), ("end", "b"),
    ]  # fmt: skip
    assert len(pool.answers[Loaded("b", "fp32", None, 1)]) == 2
    assert pool.peak_bytes(Loaded("a", "fp32", None, 1)) == 4.0


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
