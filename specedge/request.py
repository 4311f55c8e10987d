"""What a caller may ask for beside the prompt. Standard library only, as `options`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from .errors import OptionError
from .option_specs import (
    NameEnum,
    check_integer,
    custom_option,
    flag_option,
    integer_option,
    option_specs,
    shorten,
    suggest,
)
from .sampling_options import LENIENT_COUPLING, MAX_DRAFT_TOKENS, Sampling, SamplingRules
from .strict_json import JsonError, parse

MAX_MATCH = 64
NGRAM = "ngram:"  # and a file's name
MAX_REPLAYED_ROUNDS = 2**20
GRAMMARS = ("json_schema", "regex", "grammar")  # at most one of these
MAX_GRAMMAR_LENGTH = 2**18  # characters


class DrafterName(NameEnum):
    """What drafts, or who chooses it; NGRAM and a file's name is one more."""

    AUTO = "auto"
    MODEL = "model"
    LOOKUP = "lookup"
    SUFFIX = "suffix"
    CHAIN = "chain"
    BLOCK = "block"
    RANDOM = "random"


class Coupling(NameEnum):
    """Coupling of the random numbers of draft and target above temperature 0."""

    RESIDUAL = "residual"
    GUMBEL = "gumbel"


AUTO = DrafterName.AUTO
COPYING = (AUTO, DrafterName.LOOKUP, DrafterName.CHAIN)
REMEMBERING = (AUTO, DrafterName.SUFFIX, DrafterName.CHAIN)
PLAIN = "plain"  # what rounds that draft nothing have in a drafter's place

PlannedRounds = tuple[str, int, int]  # a drafter, K, and how many rounds in a row


@dataclass(frozen=True)
class GenerationRequest(SamplingRules):
    """What a caller asks for beside the prompt, as `Pipeline.generate` explains it.

    `num_draft_tokens` is "auto" (as None is) or fixed; 0 is plain decoding. `replay` repeats the
    drafter and K of each round of an earlier run, `Generation.plan`. `special_tokens` lets a prompt
    or a message that spells a special token have it; else that is text as any other.

    Above temperature 0 `coupling` "gumbel" makes the text depend on the seed alone, not on what
    drafts; `choice` tells several texts of one seed apart.

    `json_schema`, an object or its JSON text, `regex` or `grammar`, in Lark's syntax, is what the
    text must follow, as llguidance reads it; a text that is cut follows it as far as it goes.

    None is an option's default. An invalid value is an OptionError with the option's name.
    """

    max_new_tokens: int = integer_option(128, "Generate at most this many tokens.", 1)
    seed: int | None = integer_option(
        None, "Repeat an earlier run; else a fresh one is drawn.", -(2**64), 2**64
    )
    coupling: str = custom_option(
        Coupling.RESIDUAL.value,
        "Accept draft tokens by this rule; with gumbel the text depends on the seed alone.",
        " or ".join(Coupling),
    )
    choice: int = integer_option(
        0, "With coupling gumbel, write this one of the texts of a seed.", 0, 2**32
    )
    num_draft_tokens: int | str | None = custom_option(
        AUTO,
        "Draft this many tokens a round, or as many as pay; 0 is plain decoding.",
        f"auto, or 0 to {MAX_DRAFT_TOKENS}",
    )
    stop: str | Sequence[str] = custom_option((), "End before this text.", "texts")
    ignore_eos: bool = flag_option("Do not stop at end tokens.")
    logprobs: int | None = integer_option(
        None, "Give the tokens' log-probabilities, and those of the N likeliest."
    )
    drafter: Any = custom_option(
        AUTO,
        f"Draft with {', '.join(DrafterName)} or {NGRAM}FILE.",
        "a name; in the API also an object",
    )
    lookup_min: int | None = integer_option(
        None, "Copy after matches of at least this many tokens; else 2.", 1, MAX_MATCH
    )
    lookup_max: int | None = integer_option(
        None, "Tell matches apart up to this many tokens; else 5.", 1, MAX_MATCH
    )
    remember: bool = flag_option(
        "Draft from earlier outputs that were remembered, and remember this one."
    )
    exact: bool = flag_option(
        "At temperature 0, decide near-ties as plain decoding does on this device."
    )
    replay: Sequence[Sequence[Any]] | None = custom_option(
        None, "Repeat the drafter and K of each round of an earlier run.", "Generation.plan"
    )
    special_tokens: bool = flag_option(
        "Let text that spells a special token control the model; else it is text."
    )

    json_schema: str | Mapping[str, Any] | None = custom_option(
        None, "Write JSON of this schema only.", "a schema, or its JSON text"
    )
    regex: str | None = custom_option(
        None, "Write only what this regular expression matches.", "text"
    )
    grammar: str | None = custom_option(None, "Write only what this Lark grammar allows.", "text")

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
                f"num_draft_tokens must be 'auto' or a whole number between 0 and "
                f"{MAX_DRAFT_TOKENS}, got {shorten(k)}",
                "num_draft_tokens",
            )
        if k != AUTO:
            self._set("num_draft_tokens", check_integer("num_draft_tokens", k, 0, MAX_DRAFT_TOKENS))
        if self.replay is not None:
            if self.num_draft_tokens != AUTO:
                raise OptionError(
                    "a replay has its own num_draft_tokens; leave that out", "num_draft_tokens"
                )
            self._set("replay", _planned(self.replay))
        self._set("stop", _stop_strings(self.stop))
        if self.exact and self.temperature != 0:
            raise OptionError(
                "exact is for temperature 0, where a last bit can turn a choice; a drawn text "
                "follows the target's distribution as it is",
                "exact",
            )
        _check_drafter(self.drafter)
        for name in ("lookup_min", "lookup_max"):
            if getattr(self, name) and self.drafter not in COPYING:
                raise OptionError(f"{name} is for the drafters lookup and chain", name)
            if getattr(self, name) and self.remember:
                raise OptionError(
                    f"{name} is for lookup, which remembers nothing; leave one out", name
                )
        if self.remember and self.drafter not in REMEMBERING:
            raise OptionError("remember is for the drafters suffix, chain and auto", "remember")
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
                "choice is for coupling 'gumbel'; without it take another seed", "choice"
            )

    def _check_grammar(self) -> None:
        self._set("json_schema", _schema(self.json_schema))
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise OptionError(
                f"{given[1]} and {given[0]} cannot both be given; leave one out", given[1]
            )
        for name in given:
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise OptionError(
                    f"{name} must be text that is not empty, got {shorten(text)}", name
                )
            if len(text) > MAX_GRAMMAR_LENGTH:
                raise OptionError(f"{name} must have at most {MAX_GRAMMAR_LENGTH} characters", name)
            if self.ignore_eos:
                raise OptionError(
                    f"{name} needs the end tokens, with which a text that follows it ends; leave "
                    "ignore_eos out",
                    name,
                )

    @property
    def grammar_given(self) -> tuple[str, str] | None:
        """What the text must follow, if anything: the option's name, and its text."""
        given = ((name, getattr(self, name)) for name in GRAMMARS)
        return next(((name, text) for name, text in given if text is not None), None)

    @property
    def fixed_k(self) -> int | None:
        """K, or None where rounds are planned or replayed."""
        k = self.num_draft_tokens
        return k if isinstance(k, int) else None

    def sampling(
        self, bad_words: Iterable[Sequence[int]] = (), end_tokens: Iterable[int] = ()
    ) -> Sampling:
        """How the next token is drawn, given this request's bad words as token ids."""
        rules: dict[str, Any] = {
            field.name: getattr(self, field.name) for field in fields(SamplingRules)
        }
        given = {"bad_words": tuple(bad_words), "end_tokens": tuple(end_tokens)}
        return Sampling(**rules | given)


def build_request(**options: Any) -> GenerationRequest:
    """A request; TypeError for an option that there is not."""
    known = option_specs(GenerationRequest)
    for name in options:
        if name not in known:
            raise TypeError(f"there is no option '{name}'{suggest(name, known)}")
    return GenerationRequest(**options)


class RequestOptions(TypedDict, total=False):
    """The names and types of `Request`'s fields beside `max_new_tokens` and `temperature`."""

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
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    grammar: str | None


def _schema(schema: object) -> str | None:
    """Return a schema as JSON text; OptionError for what is no JSON object."""
    if schema is None:
        return None
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        facts = parse(text)
    except JsonError as error:
        raise OptionError(f"json_schema is {error}", "json_schema") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            f"json_schema cannot be written as JSON: {error}", "json_schema"
        ) from error
    if not isinstance(facts, dict):
        raise OptionError(f"json_schema must be an object, got {shorten(text)}", "json_schema")
    return text


def _planned(rounds: object) -> tuple[PlannedRounds, ...]:
    if not isinstance(rounds, list | tuple) or not rounds:
        raise OptionError(
            "replay must be a list of rounds: a drafter, its K, and how many in a row", "replay"
        )
    found = tuple(map(_planned_rounds, rounds))
    if sum(times for _, _, times in found) > MAX_REPLAYED_ROUNDS:
        raise OptionError(f"replay must have at most {MAX_REPLAYED_ROUNDS} rounds", "replay")
    return found


def _planned_rounds(rounds: object) -> PlannedRounds:
    if not isinstance(rounds, list | tuple) or len(rounds) != 3 or not isinstance(rounds[0], str):
        raise OptionError(
            f"rounds of a replay are [drafter, K, how many], got {str(rounds)[:40]}", "replay"
        )
    k = check_integer("K of a replay", rounds[1], 0, MAX_DRAFT_TOKENS, "replay")
    times = check_integer(
        "a replay's number of rounds", rounds[2], 1, MAX_REPLAYED_ROUNDS, "replay"
    )
    return rounds[0], k, times


def _check_drafter(drafter: object) -> None:
    if not isinstance(drafter, str):
        ours = all(callable(getattr(drafter, name, None)) for name in ("propose", "truncate"))
        if not (ours and isinstance(getattr(drafter, "name", None), str)):
            raise OptionError(
                f"drafter must be a name or an object with name, propose and truncate, "
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
