"""N-gram tables as a user builds and names them."""

import json
import os

import numpy as np
import pytest

from specedge.bundle import store
from specedge.runtime.drafters import ngram_files
from test_cli import run

PROMPT = "def read_config(path):"
WORDS = "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 2


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text(WORDS, "utf-8")
    return path


def test_tables_are_built_from_text_and_draft(tmp_path, words, pipeline):
    output = tmp_path / "words.npz"
    built = run("ngram", "build", words, "-", "--output", output, stdin="\ufeffimport os\n" * 9)
    assert (built.returncode, built.stdout) == (0, "")
    assert "tokens: " in built.stderr
    assert len(built.stderr.splitlines()) == 1
    made = run("generate", PROMPT, "-n", 30, "-k", 4, "--drafter", f"ngram:{output}", "--json")
    found = json.loads(made.stdout)
    assert found["tokens"] == pipeline.generate(PROMPT, 30).tokens
    assert found["drafter"] == "ngram"
    assert found["stats"]["drafted_by_source"] == {"ngram": found["stats"]["num_drafted"]}
    assert ", drafter ngram," in made.stderr
    texts = [pipeline.tokenizer.encode(text).ids for text in (WORDS, "import os\n\ufeff" * 9)]
    read = ngram_files.read(output, pipeline.bundle)
    assert read.unigrams.sum() == len(texts[0]) + len(
        pipeline.tokenizer.encode(("\ufeffimport os\n" * 9)[1:]).ids
    )


def test_the_order_and_the_bundle_are_options(tmp_path, words, pipeline):
    output = tmp_path / "t"
    arguments = ["--order", 2, "--bundle", store.embedded_folder(), "--output", output]
    assert run("ngram", "build", words, *arguments).returncode == 0
    read = ngram_files.read(output, pipeline.bundle)
    assert len(read.pair_tokens) > 0 == len(read.triple_tokens)


def test_output_that_is_not_a_regular_file_is_rejected(tmp_path, words):
    os.mkfifo(tmp_path / "pipe")
    result = run("ngram", "build", words, "--output", tmp_path / "pipe", "--overwrite")
    assert result.returncode != 0
    assert "is not a regular file" in result.stderr
    assert (tmp_path / "pipe").is_fifo()


def test_existing_file_requires_overwrite(tmp_path, words):
    output = tmp_path / "out.npz"
    output.write_text("mine")
    refused = run("ngram", "build", words, "--output", output)
    assert (refused.returncode, output.read_text()) == (1, "mine")
    assert "--overwrite" in refused.stderr
    assert run("ngram", "build", words, "--output", output, "--overwrite").returncode == 0
    assert np.load(output)["format"] == [1]
