"""Tokenizer graphs for ONNX Runtime Extensions, written only if they are exact.

The library's own implementation of `tokenizer.json` ignores some features. Its results for
difficult texts and for every token are therefore compared with those of the tokenizers library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from tokenizers import Tokenizer

from ..verification.subgraph import open_session

DOMAIN = "ai.onnx.contrib"
IR_VERSION, OPSET = 8, 17
# Spaces, digits, composed and decomposed accents, scripts, emoji and control characters.
HARD_TEXTS = (
    "def read_config(path):\n    return {x: [1, 2]}\n\n\n",
    "The quick brown fox, 1234567890 times! It's they've I'd WE'LL you're 's 't",
    " a", "a ", "  a  b  ", "\t\tx", "\r\n", "   \n  z", "\n" * 20, " " * 50, "x" * 300,
    "ab " * 100,
    "a\u00a0b \u2003c\u200bd\u2028e\u3000f", "\ufeffbom", "\x01\x7f\x85\x1c \x1f",
    "3.14 1,234 ²³¹ Ⅷ ½ ٣٤ x₁ ㊿ 𝟘𝟙", "a-b--c _d_ !!! … «» #hash @at C++ / C# $100 €5 a<b {}[]()<>",
    "e\u0301 é ﬁ Å A\u030a ß ẞ İi ǅ ª ʰ ﷺ 가 \u1100\u1161",
    "😀 👍🏽 👨‍👩‍👧‍👦 🇫🇷🇯🇵 🏳️‍🌈 a😀b ❤️ ☃",
    "Привет שלום مرحبا हिन्दी ไทยภาษา 한국어 日本語のテキスト 中文，標點。 ｶﾅ 𠮷野家 𝓗𝓮𝓵𝓵𝓸",
    "\U0010ffff \ud7ff\ue000 a\u0378b \u0e33 http://a.b/c?d=e&f=%20 for (int i=0;i<10;++i){ }",
)  # fmt: skip
_LONG = 100_000  # characters
_BATCH = 256  # tokens


def tokenizer_graphs(tokenizer_file: Path) -> dict[str, ir.Model] | str:
    """Return the `encode` and `decode` graphs of a tokenizer, or the reason why there are none."""
    try:
        import onnxruntime_extensions as extensions
    except ImportError:
        return "onnxruntime-extensions is not installed; pip install 'specedge[hosts]'"
    text = tokenizer_file.read_text("utf-8")
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = json.loads(text)
    # The library's vocabulary has one token per line.
    tokens = [tokenizer.id_to_token(i) or "\n" for i in range(tokenizer.get_vocab_size())]
    if settings["model"]["type"] != "BPE" or not _is_byte_level(settings):
        return "the tokenizer is not a byte-level BPE"
    if any("\n" in token for token in tokens):
        return "the tokenizer has ids without a token, or a token with a line break"
    special = {token["id"] for token in settings["added_tokens"] if token["special"]}
    models = {"encode": _encoder(settings), "decode": _decoder(settings, tokens, special)}
    sessions = {name: _open(model, extensions.get_library_path()) for name, model in models.items()}
    # Text of a user that spells a special token is encoded as text.
    tokenizer.encode_special_tokens = True
    added = [token["content"] for token in settings["added_tokens"]]
    return _find_difference(tokenizer, sessions["encode"], sessions["decode"], added) or models


def _open(model: ir.Model, library: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.register_custom_ops_library(library)
    return open_session(ir.to_proto(model).SerializeToString(), options)


def _is_byte_level(settings: dict[str, Any]) -> bool:
    """Return True if decoding only concatenates tokens whose characters represent bytes."""
    return (settings.get("decoder") or {}).get("type") == "ByteLevel"


def _encoder(settings: dict[str, Any]) -> ir.Model:
    """Build the encoder: text [1] -> tokens [1, N], without added tokens.

    With added tokens the library drops the end of a text that is a prefix of one.
    """
    plain = json.dumps(settings | {"added_tokens": []}, ensure_ascii=False)
    config = json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    attributes = {"tokenizer_vocab": plain, "tokenizer_config": config}
    tokens = ir.val("tokens", ir.DataType.INT64, [1, "N"])
    return _single_node_model("HfJsonTokenizer", attributes, _text(), tokens)


def _decoder(settings: dict[str, Any], tokens: list[str], special: set[int]) -> ir.Model:
    """Build the decoder: tokens [N] -> text [1], without special tokens."""
    attributes = {
        "id_vocab": "\n".join(tokens),
        "byte_decoder": "\n".join(f"{ord(c)}\t{byte}" for byte, c in _byte_characters().items()),
        "added_tokens": "\n".join(f"{t['id']}\t{t['content']}" for t in settings["added_tokens"]),
        "all_special_ids": "\n".join(map(str, sorted(special))),
        "skip_special_tokens": 1,
    }
    ids = ir.val("tokens", ir.DataType.INT64, ["N"])
    return _single_node_model("BpeDecoder", attributes, ids, _text())


def _text() -> ir.Value:
    return ir.val("text", ir.DataType.STRING, [1])


def _single_node_model(
    op_type: str, attributes: dict[str, Any], value: ir.Value, output: ir.Value
) -> ir.Model:
    node = ir.node(op_type, [value], attributes, domain=DOMAIN, outputs=[output], name=op_type)
    opsets = {"": OPSET, DOMAIN: 1}
    graph = ir.Graph([value], [output], nodes=[node], opset_imports=opsets, name=output.name)
    return ir.Model(graph, ir_version=IR_VERSION)


def _byte_characters() -> dict[int, str]:
    """Return the character that represents each byte in byte-level BPE (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        b: chr(256 + i) for i, b in enumerate(unprintable)
    }


def _find_difference(
    tokenizer: Tokenizer,
    encode: ort.InferenceSession,
    decode: ort.InferenceSession,
    added: Iterable[str],
) -> str | None:
    """Describe the first text or token that the graphs convert differently; None if none."""
    long = "".join(HARD_TEXTS)
    long *= -(-_LONG // len(long))
    for text in (*HARD_TEXTS, *(f"a {token} b" for token in added), long):
        expected = tokenizer.encode(text).ids
        (actual,) = encode.run(None, {"text": np.array([text])})
        shown = text if len(text) < 60 else text[:57] + "..."
        if actual[0].tolist() != expected:
            return f"onnxruntime-extensions returns different tokens for {shown!a}"
        if _run_decoder(decode, expected) != tokenizer.decode(expected):
            return f"onnxruntime-extensions returns a different text for the tokens of {shown!a}"
    # tokenizers replaces incomplete characters by U+FFFD, the library keeps bytes and ends at NUL.
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())}
    whole = [i for i, text in texts.items() if not {"\ufffd", "\0"} & {*text}]
    for start in range(0, len(whole), _BATCH):
        tokens = whole[start : start + _BATCH]
        if _run_decoder(decode, tokens) != tokenizer.decode(tokens):
            return (
                "onnxruntime-extensions returns a different text for one of the tokens from "
                f"{tokens[0]} on"
            )
    return None


def _run_decoder(decode: ort.InferenceSession, tokens: list[int]) -> str:
    (text,) = decode.run(None, {"tokens": np.array(tokens, np.int64)})
    return str(text[0])
