"""N-gram tables as files: NumPy's .npz, of plain arrays alone, and strictly read."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specedge.bundle import Bundle
from specedge.bundle.store import temporary_beside
from specedge.errors import DrafterError

from .ngrams import Counts, Tables

FORMAT = 1
_NAMES = [field.name for field in dataclasses.fields(Tables)]
_CURE = "build the tables again with 'specedge ngram build'"


def write(tables: Tables, bundle: Bundle, path: Path) -> None:
    """Write tables, with the hash of the tokenizer that they are for; whole or not at all."""
    arrays = {name: getattr(tables, name) for name in _NAMES}
    with temporary_beside(path) as temporary:
        with temporary.open("wb") as file:
            np.savez_compressed(
                file, format=np.array([FORMAT]), tokenizer=_tokenizer(bundle), **arrays
            )
        os.replace(temporary, path)


def read(path: Path, bundle: Bundle) -> Tables:
    """Read tables and check that they are whole and for this bundle's tokenizer.

    Raises DrafterError.
    """
    try:
        return _checked(_arrays(path), bundle)
    except OSError as error:
        raise DrafterError(f"{path}: {error.strerror or error}; {_CURE}") from error
    except _NotOursError as error:
        raise DrafterError(f"{path}: {error}; {_CURE}") from error


def _arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    if path.exists() and not path.is_file():
        raise _NotOursError("it is no file")
    with path.open("rb") as file:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        except Exception as error:  # NumPy's, zipfile's, zlib's and tokenize's own, by the damage
            raise _NotOursError("it is damaged or of another kind") from error
    wanted = {*_NAMES, "format", "tokenizer"}
    if found.keys() != wanted or not all(isinstance(a, np.ndarray) for a in found.values()):
        raise _NotOursError("it is no file of n-gram tables")
    return found


def _checked(arrays: dict[str, NDArray[np.generic]], bundle: Bundle) -> Tables:
    if arrays["format"].tolist() != [FORMAT]:
        raise _NotOursError(f"it is not of format {FORMAT}")
    if not np.array_equal(arrays["tokenizer"], _tokenizer(bundle)):
        raise _NotOursError(f"it is for another tokenizer than {bundle.folder}'s")
    counts = {name: arrays[name] for name in _NAMES}
    for name, array in counts.items():
        if array.ndim != 1 or array.dtype not in (np.uint16, np.uint32):
            raise _NotOursError(f"{name} is no list of counts")
    tables = Tables(**counts)  # type: ignore[arg-type]
    if tables.vocab_size != bundle.target.vocab_size:
        raise _NotOursError(
            f"it has {tables.vocab_size} tokens, the target has {bundle.target.vocab_size}"
        )
    if not (_holds(tables) and tables.unigrams.any()):
        raise _NotOursError("its tables contradict themselves")
    return tables


def _holds(tables: Tables) -> bool:
    """Whether every row is one: tokens ascend within the vocabulary, counts are above 0, and what
    followed two tokens has followed the second. Then all distributions add up to 1.
    """
    size, pairs = tables.vocab_size, (tables.pair_starts, tables.pair_tokens, tables.pair_counts)
    triples = (tables.triple_starts, tables.triple_tokens, tables.triple_counts)
    if not (_are_rows(*pairs, size, size) and _are_rows(*triples, len(pairs[1]), size)):
        return False
    seconds = np.repeat(tables.pair_tokens, np.diff(tables.triple_starts))
    followed = seconds * np.int64(size) + tables.triple_tokens
    known = _keys(tables.pair_starts, tables.pair_tokens, size)
    places = known.searchsorted(followed)
    return bool((places < len(known)).all() and (known[places] == followed).all())


def _are_rows(starts: Counts, tokens: Counts, counts: Counts, num_rows: int, size: int) -> bool:
    if len(starts) != num_rows + 1 or len(tokens) != len(counts):
        return False
    if starts[0] != 0 or starts[-1] != len(tokens) or (starts[1:] < starts[:-1]).any():
        return False
    keys = _keys(starts, tokens, size)
    return bool(counts.all() and (tokens < size).all() and (keys[1:] > keys[:-1]).all())


def _keys(starts: Counts, tokens: Counts, size: int) -> NDArray[np.int64]:
    """Row and token as one number."""
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return rows * np.int64(size) + tokens


def _tokenizer(bundle: Bundle) -> NDArray[np.uint8]:
    """The tokenizer's SHA-256. -> [32]"""
    return np.frombuffer(bytes.fromhex(bundle.files[bundle.tokenizer].sha256), np.uint8)


class _NotOursError(Exception):
    """Why a file is not read."""
