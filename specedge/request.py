"""Options of a generation request. Standard library only."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, TypedDict

from .errors import OptionError
from .option_specs import (
    NameEnum,
    check_integer,
    option_field,
    option_specs,
    shorten,
    suggest,
)
from .sampling_options import LENIENT_COUPLING, MAX_DRAFT_TOKENS, Sampling, SamplingRules
from .strict_json import JsonError, parse

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_MATCH = 64
NGRAM = "ngram:"  # followed by a file name
MAX_REPLAYED_ROUNDS = 2**20
GRAMMARS = ("json_schema", "regex", "grammar")  # at most one of these
MAX_GRAMMAR_LENGTH = 2**18  # characters
# Options of beam search in other libraries, and their values without it.
BEAM_SEARCH: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "use_beam_search": (False,), "length_penalty": (1, 1.0),
    "early_stopping": (False,), "best_of": (1,),
}  # fmt: skip
NO_BEAM_SEARCH = "a text is decoded without comparing several texts, as beam search does"


class DrafterName(NameEnum):
    """Built-in drafters; `NGRAM` followed by a file name is another.

    LOOKUP (prompt lookup) is SUFFIX with `lookup_min` 2 and `lookup_max` 4.
    """

    AUTO = "auto"
    MODEL = "model"
    LOOKUP = "lookup"
    SUFFIX = "suffix"
    CHAIN = "chain"
    RANDOM = "random"


class Coupling(NameEnum):
    """Coupling of the random numbers of draft and target above temperature 0."""

    RESIDUAL = "residual"
    GUMBEL = "gumbel"


AUTO = DrafterName.AUTO
WITH_SUFFIX = (AUTO, DrafterName.SUFFIX, DrafterName.LOOKUP, DrafterName.CHAIN)
PLAIN = "plain"  # drafter of rounds of plain decoding

BLOCK = "block"  # item of rounds whose drafts were verified as blocks
# Drafter, K, number of rounds; then BLOCK and the minimum confidence of a draft, where they apply.
PlannedRounds: TypeAlias = "tuple[str, int, int, Unpack[tuple[str | float, ...]]]"


@dataclass(frozen=True)
class GenerationRequest(SamplingRules):
    """Options of a generation request, documented at `Pipeline.generate`.

    `num_draft_tokens` is "auto" (also None) or fixed; 0 is plain decoding. `replay` repeats the
    drafter and K of each round of an earlier run (`Generation.plan`). `special_tokens` encodes
    special tokens in prompts and messages as such; otherwise they are plain text.

    Above temperature 0, `coupling` "gumbel" makes the text depend on the seed only, not on the
    drafter; `choice` selects one of several texts of a seed.

    `decoder_prefix` replaces the bundle's: text, in which special tokens are encoded as such, or
    token ids with which the text of an encoder-decoder begins. They are not part of the output.

    `json_schema` (an object or its JSON text), `regex` or `grammar` (Lark syntax) constrain the
    text, as interpreted by llguidance; a truncated text is a prefix of a valid one.

    None selects an option's default. An invalid value raises OptionError with the option's name.
    """

    max_new_tokens: int = option_field(128, "Maximum number of new tokens.", minimum=1)
    seed: int | None = option_field(
        None, "Random seed.  [default: random]", minimum=-(2**64), maximum=2**64
    )
    coupling: str = option_field(
        Coupling.RESIDUAL.value,
        "Accept rule; with gumbel the text depends on the seed only.",
        " or ".join(Coupling),
    )
    choice: int = option_field(
        0, "Index of one of the texts of a seed, with coupling gumbel.", maximum=2**32
    )
    num_draft_tokens: int | str | None = option_field(
        AUTO,
        "Draft tokens per round; 0 is plain decoding.",
        f"auto, or 0 to {MAX_DRAFT_TOKENS}",
    )
    stop: str | Sequence[str] = option_field((), "Stop before this text.", "texts")
    ignore_eos: bool = option_field(False, "Continue after end-of-text tokens.")
    logprobs: int | None = option_field(
        None, "Return log-probabilities of the tokens and of the N most likely ones."
    )
    drafter: Any = option_field(
        AUTO,
        f"Drafter: {', '.join(DrafterName)}, or {NGRAM}FILE.",
        "a name; in the API also an object",
    )
    lookup_min: int | None = option_field(
        None, "Shortest match of suffix decoding in tokens.", minimum=1, maximum=MAX_MATCH
    )
    lookup_max: int | None = option_field(
        None, "Longest match of suffix decoding in tokens.", minimum=1, maximum=MAX_MATCH
    )
    remember: bool = option_field(
        False,
        "Also draft from the outputs of earlier requests, and store the output for later requests.",
    )
    exact: bool = option_field(False, "At temperature 0, resolve near-ties as plain decoding does.")
    replay: Sequence[Sequence[Any]] | None = option_field(
        None, "Repeat the drafter and K of each round of an earlier run.", "Generation.plan"
    )
    special_tokens: bool = option_field(
        False, "Encode prompt text that spells a special token as that token."
    )

    decoder_prefix: str | Sequence[int] | None = option_field(
        None,
        "Begin the text of an encoder-decoder with this text, such as a target language.",
        "text, or token ids",
    )
    json_schema: str | Mapping[str, Any] | None = option_field(
        None, "Constrain the output to this JSON schema.", "a schema, or its JSON text"
    )
    regex: str | None = option_field(
        None, "Constrain the output to this regular expression.", "text"
    )
    grammar: str | None = option_field(None, "Constrain the output to this Lark grammar.", "text")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_grammar()
        self._check_coupling()
        if self.min_new_tokens > self.max_new_tokens:
            raise OptionError(
                f"min_new_tokens {self.min_new_tokens} is above max_new_tokens "
                f"{self.max_new_tokens}",
                "min_new_tokens",
            )
        if isinstance(k := self.num_draft_tokens, str) and k != AUTO:
            raise OptionError(
                f"num_draft_tokens must be 'auto' or an integer between 0 and {MAX_DRAFT_TOKENS}, "
                f"got {shorten(k)}",
                "num_draft_tokens",
            )
        if k != AUTO:
            self._set("num_draft_tokens", check_integer("num_draft_tokens", k, 0, MAX_DRAFT_TOKENS))
        if self.replay is not None:
            if self.num_draft_tokens != AUTO:
                raise OptionError(
                    "a replay has its own num_draft_tokens; omit the option", "num_draft_tokens"
                )
            self._set("replay", _planned(self.replay))
        self._set("stop", _stop_strings(self.stop))
        self._set("decoder_prefix", _decoder_prefix(self.decoder_prefix))
        if self.exact and self.temperature != 0:
            raise OptionError(
                "exact applies to temperature 0 only, where rounding can change the largest logit",
                "exact",
            )
        _check_drafter(self.drafter)
        for name in ("lookup_min", "lookup_max"):
            if getattr(self, name) and self.drafter not in WITH_SUFFIX:
                raise OptionError(f"{name} applies to suffix decoding; use suffix or chain", name)
        if self.remember and self.drafter not in WITH_SUFFIX:
            raise OptionError(
                "remember applies to the drafters suffix, chain and auto only", "remember"
            )
        if self.lookup_min and self.lookup_max and self.lookup_min > self.lookup_max:
            raise OptionError(
                f"lookup_min must be at most lookup_max, got {self.lookup_min} and "
                f"{self.lookup_max}",
                "lookup_min",
            )

    def _check_coupling(self) -> None:
        if self.coupling not in [*Coupling]:
            raise OptionError(
                f"coupling must be {' or '.join(Coupling)}, got {shorten(self.coupling)}",
                "coupling",
            )
        if self.coupling == Coupling.GUMBEL and self.lenience < 1:
            raise OptionError(LENIENT_COUPLING, "coupling")
        if self.choice and self.coupling != Coupling.GUMBEL:
            raise OptionError(
                "choice applies to coupling 'gumbel' only; otherwise use another seed", "choice"
            )

    def _check_grammar(self) -> None:
        self._set("json_schema", _schema(self.json_schema))
        names = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(names) > 1:
            raise OptionError(
                f"{names[1]} and {names[0]} cannot be combined; omit one of them", names[1]
            )
        for name in names:
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise OptionError(f"{name} must be non-empty text, got {shorten(text)}", name)
            if len(text) > MAX_GRAMMAR_LENGTH:
                raise OptionError(f"{name} must have at most {MAX_GRAMMAR_LENGTH} characters", name)
            if self.ignore_eos:
                raise OptionError(
                    f"{name} needs end tokens to finish a text; omit ignore_eos", name
                )

    @property
    def grammar_option(self) -> tuple[str, str] | None:
        """Name and text of the option that constrains the text, or None."""
        options = ((name, getattr(self, name)) for name in GRAMMARS)
        return next(((name, text) for name, text in options if text is not None), None)

    @property
    def fixed_k(self) -> int | None:
        """Number of draft tokens, or None if rounds are planned or replayed."""
        k = self.num_draft_tokens
        return k if isinstance(k, int) else None

    def sampling(
        self, bad_words: Iterable[Sequence[int]] = (), end_tokens: Iterable[int] = ()
    ) -> Sampling:
        """Return the sampling options, with bad words and end tokens as token ids."""
        rules: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(SamplingRules)
        }
        token_options = {"bad_words": tuple(bad_words), "end_tokens": tuple(end_tokens)}
        return Sampling(**rules | token_options)


def build_request(**options: Any) -> GenerationRequest:
    """Return a request.

    Raises:
        TypeError: If an option is unknown.
        OptionError: If a value is invalid.
    """
    specs = option_specs(GenerationRequest)
    for name in options:
        if name in BEAM_SEARCH:
            raise TypeError(f"option '{name}' is not supported: {NO_BEAM_SEARCH}")
        if name not in specs:
            raise TypeError(f"unknown option '{name}'{suggest(name, specs)}")
    return GenerationRequest(**options)


class RequestOptions(TypedDict, total=False):
    """Types of the request options except `max_new_tokens` and `temperature`."""

    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: str | Sequence[str | Sequence[int]]
    min_new_tokens: int
    no_repeat_ngram_size: int | None
    lenience: float
    seed: int | None
    coupling: str
    choice: int
    num_draft_tokens: int | str | None
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: int | None
    drafter: Any
    lookup_min: int | None
    lookup_max: int | None
    remember: bool
    exact: bool
    replay: Sequence[Sequence[Any]] | None
    special_tokens: bool
    decoder_prefix: str | Sequence[int] | None
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None


def _schema(schema: object) -> str | None:
    """Return a JSON schema as text; raise OptionError unless it is a JSON object."""
    if schema is None:
        return None
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        value = parse(text)
    except JsonError as error:
        raise OptionError(f"json_schema is {error}", "json_schema") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"json_schema cannot be converted to JSON: {error}", "json_schema"
        ) from error
    if not isinstance(value, dict):
        raise OptionError(f"json_schema must be an object, got {shorten(text)}", "json_schema")
    return text


def _planned(rounds: object) -> tuple[PlannedRounds, ...]:
    if not isinstance(rounds, list | tuple) or not rounds:
        raise OptionError("replay must be a list of [drafter, K, number of rounds]", "replay")
    planned = tuple(map(_planned_rounds, rounds))
    if sum(entry[2] for entry in planned) > MAX_REPLAYED_ROUNDS:
        raise OptionError(f"replay must have at most {MAX_REPLAYED_ROUNDS} rounds", "replay")
    return planned


def _planned_rounds(rounds: object) -> PlannedRounds:
    if (
        not isinstance(rounds, list | tuple)
        or len(rounds) < 3
        or not isinstance(rounds[0], str)
        or not _are_rules(rounds[3:])
    ):
        raise OptionError(
            f"an entry of replay must be [drafter, K, number of rounds], followed by '{BLOCK}' if "
            "drafts were verified as blocks, and by a minimum confidence between 0 and 1 if they "
            f"could end early, got {str(rounds)[:40]}",
            "replay",
        )
    k = check_integer("K of a replay", rounds[1], 0, MAX_DRAFT_TOKENS, "replay")
    if rounds[0] == PLAIN and k:
        raise OptionError(f"K of '{PLAIN}' rounds in replay must be 0, got {k}", "replay")
    times = check_integer(
        "a replay's number of rounds", rounds[2], 1, MAX_REPLAYED_ROUNDS, "replay"
    )
    return rounds[0], k, times, *rounds[3:]


def _are_rules(items: Sequence[Any]) -> bool:
    """Return True if the items are BLOCK, a minimum confidence, both or none."""
    numbers = items[1:] if items[:1] in ([BLOCK], (BLOCK,)) else items
    return not numbers or (
        len(numbers) == 1 and type(numbers[0]) in (int, float) and 0 < numbers[0] <= 1
    )


def _check_drafter(drafter: object) -> None:
    if not isinstance(drafter, str):
        has_methods = all(callable(getattr(drafter, n, None)) for n in ("propose", "truncate"))
        if not (has_methods and isinstance(getattr(drafter, "name", None), str)):
            raise OptionError(
                f"drafter must be a name, or an object with name, propose and truncate, "
                f"got {str(drafter)[:40]}",
                "drafter",
            )
    elif drafter not in [*DrafterName] and drafter.removeprefix(NGRAM) in ("", drafter):
        names = ", ".join(DrafterName)
        raise OptionError(f"drafter must be {names} or {NGRAM}FILE, got {drafter!r}", "drafter")


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) for text in stops):
        raise OptionError(f"stop must be text or a list of texts, got {shorten(stop)}", "stop")
    if not all(stops):
        raise OptionError("a stop string must not be empty", "stop")
    return tuple(stops)


def _decoder_prefix(prefix: object) -> str | tuple[int, ...] | None:
    if prefix is None or isinstance(prefix, str):
        return prefix
    if isinstance(prefix, Iterable) and not isinstance(prefix, bytes):
        tokens = tuple(prefix)
        if all(
            isinstance(token, SupportsIndex) and not isinstance(token, bool) for token in tokens
        ):
            return tuple(map(operator.index, tokens))
    raise OptionError(
        f"decoder_prefix must be text or token ids, got {shorten(prefix)}", "decoder_prefix"
    )


def item_seed(seed: int, index: int) -> int:
    """Return the seed of an item, wrapped to the range of seeds."""
    seed += index
    return seed if seed < 2**64 else seed - 2**64
