"""Corpus and tokenizer of the embedded pair: CPython's standard library (PSF license)."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
PROMPT_LENGTH = 96
TABLES = ("encodings/cp", "encodings/mac_", "encodings/iso", "encodings/koi", "encodings/tis_",
          "encodings/hp_", "encodings/ptcp", "pydoc_data/", "_sysconfigdata", "lib2to3/tests/data",
          "site-packages/", "idlelib/idle_test/htest", "test/test_email/data")  # fmt: skip


def library_files() -> list[tuple[str, str]]:
    """Return the name and text of every module of the running Python's library, sorted by name.

    Tables, duplicates, and files that are not UTF-8 or have very long lines are excluded.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(table in name for table in TABLES):
            continue
        try:
            text = path.read_text("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip() and text not in seen and max(map(len, text.splitlines())) < 2000:
            seen.add(text)
            files.append((name, text))
    return files


def is_held_out(name: str) -> bool:
    """Return True for about one module in 37, by the hash of its name."""
    return hashlib.sha256(name.encode()).digest()[0] % 40 == 0


def held_out_prompts(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Yield the tokens up to the middle of each held-out module that is long enough."""
    for name, text in library_files():
        tokens = tokenizer.encode(text).ids if is_held_out(name) else []
        if len(tokens) >= 2 * PROMPT_LENGTH:
            end = len(tokens) // 2
            yield tokens[end - PROMPT_LENGTH : end]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer; id 0 is the end token, and every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
