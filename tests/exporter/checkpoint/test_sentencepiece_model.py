"""Checkpoints with tokenizer.model, and without tokenizer.json."""

import argparse
import inspect
import io
import json
import sys

import pytest
import transformers
from formats import refusal

from checkpoints import make_config, make_model, make_tokenizer
from specedge.errors import MissingExtraError
from specedge.exporter.checkpoint import checkpoints

sentencepiece = pytest.importorskip("sentencepiece", reason="needs the export extra")
TEXT = "The quick brown fox reads x = f(12)."


def train(folder, kind="bpe", **options):
    """Write a tokenizer.model with byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(inspect.getsource(argparse).splitlines()),
        model_writer=model,
        model_type=kind,
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture
def folder(tmp_path):
    """A checkpoint without a tokenizer."""
    make_model(make_config("llama", vocab_size=400)).save_pretrained(tmp_path)
    return tmp_path


def state_class(folder, name, **options):
    text = json.dumps({"tokenizer_class": name, **options})
    (folder / "tokenizer_config.json").write_text(text, "utf-8")


@pytest.mark.parametrize("adds_space", [True, False])
def test_tokens_are_those_of_sentencepiece(adds_space, folder):
    processor = train(folder, add_dummy_prefix=adds_space)
    if adds_space:
        state_class(folder, "LlamaTokenizer")
    tokenizer = checkpoints.find("target", str(folder), None).tokenizer
    assert tokenizer.encode(TEXT, add_special_tokens=False) == processor.encode(TEXT)


@pytest.mark.parametrize("name", ["GemmaTokenizer", "LlamaTokenizer"])
def test_conversion_to_other_tokens_is_refused_with_cure(name, folder):
    """Gemma's class adds no space, and Llama's reads a unigram model as BPE."""
    train(folder, "unigram")
    state_class(folder, name)
    message = refusal(folder)
    assert "its SentencePiece model as [" in message
    assert "put its tokenizer.json next to config.json" in message


def test_space_that_the_config_states_is_not_compared(folder):
    train(folder)
    state_class(folder, "LlamaTokenizer", add_prefix_space=False)
    checkpoints.find("target", str(folder), None)


def test_first_space_is_not_lost_without_tokenizer_config(folder):
    processor = train(folder)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        assert "with its tokenizer_class" in refusal(folder)
        return
    tokenizer = checkpoints.find("target", str(folder), None).tokenizer
    assert tokenizer.encode(TEXT, add_special_tokens=False) == processor.encode(TEXT)


def test_missing_package_is_named(folder, monkeypatch):
    train(folder)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match="requires: pip install sentencepiece"):
        checkpoints.find("target", str(folder), None)


def test_model_is_not_read_beside_tokenizer_json(folder, monkeypatch):
    make_tokenizer(folder, 400)
    (folder / "tokenizer.model").write_bytes(b"damaged")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    checkpoints.find("target", str(folder), None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"damaged", "its tokenizer.model is neither a SentencePiece nor a tiktoken file"),
        (b"IQ== 0\nIg== 1\n", "its tokenizer cannot be read"),
    ],
)
def test_file_that_is_no_sentencepiece_model_is_refused(content, message, folder):
    (folder / "tokenizer.model").write_bytes(content)
    assert message in refusal(folder)
