"""Typed access to the fields of a request, and the sampling options that they set.

docs/clients.md has a table of all fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specedge.errors import OptionError
from specedge.option_specs import suggest
from specedge.request import GRAMMARS, DrafterName, build_request

from .errors import UNSUPPORTED, ApiError

ANY = object()

# Fields of the API by the name of the request's option.
OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "seed": "seed",
    "stop": "stop",
}
DEFAULTS = {"temperature": 1.0}  # of OpenAI's API, where they differ from the pipeline's
# Options that OpenAI's API lacks, under their own names.
EXTENSIONS = (
    "top_k", "min_p", "typical_p", "repetition_penalty", "bad_words", "min_new_tokens", "coupling",
    *GRAMMARS,
)  # fmt: skip
MAX_GRAMMAR = 2**16  # characters: longer ones can take seconds to parse
LIST_OPTIONS = ("stop", "logit_bias", "bad_words")
MAX_BAD_WORDS = 2**16  # characters: a megabyte takes seconds to tokenize
MAX_ENTRIES = 1024  # of a list option: each costs time in every round, and delays other requests
SPECULATIVE = ("drafter", "num_draft_tokens", "off")

# Fields without an effect, with the values that are accepted: those that ask for the default.
_COMMON: dict[str, Any] = {
    "user": ANY,
    "safety_identifier": ANY,
    "prompt_cache_key": ANY,
    "service_tier": ("auto", "default"),
}
NEUTRAL: dict[str, dict[str, Any]] = {
    "chat": _COMMON
    | {
        "metadata": ANY,
        "modalities": (["text"],),
        "store": (False,),
        "functions": ([],),
        "function_call": ("none",),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "prediction": (),
        "audio": (),
        "web_search_options": (),
    },
    "completions": _COMMON | {"metadata": ANY, "best_of": (1,), "echo": (False,), "suffix": ("",)},
    "responses": _COMMON
    | {
        "store": (False,),
        "background": (False,),
        "truncation": ("disabled",),
        "include": ([],),
        "max_tool_calls": (),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "reasoning": ({}, {"effort": "none"}),
    },
}
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20


class FieldReader:
    """Reads each field of a JSON object once; null means absent.

    Args:
        value: The object.
        path: Its path in the body, for errors; empty for the body itself.
    """

    def __init__(self, value: object, path: str = "") -> None:
        self.path = path
        if not isinstance(value, dict):
            name = path or "the body"
            message = f"{name} must be a JSON object"
            message += f", got {excerpt(value)}" if path else ""
            raise ApiError(message, path or None, "invalid_type")
        self._fields = {name: value for name, value in value.items() if value is not None}
        self._names: list[str] = []

    def take(self, name: str) -> Any:
        """Return a field's value, None if it is absent."""
        self._names.append(name)
        return self._fields.pop(name, None)

    def peek(self, name: str) -> Any:
        """Return the value of a field that is yet to be taken."""
        return self._fields.get(name)

    def take_typed(self, name: str, value_type: type, description: str) -> Any:
        """Return a field's value of exactly one type, which `description` names."""
        value = self.take(name)
        if value is not None and type(value) is not value_type:
            raise self.error(
                name, f"{name} must be {description}, got {excerpt(value)}", "invalid_type"
            )
        return value

    def take_flag(self, name: str) -> bool:
        return bool(self.take_typed(name, bool, "true or false"))

    def take_int(self, name: str, minimum: int, maximum: int | None = None) -> int | None:
        value: int | None = self.take_typed(name, int, "a whole number")
        if value is not None and (value < minimum or (maximum is not None and value > maximum)):
            limits = (
                f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
            )
            raise self.error(name, f"{name} must be {limits}, got {excerpt(value)}")
        return value

    def take_object(self, name: str) -> FieldReader | None:
        """Return a reader of a field's object, None if it is absent."""
        value = self.take_typed(name, dict, "an object")
        return None if value is None else FieldReader(value, self.path_of(name))

    def require_object(self, name: str) -> FieldReader:
        """Return a reader of a field's object, which must be present."""
        fields = self.take_object(name)
        if fields is None:
            raise self.error(name, f"{name} must be given")
        return fields

    def skip_neutral(self, neutral: Mapping[str, Any]) -> None:
        """Take fields without an effect; refuse values that ask for one."""
        for name, values in neutral.items():
            value = self.take(name)
            if value is None or values is ANY or any(_is_same(value, other) for other in values):
                continue
            allowed = f", or be {' or '.join(map(json.dumps, values))}" if values else ""
            raise self.error(
                name,
                f"{name} is not supported yet, got {excerpt(value)}; it must be left out{allowed}",
                UNSUPPORTED,
            )

    def finish(self) -> None:
        """Refuse fields that were not taken."""
        for name in self._fields:
            hint = suggest(name, self._names)
            raise self.error(
                name[:100], f"there is no field {excerpt(name)}{hint}", "unknown_field"
            )

    def path_of(self, name: str) -> str:
        """Return the path of a field in the body."""
        return f"{self.path}.{name}" if self.path else name

    def error(self, name: str, message: str, code: str = "invalid_value") -> ApiError:
        """Return an error about a field of this object."""
        return ApiError(
            f"{self.path}: {message}" if self.path else message, self.path_of(name), code
        )


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def excerpt(value: Any) -> str:
    """Return a value as JSON for an error message, cut if it is long."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_options(
    fields: FieldReader,
    max_new_tokens: int,
    limit_name: str,
    defaults: Mapping[str, Any],
    schema: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the checked options of the pipeline's request.

    Args:
        fields: The fields of the request's body.
        max_new_tokens: The limit of the text, which the field `limit_name` gives.
        limit_name: The field's name, for errors.
        defaults: Options that apply where the fields leave them out.
        schema: The JSON schema of the response format.
    """
    names = OPTIONS | {name: name for name in EXTENSIONS}
    options = {
        option: value for name, option in names.items() if (value := fields.take(name)) is not None
    }
    if ignore_eos := fields.take_flag("ignore_eos"):
        options["ignore_eos"] = ignore_eos
    options |= _parse_speculative(fields.take_object("speculative"))
    options = {**defaults, "max_new_tokens": max_new_tokens} | options
    if schema is not None:
        if "json_schema" in options:
            message = "json_schema and a response format cannot both be given; leave one out"
            raise ApiError(message, "json_schema", "invalid_value")
        options["json_schema"] = schema
    _check_options(options)
    try:
        request = build_request(**options)
    except OptionError as error:
        message = str(error).replace("max_new_tokens", limit_name)
        is_limit = error.option == "max_new_tokens"
        param = limit_name if is_limit else field_of(error.option)
        raise ApiError(message, param, "invalid_value") from error
    if (grammar := request.grammar_given) and len(grammar[1]) > MAX_GRAMMAR:
        message = f"{grammar[0]} must have at most {MAX_GRAMMAR} characters"
        raise ApiError(message, grammar[0], "invalid_value")
    return options


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ApiError for booleans, which Python takes for numbers, and for lists that are long."""
    for name, value in options.items():
        if isinstance(value, bool) and name != "ignore_eos":
            raise ApiError(f"{name} must not be {json.dumps(value)}", name, "invalid_type")
    for name in LIST_OPTIONS:
        value = options.get(name)
        if isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
            message = f"{name} must have at most {MAX_ENTRIES} entries, got {len(value)}"
            raise ApiError(message, name, "invalid_value")
    words = options.get("bad_words")
    if isinstance(words, str | list) and _num_characters(words) > MAX_BAD_WORDS:
        message = f"bad_words must have at most {MAX_BAD_WORDS} characters together"
        raise ApiError(message, "bad_words", "invalid_value")


def _num_characters(words: str | list[Any]) -> int:
    texts = [words] if isinstance(words, str) else words
    return sum(len(text) for text in texts if isinstance(text, str))


def field_of(option: str | None) -> str | None:
    """Return the field of a request that sets an option of the pipeline."""
    return f"speculative.{option}" if option in SPECULATIVE else option


def _parse_speculative(fields: FieldReader | None) -> dict[str, Any]:
    """Return the drafter, by name and never a file, and the number of draft tokens."""
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
            "off", "off leaves nothing to draft; leave drafter and num_draft_tokens out"
        )
    if isinstance(k, bool):
        message = "num_draft_tokens must be a whole number or auto"
        raise fields.error("num_draft_tokens", message, "invalid_type")
    options = {"drafter": drafter, "num_draft_tokens": 0 if is_off else k}
    return {name: value for name, value in options.items() if value is not None}
