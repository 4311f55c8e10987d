"""Tokenizers of GGUF files give llama.cpp's ids (`tools/gguf_tokenizer_vectors.py`)."""

import json
from pathlib import Path

import pytest

from cases import exhaustive
from gguf_vocabularies import LINES_PER_DIGEST, byte_level, digests, sentencepiece
from specedge.errors import CheckpointError
from specedge.exporter.checkpoint import gguf_tokenizer
from tokenizer_lines import COUNT, lines

VECTORS = json.loads(Path(__file__).with_name("gguf_tokenizer_vectors.json").read_text("utf-8"))


QUICK_COUNT = 500  # lines; all of them are exhaustive


@pytest.fixture(scope="module", params=[QUICK_COUNT, exhaustive(COUNT)])
def texts(request):
    return lines(request.param)


def ids(tokenizer, texts):
    return [row.ids for row in tokenizer.backend_tokenizer.encode_batch(texts)]


def check(fields, expected, texts):
    tokenizer = gguf_tokenizer.build_tokenizer("target a", fields)
    actual = digests(ids(tokenizer, texts))
    assert actual == expected[: len(actual)]
    assert len(actual) * LINES_PER_DIGEST == len(texts)


@pytest.mark.parametrize("name", gguf_tokenizer.PRE_TOKENIZERS)
def test_byte_level_ids_equal_llama_cpp(name, texts):
    check(byte_level(name), VECTORS["gpt2"][name], texts)


@pytest.mark.parametrize("name", ["prefix", "plain"])
def test_sentencepiece_ids_equal_llama_cpp(name, texts):
    check(sentencepiece(name == "prefix"), VECTORS["llama"][name], texts)


@pytest.mark.parametrize("fields", [byte_level("smollm"), sentencepiece(True)])
def test_tokenizer_round_trip(fields):
    tokenizer = gguf_tokenizer.build_tokenizer("target a", fields)
    for text in ("a  b\n\tc 12", "Grüße, 你好 👩‍🚀"):
        encoded = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.backend_tokenizer.decode(encoded, skip_special_tokens=False)
        assert decoded == text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokenizer.ggml.pre": "of-tomorrow"}, "pre-tokenizer 'of-tomorrow' is not supported"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "has no vocabulary"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "a token twice"),
        ({"tokenizer.ggml.token_type": [1]}, "lacks types or scores"),
    ],
)
def test_unverifiable_tokenizer_is_rejected_by_name(change, said):
    with pytest.raises(CheckpointError, match=said):
        gguf_tokenizer.build_tokenizer("target a", byte_level("smollm") | change)


def test_end_tokens_include_end_of_turn():
    fields = byte_level("smollm")
    tokens = fields["tokenizer.ggml.tokens"]
    assert gguf_tokenizer.end_tokens(fields) == [0, tokens.index("<|im_end|>")]


def test_named_chat_template_is_used_without_a_default():
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "b"}
    assert gguf_tokenizer.chat_template(named) == "b"
    assert gguf_tokenizer.chat_template(named | {"tokenizer.chat_template": "a"}) == "a"
    assert gguf_tokenizer.chat_template({}) is None
