"""Vocabularies of GGUF files that are made of the embedded tokenizer, and digests of their ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[1] / "models" / "embedded" / "tokenizer.json"
CONTROL, USER_DEFINED, BYTE, UNKNOWN, NORMAL = 3, 4, 6, 2, 1
ADDED = {"<|im_start|>": CONTROL, "<|im_end|>": NORMAL, "<think>": USER_DEFINED,
         "   ": USER_DEFINED, "<s>": CONTROL}  # fmt: skip
LINES_PER_DIGEST = 500


def byte_level(pre: str | None) -> dict[str, Any]:
    """Header fields of a byte-level BPE vocabulary with a pre-tokenizer."""
    model = json.loads(TOKENIZER.read_text("utf-8"))["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    types = [CONTROL if token.startswith("<|") else NORMAL for token in tokens]
    new = [token for token in ADDED if token not in tokens]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, *new],
        "tokenizer.ggml.token_type": [*types, *(ADDED[token] for token in new)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens) + new.index("<s>"),
        "tokenizer.ggml.eos_token_id": 0,
    }
    return fields | ({} if pre is None else {"tokenizer.ggml.pre": pre})


def sentencepiece(adds_space: bool) -> dict[str, Any]:
    """Header fields of a SentencePiece vocabulary: the texts among the byte-level tokens."""
    byte_of = dict(_spelled_bytes())
    model = json.loads(TOKENIZER.read_text("utf-8"))["model"]
    texts = []
    for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1]):
        if set(token) <= byte_of.keys():
            content = bytes(byte_of[c] for c in token)
            text = content.decode("utf-8", "ignore")
            if text.encode("utf-8") == content:
                texts.append(text.replace(" ", "\u2581"))
    texts += [c for c in "üéßПриветαあ世界한\u2581" if c not in texts]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    texts = [text for text in dict.fromkeys(texts) if text not in tokens]
    added = {token: type_ for token, type_ in ADDED.items() if token not in (*tokens, *texts)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*tokens, *texts, *added],
        "tokenizer.ggml.token_type": [*types, *[NORMAL] * len(texts), *added.values()],
        "tokenizer.ggml.scores": [
            *[0.0] * len(tokens), *(-float(i) for i in range(len(texts))), *[0.0] * len(added),
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": adds_space,
    }  # fmt: skip


def digests(ids: Iterable[Sequence[int]]) -> list[str]:
    """Return a short digest of the ids of every 500 lines."""
    rows = [list(row) for row in ids]
    parts = (rows[at : at + LINES_PER_DIGEST] for at in range(0, len(rows), LINES_PER_DIGEST))
    return [hashlib.sha256(json.dumps(part).encode()).hexdigest()[:12] for part in parts]


def _spelled_bytes() -> Iterator[tuple[str, int]]:
    """Yield the characters that byte-level BPE spells bytes with (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [i for i in range(256) if i not in shown]
    yield from ((chr(i), i) for i in shown)
    yield from ((chr(256 + j), i) for j, i in enumerate(hidden))
