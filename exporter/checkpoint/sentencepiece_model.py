"""Comparison of a tokenizer that transformers converts from a SentencePiece model with the model.

transformers before 5.24 converts a model without tokenizer_config.json to one that adds no space to
the start of a text, and any version converts by the class of the config, not by the model's kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import transformers

from specedge.errors import CheckpointError, MissingExtraError

from . import folders

FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s")  # a token in base64, and its rank
SAMPLES = ("The quick brown fox", "def f(x): return x + 12", "a")


def find(where: str, folder: Path, files: Collection[str]) -> Any | None:
    """Return the processor of the model that a folder's tokenizer is converted from, if any.

    Raises:
        CheckpointError: The file is damaged.
        MissingExtraError: sentencepiece is not installed.
    """
    name = next((name for name in FILES if name in files), None)
    if name is None or "tokenizer.json" in files:
        return None
    try:
        import sentencepiece
    except ImportError as error:
        raise MissingExtraError(
            f"{where} has a {name}, which requires: pip install sentencepiece"
        ) from error
    path = folder / name
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        if path.is_file() and _TIKTOKEN.match(path.read_bytes()):
            return None
        raise CheckpointError(
            f"{where}: its {name} is neither a SentencePiece nor a tiktoken file; download it again"
        ) from error


def check(where: str, folder: Path, processor: Any, tokenizer: Any) -> None:
    """Compare the pieces of a few texts. Raises CheckpointError if they differ.

    A config with `add_prefix_space` may deviate from the model.
    """
    config = folders.read_json_object(where, folder / "tokenizer_config.json")
    if config.get("add_prefix_space") is not None:
        return
    unknown = processor.id_to_piece(processor.unk_id())
    for text in SAMPLES:
        expected = [processor.id_to_piece(i) for i in processor.encode(text)]
        tokens = tokenizer.tokenize(text)
        actual = [unknown if token == tokenizer.unk_token else token for token in tokens]
        if actual != expected:
            shown = [json.dumps(pieces[:4], ensure_ascii=False) for pieces in (actual, expected)]
            raise CheckpointError(
                f"{where}: transformers {transformers.__version__} tokenizes {text!r} as "
                f"{shown[0]}, its SentencePiece model as {shown[1]}; put its tokenizer.json next "
                "to config.json, or a tokenizer_config.json with its tokenizer_class, such as "
                "LlamaTokenizer"
            )
