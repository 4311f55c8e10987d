"""The texts that a quantization is calibrated with, and others that it is reported on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from specedge.errors import ExportError

from ..libraries import translate_errors

FOLDER = Path(__file__).with_name("text")
NAME = "specedge's own texts"
KINDS = ("prose", "code", "chat")
CALIBRATED, COMPARED = 256, 512  # tokens that are run together, after nothing
SMALL = 300_000_000  # parameters of models that are compared on all texts;
PIECES = {"calibration": 18, "evaluation": 3}  # for larger ones, so many pieces
MOST_PIECES = 36
LEAST = 32  # tokens
Turns = list[dict[str, str]]
Template = Callable[[Turns], str]


@dataclass(frozen=True)
class Texts:
    """Tokens of pieces for calibration and for the report, [T] each, and the text's name."""

    name: str
    calibration: list[np.ndarray]
    report: list[np.ndarray]


@dataclass(frozen=True)
class Source:
    """Documents to calibrate with and to compare on; those of a user's file are the same."""

    name: str
    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]

    @property
    def text(self) -> str:
        """All that may be chosen by."""
        return "\n\n".join(self.calibration)


def read(file: str | None) -> Source:
    """Read a user's text file, or the built-in texts. Raises ExportError."""
    if file is None:
        return Source(NAME, _built_in("calibration"), _built_in("evaluation"))
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    return Source(Path(file).name, (text,), (text,))


def _built_in(use: str) -> tuple[str, ...]:
    return tuple((FOLDER / f"{use}-{kind}.txt").read_text("utf-8") for kind in KINDS)


def cut(
    source: Source,
    tokenizer: Path,
    num_tokens: int,
    context: int,
    num_parameters: int,
    template: Template | None = None,
) -> Texts:
    """Return pieces for a model of `context` tokens whose first `num_tokens` ids are real.

    Each begins with the tokens that the tokenizer puts before a text. Chats are written with the
    model's `template` where it has one. Of a user's file every other piece is for the report.
    """
    encoder = Encoder(Tokenizer.from_file(str(tokenizer)), num_tokens, template)
    is_small = num_parameters <= SMALL
    numbers = {use: MOST_PIECES if is_small else count for use, count in PIECES.items()}
    if source.calibration == source.evaluation:
        (text,) = source.calibration
        size = min(CALIBRATED, context, max(LEAST, len(encoder.tokens(text)) // 2))
        pieces = encoder.pieces(text, size)[: 2 * numbers["calibration"]]
        if sum(map(len, pieces)) < 2 * min(LEAST, size) or len(pieces) < 2:
            raise ExportError(
                f"{source.name} has {len(encoder.tokens(text))} tokens; a quantization needs at "
                f"least {2 * LEAST}, better {2 * numbers['calibration'] * CALIBRATED}"
            )
        return Texts(source.name, pieces[::2], pieces[1::2])
    calibration, report = (
        _in_turn([encoder.pieces(text, min(size, context)) for text in texts], numbers[use])
        for use, texts, size in (
            ("calibration", source.calibration, CALIBRATED),
            ("evaluation", source.evaluation, COMPARED),
        )
    )
    return Texts(source.name, calibration, report)


def _in_turn(documents: Sequence[list[np.ndarray]], number: int) -> list[np.ndarray]:
    """Return as many pieces, evenly of each document, those of a document together."""
    each = -(-number // len(documents))
    return [piece for pieces in documents for piece in pieces[:each]]


@dataclass(frozen=True)
class Encoder:
    """Tokens of texts as a model reads them."""

    tokenizer: Tokenizer
    num_tokens: int
    template: Template | None = None

    def tokens(self, text: str) -> np.ndarray:
        """Return a text's tokens, without those that the tokenizer adds. [T]"""
        if self.template is not None and text.startswith("User: "):
            with translate_errors(ExportError, "the chat template fails on the calibration text: "):
                text = "".join(map(self.template, chats(text)))
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([token for token in ids if token < self.num_tokens], np.int64)

    def prefix(self) -> np.ndarray:
        """Return what the tokenizer puts before a text. [n]"""
        encoding = self.tokenizer.encode("a", add_special_tokens=True)
        added = encoding.special_tokens_mask
        count = next((i for i, special in enumerate(added) if not special), 0)
        return np.array(encoding.ids[:count], np.int64)

    def pieces(self, text: str, size: int) -> list[np.ndarray]:
        """Return a text in pieces of at most `size` tokens, each after the prefix. [size] each

        A prefix that leaves no room for two tokens is cut.
        """
        ids, prefix = self.tokens(text), self.prefix()[: size - 2]
        step = size - len(prefix)
        starts = range(0, len(ids), step)
        pieces = [np.concatenate((prefix, ids[at : at + step])) for at in starts]
        return [piece for piece in pieces if len(piece) > len(prefix) + 1]


def chats(text: str) -> list[Turns]:
    """Return the conversations of a text, in which turns begin with "User: " or "Assistant: "."""
    conversations: list[Turns] = []
    for line in text.splitlines():
        role, colon, content = line.partition(": ")
        if colon and role in ("User", "Assistant"):
            after_blank = not conversations or conversations[-1][-1]["content"].endswith("\n")
            if role == "User" and after_blank:
                conversations.append([])
            conversations[-1].append({"role": role.lower(), "content": content})
        else:
            conversations[-1][-1]["content"] += f"\n{line}"
    for turn in (turn for turns in conversations for turn in turns):
        turn["content"] = turn["content"].strip()
    return conversations
