"""The whole comparison with other libraries on a small GGUF file, with libraries that pretend."""

import json
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType

import compare
import ggufs
from environments import PEERS, Peer

FAKE = """
    import numpy as np
    from serving import cached, serve

    class Fake:
        def convert(self, gguf, checkpoint, precision, cache):
            def make(folder):
                if precision == "Q4_K_M":
                    raise ValueError("blocks of 256")
                folder.mkdir()
            return cached(cache, gguf, precision, make)

        def num_bytes(self, model):
            return 1_000_000

        def load(self, model, threads):
            return "7"

        def generate(self, prompt, tokens, k):
            seconds = tokens / 1000 * (1 if k else 2)
            return {"tokens": [1] * tokens, "prefill_seconds": 0.0, "decode_seconds": seconds}

        def prefill(self, tokens):
            pass

        def run_pass(self, tokens):
            pass

        def logits(self, tokens):
            return np.zeros((len(tokens), 4096))

    serve(Fake())
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of a small model, on which specedge and llama.cpp are pretended to run."""
    script = tmp_path / "fake_worker.py"
    script.write_text(textwrap.dedent(FAKE))

    class Fake(Peer):
        worker = script
        requirements = tmp_path / "none.txt"

    for name in ("openvino", "genai"):
        monkeypatch.delitem(PEERS, name)
    fakes = {"specedge": (("int8",), True), "llamacpp": (("Q8_0", "Q4_K_M"), False)}
    for name, (precisions, has_drafts) in fakes.items():
        monkeypatch.setitem(PEERS, name, Fake(name, PEERS[name].label, precisions, has_drafts))
    path = tmp_path / "weights" / "small.gguf"
    path.parent.mkdir()
    ggufs.write(path, GGMLQuantizationType.Q8_0, tmp_path, context=1024)
    return path


def test_comparison_measures_what_there_is_and_goes_on_where_it_ended(file, tmp_path):
    output = tmp_path / "out"
    arguments = [str(file), "--output", str(output), "--cache", str(tmp_path / "cache")]
    arguments += ["--peers", "specedge,llamacpp", "--tokens", "4", "--rounds", "2"]

    def run(*more):
        result = CliRunner().invoke(compare.main, [*arguments, *more])
        assert result.exit_code == 0, result.output
        (figures,) = json.loads((output / "figures.json").read_text())["models"]
        return figures

    figures = run("--steps", "convert,quality")
    ours, q8, q4 = figures["variants"].values()
    assert ours["quality"]["prose"]["tokens"] == 5 * 511
    assert ours["quality"] == q8["quality"]
    uniform = ours["quality"]["code"]
    assert uniform["perplexity"] == pytest.approx(512)  # the vocabulary, without padding
    assert uniform["kl"] > 0.01
    assert q4["reason"] == "not converted: ValueError: blocks of 256"
    figures = run("--steps", "time", "--minutes", "0")
    assert len(figures["rounds"]) == 1
    figures = run()
    assert len(figures["rounds"]) == 2
    page = (output / "README.md").read_text()
    assert "| specedge int8 drafted | 1.00 (1.00) |" in page
    assert "* llama.cpp Q4_K_M: not converted: ValueError: blocks of 256" in page
    assert str(Path.home()) not in page
    assert "specedge int8, KL" in (output / "chart.svg").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--steps", "convert,measure"], "no measure; there are convert, quality, time"),
        (["--python", "vllm=/usr/bin/python"], "no library vllm; there are specedge, llamacpp"),
    ],
)
def test_mistakes_are_told_before_anything_runs(file, change, message):
    result = CliRunner().invoke(compare.main, [str(file), "--peers", "specedge", *change])
    assert result.exit_code == 2
    assert message in result.output
