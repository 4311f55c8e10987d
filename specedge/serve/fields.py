"""Typed access to request fields, and their conversion to pipeline options.

docs/clients.md has a table of all fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specedge.errors import OptionError
from specedge.option_specs import suggest
from specedge.request import BEAM_SEARCH, NO_BEAM_SEARCH, DrafterName, build_request

from .errors import UNSUPPORTED, ApiError

# Pipeline options and their field names in OpenAI's API, vLLM and llama.cpp.
OPTIONS: dict[str, tuple[str, ...]] = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "presence_penalty": ("presence_penalty",),
    "frequency_penalty": ("frequency_penalty",),
    "logit_bias": ("logit_bias",),
    "seed": ("seed",),
    "stop": ("stop",),
    "top_k": ("top_k",),
    "min_p": ("min_p",),
    "typical_p": ("typical_p",),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),
    "bad_words": ("bad_words",),
    "min_new_tokens": ("min_tokens", "min_new_tokens"),
    "no_repeat_ngram_size": ("no_repeat_ngram_size",),
    "coupling": ("coupling",),
    "json_schema": ("json_schema", "guided_json"),
    "regex": ("regex", "guided_regex"),
    "grammar": ("grammar", "guided_grammar"),
}
DEFAULTS = {"temperature": 1.0}  # defaults of OpenAI's API that differ from the pipeline's
MAX_GRAMMAR = 2**16  # characters: longer ones can take seconds to parse
LIST_OPTIONS = ("stop", "logit_bias", "bad_words")
MAX_BAD_WORDS = 2**16  # characters: a megabyte takes seconds to tokenize
MAX_ENTRIES = 1024  # maximum entries of a list option; each costs time in every round
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
SPECULATIVE = ("drafter", "num_draft_tokens", "off")

# Fields that are accepted with any value and ignored.
_COMMON = (
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier",
)  # fmt: skip
NEUTRAL: dict[str, tuple[str, ...]] = {
    "chat": (
        *_COMMON, "metadata", "store", "verbosity", "prediction", "audio", "web_search_options",
    ),
    "completions": (*_COMMON, "metadata"),
    "responses": (
        *_COMMON, "truncation", "max_tool_calls", "client_metadata",
    ),
}  # fmt: skip
# Unsupported fields that would change the response, and their accepted values.
UNSUPPORTED_FIELDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "chat": {
        **BEAM_SEARCH,
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "decoder_prefix": (),
    },
    "completions": {**BEAM_SEARCH, "suffix": ("",)},
    "responses": {
        **BEAM_SEARCH,
        "background": (False,),
        "conversation": (),
        "prompt": (),
        "decoder_prefix": (),
    },
}
MAX_IGNORED = 32  # maximum number of ignored fields listed in a response
_MAX_NAME = 80


class IgnoredFields:
    """Names of unknown fields, which are ignored."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, path: str) -> None:
        """Add a field by its path, without list indices."""
        name = ascii(re.sub(r"\[\d+\]", "[]", path[: 4 * _MAX_NAME]))[1:-1][:_MAX_NAME]
        name = re.sub(r"[^\w.\[\]$:/@+-]", "?", name)  # safe in headers and metric labels
        if name not in self.names and len(self.names) < MAX_IGNORED:
            self.names.append(name)


class FieldReader:
    """Reader of the fields of a JSON object; null is equivalent to absent.

    Args:
        value: The object.
        path: Path of the object in the body, for errors; empty for the body itself.
        ignored: Collector of unknown fields; None to reject them.
    """

    def __init__(self, value: object, path: str = "", ignored: IgnoredFields | None = None) -> None:
        self.path, self.ignored = path, ignored
        if not isinstance(value, dict):
            name = path or "the body"
            message = f"{name} must be a JSON object"
            message += f", got {excerpt(value)}" if path else ""
            raise ApiError(message, path or None, "invalid_type")
        self._fields = {name: value for name, value in value.items() if value is not None}
        self._names: list[str] = []

    @property
    def is_strict(self) -> bool:
        """Return True if unknown fields are rejected."""
        return self.ignored is None

    def take(self, *names: str) -> Any:
        """Remove the fields with these names; return the first value, or None."""
        values = [self._fields.pop(name, None) for name in names]
        self._names += names
        return next((value for value in values if value is not None), None)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the remaining fields."""
        return tuple(self._fields)

    def peek(self, name: str) -> Any:
        """Return the value of a remaining field, or None, without removing it."""
        return self._fields.get(name)

    def take_typed(self, name: str, value_type: type, description: str) -> Any:
        """Take a field and check its type; `description` names the type in errors."""
        value = self.take(name)
        if value is not None and type(value) is not value_type:
            raise self.error(
                name, f"{name} must be {description}, got {excerpt(value)}", "invalid_type"
            )
        return value

    def take_flag(self, name: str, default: bool = False) -> bool:
        value: bool | None = self.take_typed(name, bool, "true or false")
        return default if value is None else value

    def take_int(self, name: str, minimum: int, maximum: int | None = None) -> int | None:
        if isinstance(number := self.peek(name), float) and number.is_integer():
            self._fields[name] = int(number)
        value: int | None = self.take_typed(name, int, "a whole number")
        if value is not None and (value < minimum or (maximum is not None and value > maximum)):
            limits = f"between {minimum} and {maximum}"
            limits = limits if maximum is not None else f"at least {minimum}"
            raise self.error(name, f"{name} must be {limits}, got {excerpt(value)}")
        return value

    def take_list(self, name: str, description: str = "a list") -> list[Any]:
        value: list[Any] | None = self.take_typed(name, list, description)
        return value or []

    def take_object(self, name: str) -> FieldReader | None:
        """Return a reader of a field that is an object, or None if it is absent."""
        value = self.take_typed(name, dict, "an object")
        return None if value is None else self.child(value, self.path_of(name))

    def require_object(self, name: str) -> FieldReader:
        """Return a reader of a required field that is an object."""
        fields = self.take_object(name)
        if fields is None:
            raise self.error(name, f"{name} is required")
        return fields

    def child(self, value: object, path: str) -> FieldReader:
        """Return a reader of a nested object."""
        return FieldReader(value, path, self.ignored)

    def skip(self, *names: str) -> None:
        """Remove fields that have no effect."""
        for name in names:
            self.take(name)

    def reject_unsupported(self, fields: Mapping[str, tuple[Any, ...]]) -> None:
        """Remove unsupported fields; raise ApiError unless their values are accepted ones."""
        for name, values in fields.items():
            value = self.take(name)
            if value is None or any(_is_same(value, other) for other in values):
                continue
            allowed = f", or be {' or '.join(map(json.dumps, values))}" if values else ""
            reason = f", since {NO_BEAM_SEARCH}" if name in BEAM_SEARCH else ""
            raise self.error(
                name,
                f"{name} is not supported, got {excerpt(value)}; it must be omitted{allowed}"
                f"{reason}",
                UNSUPPORTED,
            )

    def finish(self) -> None:
        """Record the remaining fields as ignored, or raise ApiError in strict mode."""
        for name in self._fields:
            if self.ignored is not None:
                self.ignored.add(self.path_of(name))
                continue
            message = f"unknown field {excerpt(name)}{suggest(name, self._names)}"
            raise self.error(name[:100], message, "unknown_field")

    def path_of(self, name: str) -> str:
        """Return the path of a field in the body."""
        return f"{self.path}.{name}" if self.path else name

    def error(self, name: str, message: str, code: str = "invalid_value") -> ApiError:
        """Return an error for a field of this object."""
        return ApiError(
            f"{self.path}: {message}" if self.path else message, self.path_of(name), code
        )


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def excerpt(value: Any) -> str:
    """Return a value as JSON for an error message, truncated to 60 characters."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class OutputRules:
    """Options of a text that are not options of `GenerationRequest`.

    Attributes:
        stop_tokens: Token ids that end the text, in addition to the end tokens.
        include_stop: True if the text includes the stop string that ends it.
        show_special: True if the text includes special tokens.
        text_biases: Logit biases by text; each applies to all tokens of its text.
    """

    stop_tokens: tuple[int, ...] = ()
    include_stop: bool = False
    show_special: bool = False
    text_biases: tuple[tuple[str, float], ...] = ()


def parse_limit(fields: FieldReader, names: Iterable[str]) -> tuple[int | None, str]:
    """Return the maximum number of new tokens (None for no limit) and the field that sets it."""
    limits = {name: fields.take_int(name, -2) for name in names}
    name = next((name for name, limit in limits.items() if limit is not None), next(iter(limits)))
    limit = limits[name]
    return (None if limit is not None and limit < 0 else limit), name


def parse_options(
    fields: FieldReader,
    max_new_tokens: int,
    limit_name: str,
    defaults: Mapping[str, Any],
    schema: dict[str, Any] | None = None,
    schema_field: str = "response_format",
) -> tuple[dict[str, Any], OutputRules, dict[str, str]]:
    """Parse and validate the options of a request.

    Args:
        fields: Fields of the request's body.
        max_new_tokens: Maximum number of new tokens.
        limit_name: Field that sets `max_new_tokens`, for errors.
        defaults: Values of options that the request omits.
        schema: JSON schema of the response format.
        schema_field: Field that sets the response format.

    Returns:
        The pipeline's options, the output rules, and the field of each option that has another
        name in the request.
    """
    option_fields = {name: f"speculative.{name}" for name in SPECULATIVE}
    option_fields["max_new_tokens"] = limit_name
    for option, names in OPTIONS.items():
        if name := next((name for name in names if fields.peek(name) is not None), None):
            option_fields[option] = name
    options = {name: fields.take(*fields_of) for name, fields_of in OPTIONS.items()}
    options = {name: value for name, value in options.items() if value is not None}
    _normalize(options, option_fields)
    if fields.take_flag("ignore_eos"):
        options["ignore_eos"] = True
    text_biases = _split_biases(options)
    for name, grammars in (
        ("structured_outputs", _parse_structured_outputs(fields)),
        ("guided_choice", _parse_choice_list(fields)),
    ):
        options |= grammars
        option_fields |= dict.fromkeys(grammars, name)
    options |= _parse_speculative(fields.take_object("speculative"))
    options = {**defaults, "max_new_tokens": max_new_tokens} | options
    if schema is not None:
        if "json_schema" in options:
            message = "json_schema and a response format cannot be combined; omit one of them"
            raise ApiError(message, "json_schema", "invalid_value")
        options["json_schema"] = schema
        option_fields["json_schema"] = schema_field
    _check_options(options, option_fields)
    try:
        request = build_request(**options)
    except OptionError as error:
        raise field_error(error, option_fields) from error
    if (grammar := request.grammar_option) and len(grammar[1]) > MAX_GRAMMAR:
        name = option_fields[grammar[0]]
        message = f"{name} must have at most {MAX_GRAMMAR} characters"
        raise ApiError(message, name, "invalid_value")
    rules = OutputRules(
        stop_tokens=_parse_stop_tokens(fields),
        include_stop=fields.take_flag("include_stop_str_in_output"),
        show_special=not fields.take_flag("skip_special_tokens", True),
        text_biases=text_biases,
    )
    return options, rules, option_fields


def field_error(error: OptionError, option_fields: Mapping[str, str]) -> ApiError:
    """Return the API error for an invalid option, which names the request's field."""
    option = error.option
    name = option_fields.get(option, option) if option else None
    limit_name = option_fields.get("max_new_tokens", "max_new_tokens")
    message = str(error).replace("max_new_tokens", limit_name)
    if option and name and "." not in name:
        message = re.sub(rf"^{option}\b", name, message)
    return ApiError(message, name, "invalid_value")


def _normalize(options: dict[str, Any], option_fields: Mapping[str, str]) -> None:
    """Normalize values that disable an option, and integers written as floats."""
    for name in ("top_k", "seed", "min_new_tokens", "no_repeat_ngram_size"):
        value = options.get(name)
        if isinstance(value, float) and value.is_integer():
            options[name] = int(value)
    if options.get("top_k") == -1:
        options["top_k"] = 0
    if options.get("seed") == -1:  # a random seed
        del options["seed"]
    if options.get("min_p") == 0 or options.get("min_p") == -1:
        options["min_p"] = 0.0
    if type(options.get("top_p")) in (int, float) and options["top_p"] == 0:  # most likely token
        options |= {"top_p": 1.0, "temperature": 0}
    if "stop" in options:
        stop = options["stop"]
        stops = [stop] if isinstance(stop, str) else stop
        if isinstance(stops, list):
            options["stop"] = [text for text in stops if text not in ("", None)]
    for name in ("json_schema", "regex", "grammar"):
        if options.get(name) == "":
            del options[name]
    grammar = options.get("grammar")
    if isinstance(grammar, str) and "::=" in grammar:
        options["grammar"] = _lark_of_gbnf(grammar, option_fields.get("grammar", "grammar"))


def _lark_of_gbnf(grammar: str, name: str) -> str:
    """Convert a grammar from llama.cpp's GBNF to Lark syntax."""
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        return grammar  # the pipeline's error names the missing package
    if len(grammar) > MAX_GRAMMAR:
        return grammar
    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # gbnf_to_lark raises no specific type
        message = f"{name} is not valid GBNF: {' '.join(str(error).split())[:200]}"
        raise ApiError(message, name, "invalid_value") from error


def _split_biases(options: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    """Remove the biases of texts from `logit_bias` and return them.

    OpenAI and vLLM use an object by token id. llama.cpp also accepts texts as keys, and a list of
    pairs, in which false bans a token.
    """
    biases = options.get("logit_bias")
    if biases is None or biases == [] or biases == {}:
        options.pop("logit_bias", None)
        return ()
    pairs = list(biases.items()) if isinstance(biases, dict) else biases
    is_pairs = isinstance(pairs, list) and all(isinstance(p, list | tuple) for p in pairs)
    if not is_pairs or any(len(pair) != 2 for pair in pairs) or len(pairs) > MAX_ENTRIES:
        return ()  # rejected with the other options
    by_token: dict[Any, Any] = {}
    by_text: list[tuple[str, float]] = []
    for key, bias in pairs:
        value = -100.0 if bias is False else bias
        if isinstance(key, str) and not re.fullmatch(r"\s*[+-]?\d+\s*", key):
            if type(value) not in (int, float) or not -100 <= value <= 100:
                message = f"logit_bias must have numbers from -100 to 100, got {excerpt(value)}"
                raise ApiError(message, "logit_bias", "invalid_value")
            by_text.append((key, float(value)))
        elif not isinstance(key, str | int):
            message = f"logit_bias must map token ids or texts to numbers, got {excerpt(key)}"
            raise ApiError(message, "logit_bias", "invalid_type")
        else:
            by_token[key] = value
    options["logit_bias"] = by_token
    if not by_token:
        del options["logit_bias"]
    return tuple(by_text)


def _parse_structured_outputs(fields: FieldReader) -> dict[str, Any]:
    """Return the grammar option set by vLLM's `structured_outputs`, if any."""
    outputs = fields.take_object("structured_outputs")
    if outputs is None:
        return {}
    options = {
        "json_schema": outputs.take("json"),
        "regex": outputs.take("regex"),
        "grammar": outputs.take("grammar"),
    }
    if outputs.take_flag("json_object"):
        options["json_schema"] = {"type": "object"}
    outputs.reject_unsupported({"structural_tag": ()})
    options |= _parse_choice_list(outputs, "choice")
    outputs.finish()
    options = {name: value for name, value in options.items() if value is not None}
    _normalize(options, {"grammar": "structured_outputs"})
    return options


def _parse_choice_list(fields: FieldReader, name: str = "guided_choice") -> dict[str, Any]:
    """Return a grammar that allows the texts listed in a field, if it is present."""
    choices = fields.take_list(name, "a list of texts")
    if not choices:
        return {}
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise fields.error(name, f"{name} must be a list of texts, got {excerpt(choices)}")
    literals = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return {"grammar": f"start: {literals}"}


def _parse_stop_tokens(fields: FieldReader) -> tuple[int, ...]:
    name = "stop_token_ids"
    tokens = fields.take_list(name, "a list of token ids")
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise fields.error(name, f"{name} must be a list of token ids, got {excerpt(tokens)}")
    if len(tokens) > MAX_ENTRIES:
        raise fields.error(name, f"{name} must have at most {MAX_ENTRIES} entries")
    return tuple(tokens)


def _check_options(options: Mapping[str, Any], option_fields: Mapping[str, str]) -> None:
    """Raise ApiError for booleans, which Python accepts as numbers, and for long lists."""
    for name, value in options.items():
        if isinstance(value, bool) and name != "ignore_eos":
            name = option_fields.get(name, name)
            raise ApiError(f"{name} must not be {json.dumps(value)}", name, "invalid_type")
    for name in LIST_OPTIONS:
        value = options.get(name)
        if isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
            message = f"{name} must have at most {MAX_ENTRIES} entries, got {len(value)}"
            raise ApiError(message, name, "invalid_value")
    words = options.get("bad_words")
    if isinstance(words, str | list) and _num_characters(words) > MAX_BAD_WORDS:
        message = f"bad_words must have at most {MAX_BAD_WORDS} characters in total"
        raise ApiError(message, "bad_words", "invalid_value")


def _num_characters(words: str | list[Any]) -> int:
    texts = [words] if isinstance(words, str) else words
    return sum(len(text) for text in texts if isinstance(text, str))


def _parse_speculative(fields: FieldReader | None) -> dict[str, Any]:
    """Return drafter and number of draft tokens; clients cannot specify n-gram files."""
    if fields is None:
        return {}
    drafter = fields.take_typed("drafter", str, "a name")
    k, is_off = fields.take("num_draft_tokens"), fields.take_flag("off")
    fields.finish()
    if drafter is not None and drafter not in [*DrafterName]:
        names = ", ".join(DrafterName)
        raise fields.error("drafter", f"drafter must be one of {names}, got {excerpt(drafter)}")
    if is_off and (drafter or k):
        raise fields.error(
            "off", "off cannot be combined with drafter and num_draft_tokens; omit these"
        )
    if isinstance(k, bool):
        message = "num_draft_tokens must be a whole number or auto"
        raise fields.error("num_draft_tokens", message, "invalid_type")
    options = {"drafter": drafter, "num_draft_tokens": 0 if is_off else k}
    return {name: value for name, value in options.items() if value is not None}
