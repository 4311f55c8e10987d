"""What shapes the distribution of the next token. Standard library only, so that every room can
name it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from .errors import OptionError
from .option_specs import (
    OptionSpec,
    check_integer,
    custom_option,
    integer_option,
    number_option,
    shorten,
    validate_options,
)

MAX_DRAFT_TOKENS = 64
MAX_EXPORTED_DRAFT_TOKENS = 16  # a row of the verify pass each

LogitBiases = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SamplingFilters:
    """The options that checkpoints and bundles recommend, in the order they are applied.

    `temperature` 0 is greedy: the largest logit, the lowest id on ties. `top_k` 0, `top_p` 1 and
    `min_p` 0 are off. `min_p` drops tokens less likely than `min_p` times the likeliest one.
    """

    temperature: float = number_option(
        0.0, "Divide the logits by this; 0 takes the likeliest token.", least=0
    )
    top_k: int = integer_option(0, "Draw from the k likeliest tokens only; 0 is off.")
    top_p: float = number_option(
        1.0,
        "Draw from the fewest likeliest tokens whose probability reaches p; 1 is off.",
        above=0,
        most=1,
    )
    min_p: float = number_option(
        0.0, "Drop tokens less likely than this share of the likeliest; 0 is off.", least=0, most=1
    )

    def __post_init__(self) -> None:
        validate_options(self)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the largest logit, with no randomness."""
        return self.temperature == 0


@dataclass(frozen=True)
class SamplingRules(SamplingFilters):
    """Everything that shapes the distribution of the next token.

    `typical_p` (1 is off) keeps the tokens whose surprise is nearest to the expected one, until
    their probability reaches it.

    Before the filters, logits are edited. `repetition_penalty` divides positive and multiplies
    negative logits of tokens that are in the prompt or the output; `presence_penalty` is taken
    from those of tokens in the output, `frequency_penalty` once for each time they are there.
    `logit_bias` is added by token id. `bad_words`, sequences of token ids (and texts, in a
    request), are never completed. No end token comes before `min_new_tokens` tokens.

    `lenience` b below 1 accepts a draft token if b u d(x) < t(x): more tokens a round, of another
    distribution than the target's. At temperature 0 it changes nothing.
    """

    typical_p: float = number_option(
        1.0,
        "Draw from the tokens of the most expected surprise whose probability reaches this; "
        "1 is off.",
        above=0,
        most=1,
    )
    repetition_penalty: float = number_option(
        1.0, "Make tokens of the prompt and the output less likely, by division.", above=0
    )
    presence_penalty: float = number_option(
        0.0, "Take this from the logits of tokens that are in the output.", least=-2, most=2
    )
    frequency_penalty: float = number_option(
        0.0,
        "Take this from a token's logit for each time it is in the output.",
        least=-2,
        most=2,
    )
    logit_bias: Mapping[int, float] | LogitBiases = custom_option(
        (), "Add a number to a token's logit.", "numbers from -100 to 100 by token id"
    )
    bad_words: str | Sequence[str | Sequence[int]] = custom_option(
        (), "Never write this text, nor after a space.", "texts, or lists of token ids"
    )
    min_new_tokens: int = integer_option(0, "Let no end token come before so many tokens.")
    lenience: float = number_option(
        1.0,
        "Below 1, accept more draft tokens, and give up the target's distribution: lossy.",
        above=0,
        most=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("bad_words", _bad_words(self.bad_words))

    @property
    def lossy(self) -> str | None:
        """What makes drafting change the distribution of the text, None if nothing does."""
        return f"lenience {self.lenience:g}" if self.lenience < 1 and not self.greedy else None

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


class TokenConstraint(Protocol):
    """Rules of which tokens may follow a text, such as a grammar."""

    def banned(self, history: Any) -> Any:
        """Whether each token cannot follow a `History`; an array. -> [V]"""

    def forced(self, history: Any) -> int | None:
        """The one token that can follow a `History`; None where several can, or it has ended."""


class SharedNoise(Protocol):
    """Noise by which every model chooses tokens, in place of drawing them."""

    def choose(self, distribution: Any, position: int) -> int:
        """Return the token that a `Distribution` chooses at a position of the text."""

    def forget(self, length: int) -> None:
        """Drop what is kept of the positions before `length`."""


@dataclass(frozen=True)
class Sampling(SamplingRules):
    """How the next token is drawn: `Rules`, with bad words as token ids alone.

    `end_tokens` are what `min_new_tokens` holds back. As in transformers, a bad word that is one
    end token does not count. `constraint` bans tokens by the text before them, of one request.
    `noise`, of one request, couples draft and target above temperature 0.
    """

    end_tokens: tuple[int, ...] = ()
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
        """Return True if a token is a function of its row and position, with nothing drawn."""
        return self.greedy or self.noise is not None

    @property
    def edits(self) -> bool:
        """Whether logits are edited before they are filtered."""
        options = self.counts or self.logit_bias or self.bad_words or self.min_new_tokens
        return bool(options or self.constraint)

    @property
    def counts(self) -> bool:
        """Whether the distribution depends on which tokens are in the text, and how often."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @cached_property
    def bans(self) -> dict[int | None, list[tuple[int, ...]]]:
        """Bad words by their last token but one, None for those of one token."""
        found: dict[int | None, list[tuple[int, ...]]] = {}
        ends = {(token,) for token in self.end_tokens}
        for word in self.bad_words:
            assert isinstance(word, tuple)
            if word not in ends:
                found.setdefault(word[-2] if len(word) > 1 else None, []).append(word)
        return found


LENIENT_COUPLING = (
    "coupling 'gumbel' accepts the target's own tokens alone, which lenience is to change; leave "
    "one out"
)
_BIAS = OptionSpec("", "number", least=-100, most=100)


def _biases(bias: Any) -> LogitBiases:
    try:
        pairs = bias.items() if isinstance(bias, Mapping) else [tuple(pair) for pair in bias]
        found = [(_biased_token(token), value) for token, value in pairs]
    except OptionError:
        raise
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"logit_bias must map token ids to numbers, got {shorten(bias)}", "logit_bias"
        ) from error
    if len(dict(found)) < len(found):
        raise OptionError("logit_bias names a token twice", "logit_bias")
    for token, value in found:
        _BIAS.checked(f"logit_bias of token {token}", value, "logit_bias")
    return tuple(sorted((token, float(value)) for token, value in found))


def _biased_token(token: object) -> int:
    """A token id, also as the text that JSON makes of a key."""
    if isinstance(token, str) and token.isascii() and token.isdigit():
        token = int(token)
    return check_integer("a token of logit_bias", token, 0, option="logit_bias")


def _bad_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    given = (words,) if isinstance(words, str) else words
    if not isinstance(given, list | tuple):
        raise OptionError(
            f"bad_words must be texts or sequences of token ids, got {shorten(words)}", "bad_words"
        )
    return tuple(dict.fromkeys(_bad_word(word) for word in given))


def _bad_word(word: object) -> str | tuple[int, ...]:
    if not isinstance(word, str | list | tuple):
        raise OptionError(
            f"a bad word must be text or a sequence of token ids, got {shorten(word)}", "bad_words"
        )
    if not word:
        raise OptionError("a bad word must not be empty", "bad_words")
    if isinstance(word, str):
        return word
    return tuple(
        check_integer("a bad word's token", token, 0, option="bad_words") for token in word
    )
