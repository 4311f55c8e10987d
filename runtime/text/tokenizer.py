"""Tokenizer of a bundle: loading, encoding and decoding, with panics raised as errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tokenizers import Encoding, Tokenizer

from specedge.bundle import Bundle
from specedge.errors import BundleError

# Context in which a tokenizer is loaded and tried. Rust prints panics to stderr; the command line
# hides them by redirecting stderr, which affects the whole process and is not done by the library.
around_trial: Callable[[], AbstractContextManager[object]] = nullcontext

_TRIAL = "A trial: def f(x):\n    return 'é'  # 1 + 2\n"


def load_tokenizer(bundle: Bundle) -> Tokenizer:
    """Load a bundle's tokenizer, without truncation and padding, which are settings of training.

    Raises:
        BundleError: The tokenizer does not work.
    """
    path = bundle.path(bundle.tokenizer)
    try:
        with around_trial(), translated_panics():
            tokenizer = Tokenizer.from_file(os.fspath(path))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            for special in (True, False):
                _try(tokenizer, special)
    except Exception as error:
        raise BundleError(f"{path}: {error}; export the pair again") from error
    return tokenizer


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the tokens of a text; raise BundleError if the tokenizer panics."""
    return list(encoding(tokenizer, text, add_special_tokens).ids)


def encoding(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> Encoding:
    """Return the tokens of a text with their offsets."""
    with translated_panics():
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def decode(tokenizer: Tokenizer, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Return the text of tokens; raise BundleError on a panic."""
    try:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
    except BaseException:
        with translated_panics():  # entered on failure only, to save time for each token
            raise


def _try(tokenizer: Tokenizer, special: bool) -> None:
    """Run a tokenizer, so that it panics now; other errors occur again when it is used."""
    try:
        decode(tokenizer, encode(tokenizer, _TRIAL, special))
    except BundleError:
        raise
    except Exception:
        return


@contextmanager
def translated_panics() -> Iterator[None]:
    """Raise Rust panics, which are BaseExceptions without an importable type, as BundleError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        lines = str(error).strip().splitlines() or ["panic"]
        raise BundleError(f"the tokenizer fails: {lines[0][:300]}") from error
