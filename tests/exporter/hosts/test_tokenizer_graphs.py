"""Graphs of text: only where they are the tokenizer, with the reason where they are not."""

import json

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from specedge.bundle import Bundle, store
from specedge.exporter.hosts.tokenizer_graphs import tokenizer_graphs
from specedge.exporter.verification.subgraph import open_session

extensions = pytest.importorskip("onnxruntime_extensions", reason="needs the hosts extra")
LINES = "def f(x):\n    return {'é': 1}  # <|endoftext|> 😀\n"


@pytest.fixture
def tokenizer():
    return Tokenizer.from_file(
        str(store.embedded_folder() / Bundle.read(store.embedded_folder()).tokenizer)
    )


def made(tokenizer, folder):
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return tokenizer_graphs(path)


def test_tokenizer_graphs_round_trip_text(tokenizer, tmp_path):
    options = ort.SessionOptions()
    options.register_custom_ops_library(extensions.get_library_path())
    encode, decode = (
        open_session(ir.to_proto(model).SerializeToString(), options)
        for model in made(tokenizer, tmp_path).values()
    )
    (tokens,) = encode.run(None, {"text": np.array([LINES])})
    tokenizer.encode_special_tokens = True
    assert tokens.tolist() == [tokenizer.encode(LINES).ids]
    (text,) = decode.run(None, {"tokens": tokens[0]})
    assert text.tolist() == [LINES]
    (text,) = decode.run(None, {"tokens": np.append(tokens[0], 0)})
    assert text.tolist() == [LINES]  # token 0 is special


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: setattr(t, "normalizer", normalizers.NFC()), "returns different tokens for"),
        (
            lambda t: setattr(t, "normalizer", normalizers.Lowercase()),
            "returns different tokens for",
        ),
        (lambda t: t.add_tokens([AddedToken("<think>", special=False)]), "'a <think> b'"),
    ],
    ids=["NFC", "lower case", "a token in any text"],
)
def test_tokenizer_that_differs_in_the_library_has_no_graphs(tokenizer, tmp_path, change, reason):
    change(tokenizer)
    assert reason in made(tokenizer, tmp_path)


def test_non_byte_level_tokenizer_has_no_graphs(tokenizer, tmp_path):
    settings = json.loads(tokenizer.to_str())
    settings["decoder"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings), "utf-8")
    assert tokenizer_graphs(tmp_path / "tokenizer.json") == "the tokenizer is not a byte-level BPE"
