"""The comparison with other libraries, with workers that only pretend to generate."""

import json
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import environments
import quality
import reference
from environments import PEERS, Peer, UnavailableError
from processes import Worker, WorkerError
from specedge.exporter.quantization import texts

WORKERS = Path(environments.__file__).parent / "workers"
FAKE = """
    import os, subprocess, sys
    import numpy as np
    from serving import cached, serve

    class Fake:
        def convert(self, gguf, checkpoint, precision, cache):
            return cached(cache, gguf, "fake-" + precision, lambda folder: folder.mkdir())

        def num_bytes(self, model):
            return 7

        def load(self, model, threads):
            print("a library prints")
            os.system("echo a child prints")
            return "7"

        def generate(self, prompt, tokens, k):
            if prompt[0] == 13:
                raise RuntimeError("unlucky\\nsecond line")
            if prompt[0] == 14:
                sys.exit("fell over")
            if prompt[0] == 15:
                subprocess.run(["sleep", "600"])
            times = {"prefill_seconds": 1.0, "decode_seconds": 2.0 * tokens}
            return {"tokens": [t + prompt[0] for t in range(tokens)], **times}

        def prefill(self, tokens):
            self.length = len(tokens)

        def run_pass(self, tokens):
            assert self.length == 3

        def logits(self, tokens):
            return np.zeros((len(tokens), 4))

    serve(Fake())
"""


@pytest.fixture
def fake(tmp_path):
    """The command of a worker, its log and its environment."""
    path = tmp_path / "fake_worker.py"
    path.write_text(textwrap.dedent(FAKE))
    return [sys.executable, str(path)], tmp_path / "log.txt", {"PYTHONPATH": str(WORKERS)}


def test_worker_answers_in_lines_whatever_its_library_prints(fake):
    with Worker(*fake) as worker:
        assert worker.ask("load", model="m", threads=1)["version"] == "7"
        answer = worker.ask("generate", prompt=[5], tokens=3, k=0)
        assert answer["tokens"] == [5, 6, 7]
        assert answer["decode_seconds"] == 6.0
        assert 1e6 < answer["peak_bytes"] < 1e9
        times = worker.ask("passes", prompt=[1, 2, 3], lengths=[1, 2], repeats=4)
        assert [len(one) for one in times["seconds_by_length"]] == [4, 4]
    assert "a library prints" in fake[1].read_text()
    assert "a child prints" in fake[1].read_text()


def test_failed_request_is_one_line_and_the_worker_goes_on(fake):
    with Worker(*fake) as worker:
        with pytest.raises(WorkerError, match=r"^RuntimeError: unlucky$"):
            worker.ask("generate", prompt=[13], tokens=3, k=0)
        assert worker.ask("generate", prompt=[5], tokens=1, k=0)["tokens"] == [5]
        with pytest.raises(WorkerError, match="unknown op other"):
            worker.ask("other")


def test_worker_that_ends_reports_its_last_words(fake):
    with Worker(*fake) as worker, pytest.raises(WorkerError, match="ended with 1: fell over"):
        worker.ask("generate", prompt=[14], tokens=3, k=0)


def test_worker_that_hangs_is_ended_with_what_it_started(fake):
    with Worker(*fake, patience=1.0) as worker:
        with pytest.raises(WorkerError, match=r"^no answer to generate in 1 seconds$"):
            worker.ask("generate", prompt=[15], tokens=3, k=0)
        group = str(worker._process.pid)
        assert [s for s in _stats() if s[4] == group and s[2] != "Z"] == []


def _stats():
    """Yield the fields of every process's stat, by proc(5)."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            yield [*name.split("(", 1), *rest.split()]


def test_conversion_is_kept_until_its_source_changes(fake, tmp_path):
    source = tmp_path / "weights.gguf"
    source.write_text("1")
    request = {"gguf": str(source), "checkpoint": "", "precision": "int8"}
    request["cache"] = str(tmp_path / "cache")
    with Worker(*fake) as worker:
        first = worker.ask("convert", **request)
        assert first["bytes"] == 7
        assert worker.ask("convert", **request)["model"] == first["model"]
        source.write_text("12")
        assert worker.ask("convert", **request)["model"] != first["model"]
    assert not list((tmp_path / "cache").glob(".new*"))


def test_library_that_cannot_be_installed_reports_why(tmp_path, monkeypatch):
    class Peerless(Peer):
        requirements = worker = tmp_path / "peerless.txt"

    Peerless.requirements.write_text("# without: pip\n")
    peer = Peerless("peerless", "Peerless", ("int8",))
    created = []

    def create(folder, with_pip):
        created.append(folder)
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
    assert len(created) == 2
    assert environments.python_of(peer, tmp_path, {"peerless": "/other"}) == "/other"
    assert environments.python_of(PEERS["specedge"], tmp_path, {}) == sys.executable


def test_quality_of_the_reference_itself_and_of_a_known_distribution(tmp_path):
    """KL, agreement and perplexity by their definitions, on distributions of two tokens."""
    windows = tmp_path / "windows.json"
    windows.write_text(json.dumps({"prose": [[0, 1, 0, 1], [1, 1, 0, 0]]}))
    even, uneven = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])

    def logits(row):
        return lambda tokens: np.repeat(row, len(tokens), 0) + 3.0  # a constant changes nothing

    quality.write_reference(logits(uneven), windows, tmp_path / "reference")
    own, other = (
        quality.measure(logits(row), str(windows), str(tmp_path / "reference"))["texts"]["prose"]
        for row in (uneven, even)
    )
    assert own["tokens"] == 6
    assert own["kl"] == pytest.approx(0, abs=1e-4)
    assert own["top1"] == other["top1"] == 1
    perplexity = (0.9**3 * 0.1**3) ** (-1 / 6)
    assert own["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert own["reference_perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert other["perplexity"] == pytest.approx(2)
    kl = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    assert other["kl"] == pytest.approx(kl, rel=1e-3)
    swapped = quality.measure(logits(uneven[:, ::-1]), str(windows), str(tmp_path / "reference"))
    assert swapped["texts"]["prose"]["top1"] == 0


def test_windows_begin_with_bos_and_never_fall_short():
    windows = reference.cut("prose", range(1000, 10_000), [2])
    assert [window[:2] for window in windows[:2]] == [[2, 1000], [2, 1511]]
    assert {len(window) for window in windows} == {512}
    with pytest.raises(ValueError, match="prose has 2559 tokens; 2560 are needed"):
        reference.cut("prose", range(2559), [])
    assert 512 * sum(reference.NUM_WINDOWS.values()) >= 10_000


def test_held_out_text_is_not_in_the_calibration_text():
    """No text of the comparison shares 80 characters with a text that the exporter comes with."""
    folder = Path(texts.__file__).parent
    calibration = " ".join(_words(path.read_text("utf-8")) for path in _calibration(folder))
    held_out = [path.read_text("utf-8") for path in reference.TEXTS.glob("*.*")]
    for text in map(_words, [*held_out, reference.code()]):
        assert len(text) > 80
        assert not [i for i in range(0, len(text) - 80, 40) if text[i : i + 80] in calibration]


def _calibration(folder):
    return [path for path in folder.rglob("*.txt") if not path.name.startswith("evaluation")]


def _words(text):
    return " ".join(text.split())
