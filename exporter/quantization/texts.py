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
ANSWERED = 4  # prompts that the model itself answers, for calibration
CALIBRATED, COMPARED = 256, 512  # tokens that are run together, after nothing
TOKENS = {"calibration": 18 * CALIBRATED, "evaluation": 3 * COMPARED}
MOST_PIECES = 36  # in a small context
LEAST = 32  # tokens
Turns = list[dict[str, str]]
Template = Callable[[Turns], str]


@dataclass(frozen=True)
class Texts:
    """Tokens of pieces for calibration and for the report, [T] each, and the text's name.

    The model's answers to `prompts`, up to one of `end_tokens`, are for calibration, too.
    """

    name: str
    calibration: list[np.ndarray]
    report: list[np.ndarray]
    prompts: Sequence[np.ndarray] = ()
    end_tokens: Sequence[int] = ()


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
    template: Template | None = None,
    end_tokens: Sequence[int] = (),
) -> Texts:
    """Return pieces for a model of `context` tokens whose first `num_tokens` ids are real.

    Each begins with the tokens that the tokenizer puts before a text. Chats are written with the
    model's `template` where it has one. Of a user's file every other piece is for the report.
    """
    encoder = Encoder(Tokenizer.from_file(str(tokenizer)), num_tokens, template)
    if source.calibration == source.evaluation:
        (text,) = source.calibration
        size = min(CALIBRATED, context, max(LEAST, len(encoder.tokens(text)) // 2))
        pieces = encoder.pieces(text, size)[: 2 * _number("calibration", size)]
        if sum(map(len, pieces)) < 2 * min(LEAST, size) or len(pieces) < 2:
            raise ExportError(
                f"{source.name} has {len(encoder.tokens(text))} tokens; a quantization needs at "
                f"least {2 * LEAST}, better {2 * TOKENS['calibration']}"
            )
        return Texts(source.name, pieces[::2], pieces[1::2])
    calibration, report = (
        _in_turn([encoder.pieces(text, size) for text in texts], _number(use, size))
        for use, texts, size in (
            ("calibration", source.calibration, min(CALIBRATED, context)),
            ("evaluation", source.evaluation, min(COMPARED, context)),
        )
    )
    prompts = encoder.prompts(source.calibration[-1], context // 2)
    return Texts(source.name, calibration, report, prompts, end_tokens)


def _number(use: str, size: int) -> int:
    """Return how many pieces of a size there are for a use."""
    return min(MOST_PIECES, TOKENS[use] // size)


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
            text = "".join(map(self._rendered, chats(text)))
        return self.encode(text)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text as it is. [T]"""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return np.array([token for token in ids if token < self.num_tokens], np.int64)

    def prompts(self, text: str, size: int) -> list[np.ndarray]:
        """Return the first questions of a text's conversations, as the model is asked them.

        At most `ANSWERED` of at most `size` tokens; none without a template. [T] each
        """
        if self.template is None or not text.startswith("User: "):
            return []
        questions = (self._rendered(turns[:1]) for turns in chats(text))
        prompts = (self._after_prefix(self.encode(question)) for question in questions)
        return [prompt for prompt in prompts if len(prompt) <= size][:ANSWERED]

    def _after_prefix(self, tokens: np.ndarray) -> np.ndarray:
        """Put the prefix before tokens that a template has not given it. [T]"""
        prefix = self.prefix()
        has_prefix = np.array_equal(tokens[: len(prefix)], prefix)
        return tokens if has_prefix else np.concatenate((prefix, tokens))

    def _rendered(self, turns: Turns) -> str:
        assert self.template is not None
        with translate_errors(ExportError, "the chat template fails on the calibration text: "):
            return self.template(turns)

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
