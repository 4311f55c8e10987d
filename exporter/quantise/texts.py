"""The text that a quantisation is chosen by, and another part of it that it is reported on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from specedge.errors import ExportError

BUILT_IN = Path(__file__).with_name("text.txt")
NAME = "specedge's own text"
PIECE = 128  # tokens that are run together, after nothing
SMALL, SMALL_PIECES = 50_000_000, 32  # pieces for models up to so many parameters,
PIECES = 8  # and for larger ones
LEAST = 32  # tokens


@dataclass(frozen=True)
class Texts:
    """Tokens, [T] each: of the pieces of one text every other one; and the text's name."""

    name: str
    calibration: list[np.ndarray]
    report: list[np.ndarray]


def read(file: str | None) -> tuple[str, str]:
    """A file's name and text, or the built-in one's. Raises ExportError."""
    if file is None:
        return NAME, BUILT_IN.read_text("utf-8")
    try:
        return Path(file).name, Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ExportError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


def cut(
    name: str, text: str, tokenizer: Path, num_tokens: int, context: int, num_parameters: int
) -> Texts:
    """Pieces of a text for a model of `context` tokens whose first `num_tokens` ids are real."""
    encoding = Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False)
    ids = np.array([token for token in encoding.ids if token < num_tokens], np.int64)
    size = min(PIECE, context)
    count = 2 * (SMALL_PIECES if num_parameters <= SMALL else PIECES)
    pieces = [ids[at : at + size] for at in range(0, len(ids), size)][:count]
    if len(ids) < 2 * min(LEAST, size):
        raise ExportError(
            f"{name} has {len(ids)} tokens; a quantisation wants at least {2 * LEAST}, better "
            f"{count * size}"
        )
    if len(pieces) == 1:
        pieces = [ids[: len(ids) // 2], ids[len(ids) // 2 :]]
    return Texts(name, pieces[::2], [piece for piece in pieces[1::2] if len(piece) > 1])
