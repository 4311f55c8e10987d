"""Texts for calibration, and separate texts for the quantization report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from specedge.bundle.precision import NEAREST
from specedge.errors import ExportError

from ..libraries import translate_errors

FOLDER = Path(__file__).with_name("text")
BUILT_IN_NAME = "specedge's own texts"
GENRES = ("prose", "code", "chat")
CALIBRATION_WINDOW, EVALUATION_WINDOW = 256, 344  # tokens per sequence
NUM_TOKENS = {"calibration": 18 * CALIBRATION_WINDOW, "evaluation": 3 * EVALUATION_WINDOW}
MAX_PIECES = 36  # maximum sequences, if the context is small
MIN_TOKENS = 32  # minimum length of a sequence
NEAREST_STEP = 6  # one in so many sequences calibrates weights that are rounded to nearest
Turns = list[dict[str, str]]
Template = Callable[[Turns], str]


@dataclass(frozen=True)
class CalibrationTexts:
    """Tokens for calibration and for evaluation, [T] each.

    Attributes:
        name: Name of the text.
        calibration: Windows to calibrate weights with.
        evaluation: Windows to report on.
        caches: Windows to calibrate the scales of int8 caches with, if any.
    """

    name: str
    calibration: list[np.ndarray]
    evaluation: list[np.ndarray]
    caches: list[np.ndarray] = field(default_factory=list)

    def select(self, rounding: str, has_int8_caches: bool) -> CalibrationTexts:
        """Return the windows that a model needs.

        Weights that are rounded to nearest are calibrated with one in `NEAREST_STEP`, as they need
        no Hessians.

        Args:
            rounding: One of `specedge.bundle.precision.ROUNDINGS`.
            has_int8_caches: True if its caches are calibrated.
        """
        step = NEAREST_STEP if rounding == NEAREST else 1
        caches = self.calibration if has_int8_caches else []
        return replace(self, calibration=self.calibration[::step], caches=caches)


@dataclass(frozen=True)
class TextSource:
    """Documents for calibration and evaluation, which are the same for a user's file."""

    name: str
    calibration: tuple[str, ...]
    evaluation: tuple[str, ...]

    @property
    def text(self) -> str:
        """Calibration documents as one text."""
        return "\n\n".join(self.calibration)


def read_source(file: str | None) -> TextSource:
    """Read a user's text file, or the built-in texts.

    Raises:
        ExportError: The file cannot be read.
    """
    if file is None:
        return TextSource(
            BUILT_IN_NAME, _read_built_in("calibration"), _read_built_in("evaluation")
        )
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{file}: {getattr(error, 'strerror', None) or error}") from error
    return TextSource(Path(file).name, (text,), (text,))


def _read_built_in(use: str) -> tuple[str, ...]:
    return tuple((FOLDER / f"{use}-{genre}.txt").read_text("utf-8") for genre in GENRES)


def tokenize(
    source: TextSource,
    tokenizer: Path,
    num_tokens: int,
    context: int,
    template: Template | None = None,
) -> CalibrationTexts:
    """Return windows of tokens for a model, each with the tokenizer's prefix, such as BOS.

    Every other window of a user's file is for evaluation.

    Args:
        source: Documents.
        tokenizer: Path of tokenizer.json.
        num_tokens: Number of ids that the model supports.
        context: Context length.
        template: Chat template, if the model has one.

    Raises:
        ExportError: A text is too short, or the template fails.
    """
    encoder = TextEncoder(Tokenizer.from_file(str(tokenizer)), num_tokens, template)
    if source.calibration == source.evaluation:
        (text,) = source.calibration
        size = min(CALIBRATION_WINDOW, context, max(MIN_TOKENS, len(encoder.tokens(text)) // 2))
        pieces = encoder.pieces(text, size)[: 2 * _num_pieces("calibration", size)]
        if sum(map(len, pieces)) < 2 * min(MIN_TOKENS, size) or len(pieces) < 2:
            raise ExportError(
                f"{source.name} has {len(encoder.tokens(text))} tokens; quantization needs at "
                f"least {2 * MIN_TOKENS}, and preferably {2 * NUM_TOKENS['calibration']}"
            )
        return CalibrationTexts(source.name, pieces[::2], pieces[1::2])
    calibration, report = (
        _first_pieces([encoder.pieces(text, size) for text in texts], _num_pieces(use, size))
        for use, texts, size in (
            ("calibration", source.calibration, min(CALIBRATION_WINDOW, context)),
            ("evaluation", source.evaluation, min(EVALUATION_WINDOW, context)),
        )
    )
    return CalibrationTexts(source.name, calibration, report)


def _num_pieces(use: str, size: int) -> int:
    """Return the number of windows of a size for calibration or evaluation."""
    return min(MAX_PIECES, NUM_TOKENS[use] // size)


def _first_pieces(documents: Sequence[list[np.ndarray]], number: int) -> list[np.ndarray]:
    """Return the first windows of each document, grouped by document."""
    each = -(-number // len(documents))
    return [piece for pieces in documents for piece in pieces[:each]]


@dataclass(frozen=True)
class TextEncoder:
    """Tokenizer and chat template of a model."""

    tokenizer: Tokenizer
    num_tokens: int
    template: Template | None = None

    def tokens(self, text: str) -> np.ndarray:
        """Return a text's tokens without special tokens; chats are rendered by the template. [T]"""
        if self.template is not None and text.startswith("User: "):
            text = "".join(map(self._rendered, parse_conversations(text)))
        return self.encode(text)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text without special tokens. [T]"""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([token for token in ids if token < self.num_tokens], np.int64)

    def _rendered(self, turns: Turns) -> str:
        assert self.template is not None
        with translate_errors(ExportError, "the chat template fails on the calibration text: "):
            return self.template(turns)

    def prefix(self) -> np.ndarray:
        """Return the tokens that the tokenizer adds before a text, such as BOS. [n]"""
        encoding = self.tokenizer.encode("a", add_special_tokens=True)
        added = encoding.special_tokens_mask
        count = next((i for i, special in enumerate(added) if not special), 0)
        return np.array(encoding.ids[:count], np.int64)

    def pieces(self, text: str, size: int) -> list[np.ndarray]:
        """Split a text into windows of at most `size` tokens including the prefix.

        A prefix that leaves no room for two tokens is truncated.
        """
        ids, prefix = self.tokens(text), self.prefix()[: size - 2]
        step = size - len(prefix)
        starts = range(0, len(ids), step)
        pieces = [np.concatenate((prefix, ids[at : at + step])) for at in starts]
        return [piece for piece in pieces if len(piece) > len(prefix) + 1]


def parse_conversations(text: str) -> list[Turns]:
    """Return the conversations of a text, whose turns begin with "User: " or "Assistant: "."""
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
