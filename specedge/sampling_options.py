"""Options that determine the distribution of the next token. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from .errors import OptionError
from .option_specs import (
    OptionSpec,
    check_integer,
    option_field,
    shorten,
    validate_options,
)
from .strict_json import OPTIONAL

MAX_DRAFT_TOKENS = 64
MAX_EXPORTED_DRAFT_TOKENS = 16

LogitBiases = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SamplingFilters:
    """Temperature and filters, in order of application.

    Temperature 0 is greedy decoding: the largest logit, the lowest id on ties. `top_k` 0, `top_p` 1
    and `min_p` 0 are off. `min_p` removes tokens whose probability is below `min_p` times that of
    the most likely token.
    """

    temperature: float = option_field(0.0, "Sampling temperature; 0 is greedy decoding.", minimum=0)
    top_k: int = option_field(0, "Sample from the k most likely tokens; 0 is off.")
    top_p: float = option_field(
        1.0,
        "Sample from the smallest set of tokens with total probability p; 1 is off.",
        exclusive_minimum=0,
        maximum=1,
    )
    min_p: float = option_field(
        0.0,
        "Minimum probability relative to the most likely token; 0 is off.",
        minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        validate_options(self)

    @property
    def greedy(self) -> bool:
        """True if the next token is the one with the largest logit."""
        return self.temperature == 0


def _repetition_penalty() -> Any:
    return option_field(
        1.0, "Penalty for tokens in the prompt or output; 1 is off.", exclusive_minimum=0
    )


@dataclass(frozen=True)
class RecommendedSampling(SamplingFilters):
    """Sampling options that a model's authors recommend; temperature 0 is no recommendation."""

    repetition_penalty: float = field(
        default=1.0, metadata={**_repetition_penalty().metadata, **OPTIONAL}
    )


@dataclass(frozen=True)
class DecodingDefaults:
    """Logits processors of an encoder-decoder's generation config, which every request applies.

    Attributes:
        no_repeat_ngram_size: Length of the token sequences that do not occur twice, unless a
            request sets another; 0 is off.
        suppress_tokens: Tokens that are never generated.
        begin_suppress_tokens: Tokens that do not begin a text.
    """

    no_repeat_ngram_size: int = field(default=0, metadata=OPTIONAL)
    suppress_tokens: tuple[int, ...] = field(default=(), metadata=OPTIONAL)
    begin_suppress_tokens: tuple[int, ...] = field(default=(), metadata=OPTIONAL)

    def __post_init__(self) -> None:
        check_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)


@dataclass(frozen=True)
class SamplingRules(SamplingFilters):
    """All options that determine the distribution of the next token.

    `typical_p` (1 is off) keeps the tokens whose surprise is closest to the entropy, until their
    probability reaches it.

    Logits are modified before filtering. `repetition_penalty` divides positive and multiplies
    negative logits of tokens in the prompt or the output; `presence_penalty` is subtracted from the
    logits of tokens in the output, `frequency_penalty` once per occurrence. `logit_bias` is added
    by token id. `bad_words`, sequences of token ids (or texts, in a request), are never completed.
    No end token is generated before `min_new_tokens` tokens. No sequence of `no_repeat_ngram_size`
    tokens occurs twice in prompt and output; None is the model's own size, or off.

    With `lenience` b below 1 a draft token is accepted if b u d(x) < t(x): more tokens per round,
    from a distribution that is not the target's. It has no effect at temperature 0.
    """

    typical_p: float = option_field(
        1.0,
        "Locally typical sampling with this total probability; 1 is off.",
        exclusive_minimum=0,
        maximum=1,
    )
    repetition_penalty: float = _repetition_penalty()
    presence_penalty: float = option_field(
        0.0, "Penalty for tokens that occur in the output.", minimum=-2, maximum=2
    )
    frequency_penalty: float = option_field(
        0.0,
        "Penalty for each occurrence of a token in the output.",
        minimum=-2,
        maximum=2,
    )
    logit_bias: Mapping[int, float] | LogitBiases = option_field(
        (), "Bias added to a token's logit.", "numbers from -100 to 100 by token id"
    )
    bad_words: str | Sequence[str | Sequence[int]] = option_field(
        (), "Never generate this text.", "texts, or lists of token ids"
    )
    min_new_tokens: int = option_field(0, "Minimum number of new tokens.")
    no_repeat_ngram_size: int | None = option_field(
        None, "Never repeat a sequence of this many tokens; 0 is off.  [default: the model's, or 0]"
    )
    lenience: float = option_field(
        1.0,
        "Below 1, accept more draft tokens; lossy, since it changes the distribution.",
        exclusive_minimum=0,
        maximum=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("bad_words", _bad_words(self.bad_words))

    @property
    def lossy(self) -> str | None:
        """Option that makes speculative decoding lossy, with its value, or None."""
        return f"lenience {self.lenience:g}" if self.lenience < 1 and not self.greedy else None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


class TokenConstraint(Protocol):
    """Constraint on the next token, such as a grammar."""

    def banned(self, history: Any) -> Any:
        """Return a mask of the tokens that cannot follow a `History` [V]."""

    def forced(self, history: Any) -> int | None:
        """Return the only token that can follow a `History`, or None."""


@dataclass(frozen=True)
class TimestampRules:
    """Timestamps of Whisper, in pairs that do not decrease (Radford et al. 2022, section 4.5).

    Attributes:
        first: Token of 0 seconds; those after it are the timestamps, 20 ms apart.
        end: End token, after all tokens of text.
        max_initial: Largest first timestamp, counted from `first`.
    """

    first: int
    end: int
    max_initial: int


class SharedNoise(Protocol):
    """Noise that draft and target share to select tokens."""

    def choose(self, distribution: Any, position: int) -> int:
        """Return the token of a `Distribution` chosen at a position of the text."""

    def forget(self, length: int) -> None:
        """Drop the noise of positions before `length`."""


@dataclass(frozen=True)
class Sampling(SamplingRules):
    """Sampling options with bad words as token ids, and those of the model's decoding.

    `min_new_tokens` suppresses the `end_tokens`. As in transformers, a bad word that consists of
    one end token is ignored. `suppress_tokens` are never generated, `begin_suppress_tokens` not as
    the first new token. `timestamps` apply last. `constraint` and `noise` belong to one request;
    `noise` couples draft and target above temperature 0.
    """

    end_tokens: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    timestamps: TimestampRules | None = None
    constraint: TokenConstraint | None = field(default=None, compare=False)
    noise: SharedNoise | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.greedy:
            self._set("noise", None)
        if self.noise is not None and self.lenience < 1:
            raise OptionError(LENIENT_COUPLING, "coupling")
        if text := [word for word in self.bad_words if isinstance(word, str)]:
            raise OptionError(f"bad_words must be token ids here, got {text[0]!r}", "bad_words")
        ends = tuple(check_integer("an end token", token, 0) for token in self.end_tokens)
        self._set("end_tokens", ends)

    @property
    def chooses(self) -> bool:
        """True if the token is a function of its row and position, without random numbers."""
        return self.greedy or self.noise is not None

    @property
    def allows_blocks(self) -> bool:
        """True if a sampled draft may be verified as a block."""
        return not (self.chooses or self.constraint) and self.lenience == 1

    @property
    def edits(self) -> bool:
        """True if logits are modified before filtering."""
        masks = self.bans_tokens or self.constraint or self.timestamps
        return bool(self.counts or self.logit_bias or masks)

    @property
    def bans_tokens(self) -> bool:
        """True if tokens are banned at some positions, by options other than a constraint."""
        suppressed = self.suppress_tokens or self.begin_suppress_tokens
        return bool(
            self.bad_words or self.min_new_tokens or self.no_repeat_ngram_size or suppressed
        )

    @property
    def counts(self) -> bool:
        """True if the distribution depends on the tokens of the text and their counts."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @cached_property
    def bans(self) -> dict[int | None, list[tuple[int, ...]]]:
        """Bad words by their last token but one; None for single tokens."""
        words: dict[int | None, list[tuple[int, ...]]] = {}
        ends = {(token,) for token in self.end_tokens}
        for word in self.bad_words:
            assert isinstance(word, tuple)
            if word not in ends:
                words.setdefault(word[-2] if len(word) > 1 else None, []).append(word)
        return words


LENIENT_COUPLING = (
    "coupling 'gumbel' and lenience exclude each other: the coupled rule accepts only the target's "
    "own tokens; omit one of them"
)
_BIAS = OptionSpec("", "number", minimum=-100, maximum=100)


def _biases(bias: Any) -> LogitBiases:
    try:
        pairs = bias.items() if isinstance(bias, Mapping) else [tuple(pair) for pair in bias]
        biases = [(_biased_token(token), value) for token, value in pairs]
    except OptionError:
        raise
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"logit_bias must map token ids to numbers, got {shorten(bias)}", "logit_bias"
        ) from error
    if len(dict(biases)) < len(biases):
        raise OptionError("logit_bias has a token twice", "logit_bias")
    for token, value in biases:
        _BIAS.validate(f"logit_bias of token {token}", value, "logit_bias")
    return tuple(sorted((token, float(value)) for token, value in biases))


def _biased_token(token: object) -> int:
    """Return a token id, which is text if it is a JSON key."""
    if isinstance(token, str) and token.isascii() and token.isdigit():
        token = int(token)
    return check_integer("a token of logit_bias", token, 0, option="logit_bias")


def _bad_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    texts = (words,) if isinstance(words, str) else words
    if not isinstance(texts, list | tuple):
        raise OptionError(
            f"bad_words must be texts or lists of token ids, got {shorten(words)}", "bad_words"
        )
    return tuple(dict.fromkeys(_bad_word(word) for word in texts))


def _bad_word(word: object) -> str | tuple[int, ...]:
    if not isinstance(word, str | list | tuple):
        raise OptionError(
            f"a bad word must be text or a list of token ids, got {shorten(word)}", "bad_words"
        )
    if not word:
        raise OptionError("a bad word must not be empty", "bad_words")
    if isinstance(word, str):
        return word
    return tuple(
        check_integer("a bad word's token", token, 0, option="bad_words") for token in word
    )
