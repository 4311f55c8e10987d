"""Sampling options of a request for one bundle: tokens of bad words, end tokens, and defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.errors import OptionError
from specedge.request import GenerationRequest
from specedge.sampling_options import DecodingDefaults, Sampling

from .tokenizer import encode


def resolve_sampling(request: GenerationRequest, bundle: Bundle, tokenizer: Tokenizer) -> Sampling:
    """Return the sampling options of a request.

    Raises:
        OptionError: A token is out of range, or a bad word cannot be encoded.
    """
    words = dict.fromkeys(
        tokens for word in request.bad_words for tokens in _sequences(tokenizer, word)
    )
    ends = () if request.ignore_eos else bundle.end_tokens
    sampling = apply_defaults(request.sampling(words, ends), bundle.decoding_defaults)
    biased = list(dict(sampling.logit_bias))
    for name, tokens in (("logit_bias", biased), *(("bad_words", word) for word in words)):
        if bad := [token for token in tokens if token >= bundle.target.vocab_size]:
            raise OptionError(
                f"{name} has token {bad[0]}, {bundle.target.source.id} has 0 to "
                f"{bundle.target.vocab_size - 1}",
                name,
            )
    return sampling


def apply_defaults(sampling: Sampling, defaults: DecodingDefaults) -> Sampling:
    """Return sampling options with the logits processors of a generation config."""
    sampling = replace(
        sampling,
        suppress_tokens=defaults.suppress_tokens,
        begin_suppress_tokens=defaults.begin_suppress_tokens,
    )
    if sampling.no_repeat_ngram_size is None and defaults.no_repeat_ngram_size:
        sampling = replace(sampling, no_repeat_ngram_size=defaults.no_repeat_ngram_size)
    return sampling


def _sequences(tokenizer: Tokenizer, word: str | Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the token sequences of a bad word.

    Text that does not begin with white space is banned with and without a preceding space, which
    most tokenizers encode differently.
    """
    if not isinstance(word, str):
        yield tuple(word)
        return
    for text in (word,) if word[0].isspace() else (word, f" {word}"):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OptionError(
                f"a bad word is not valid Unicode text ({error.reason})", "bad_words"
            ) from error
        tokens = tuple(encode(tokenizer, text, add_special_tokens=False))
        if not tokens:
            raise OptionError(
                f"the tokenizer encodes no token for the bad word {word!r}", "bad_words"
            )
        yield tokens
