"""Files of n-gram tables: NumPy .npz archives of plain arrays, strictly validated."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specedge.bundle import Bundle
from specedge.bundle.store import temporary_beside
from specedge.errors import DrafterError

from .ngrams import Counts, NGramTables

FORMAT = 1
_NAMES = [field.name for field in dataclasses.fields(NGramTables)]
_FIX = "build the tables again with 'specedge ngram build'"


def write(tables: NGramTables, bundle: Bundle, path: Path) -> None:
    """Write tables and the hash of their tokenizer, atomically."""
    arrays = {name: getattr(tables, name) for name in _NAMES}
    with temporary_beside(path) as temporary:
        with temporary.open("wb") as file:
            np.savez_compressed(
                file, format=np.array([FORMAT]), tokenizer=_tokenizer(bundle), **arrays
            )
        os.replace(temporary, path)


def read(path: Path, bundle: Bundle) -> NGramTables:
    """Read tables and check that they are valid and for this bundle's tokenizer.

    Raises:
        DrafterError: The file cannot be read or is not valid.
    """
    try:
        return _validated(_arrays(path), bundle)
    except OSError as error:
        raise DrafterError(f"{path}: {error.strerror or error}; {_FIX}") from error
    except _InvalidFileError as error:
        raise DrafterError(f"{path}: {error}; {_FIX}") from error


def _arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    if path.exists() and not path.is_file():
        raise _InvalidFileError("it is not a file")
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                contents = {name: arrays[name] for name in arrays.files}
        except Exception as error:  # NumPy's, zipfile's, zlib's and tokenize's own, by the damage
            raise _InvalidFileError("it is damaged or has another format") from error
    if contents.keys() != {*_NAMES, "format", "tokenizer"} or not all(
        isinstance(array, np.ndarray) for array in contents.values()
    ):
        raise _InvalidFileError("it does not contain n-gram tables")
    return contents


def _validated(arrays: dict[str, NDArray[np.generic]], bundle: Bundle) -> NGramTables:
    if arrays["format"].tolist() != [FORMAT]:
        raise _InvalidFileError(f"its format version is not {FORMAT}")
    if not np.array_equal(arrays["tokenizer"], _tokenizer(bundle)):
        raise _InvalidFileError(f"it was built with another tokenizer than that of {bundle.folder}")
    counts = {name: arrays[name] for name in _NAMES}
    for name, array in counts.items():
        if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32):
            raise _InvalidFileError(f"{name} is not an array of counts")
    tables = NGramTables(**counts)  # type: ignore[arg-type]
    if tables.vocab_size != bundle.target.vocab_size:
        raise _InvalidFileError(
            f"it has {tables.vocab_size} vocabulary entries, the target has "
            f"{bundle.target.vocab_size}"
        )
    if not (_is_consistent(tables) and tables.unigrams.any()):
        raise _InvalidFileError("its tables are inconsistent")
    return tables


def _is_consistent(tables: NGramTables) -> bool:
    """Return True if every row is valid, so that all distributions add up to 1.

    Tokens ascend within the vocabulary, counts are positive, and each successor of two tokens is
    one of the second.
    """
    size, pairs = tables.vocab_size, (tables.pair_starts, tables.pair_tokens, tables.pair_counts)
    triples = (tables.triple_starts, tables.triple_tokens, tables.triple_counts)
    if not (_are_rows(*pairs, size, size) and _are_rows(*triples, len(pairs[1]), size)):
        return False
    seconds = np.repeat(tables.pair_tokens, np.diff(tables.triple_starts))
    followed = seconds * np.int64(size) + tables.triple_tokens
    pairs_seen = _keys(tables.pair_starts, tables.pair_tokens, size)
    indices = pairs_seen.searchsorted(followed)
    is_inside = (indices < len(pairs_seen)).all()
    return bool(is_inside and (pairs_seen[indices] == followed).all())


def _are_rows(starts: Counts, tokens: Counts, counts: Counts, num_rows: int, size: int) -> bool:
    if len(starts) != num_rows + 1 or len(tokens) != len(counts):
        return False
    if starts[0] != 0 or starts[-1] != len(tokens) or (starts[1:] < starts[:-1]).any():
        return False
    keys = _keys(starts, tokens, size)
    return bool(counts.all() and (tokens < size).all() and (keys[1:] > keys[:-1]).all())


def _keys(starts: Counts, tokens: Counts, size: int) -> NDArray[np.int64]:
    """Return row and token as one number each."""
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return rows * np.int64(size) + tokens


def _tokenizer(bundle: Bundle) -> NDArray[np.uint8]:
    """Return the tokenizer's SHA-256. -> [32]"""
    return np.frombuffer(bytes.fromhex(bundle.files[bundle.tokenizer].sha256), np.uint8)


class _InvalidFileError(Exception):
    """Reason that a file is not used."""
