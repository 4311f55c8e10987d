"""The fields of OpenAI's requests: which are supported, under which names, and what others mean.

docs/clients.md has the table of them all, which a test compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from specedge.errors import OptionError
from specedge.option_specs import suggest
from specedge.request import GRAMMARS, DrafterName, build_request

from .errors import UNSUPPORTED, ApiError

ANY = object()

# Options of a request by their names in the API.
OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "seed": "seed",
    "stop": "stop",
}
DEFAULTS = {"temperature": 1.0}  # of OpenAI's API, where they are not specedge's own
# Those that OpenAI's API does not have: of their own names.
OWN = (
    "top_k", "min_p", "typical_p", "repetition_penalty", "bad_words", "min_new_tokens", "coupling",
    *GRAMMARS,
)  # fmt: skip
MAX_GRAMMAR = 2**16  # characters: of more, some take seconds to read
LISTS = ("stop", "logit_bias", "bad_words")
MAX_BAD_WORDS = 2**16  # characters: a megabyte takes seconds to tokenize
MAX_LISTED = 1024  # entries of one of these: each takes time in every round, and others wait
SPECULATIVE = ("drafter", "num_draft_tokens", "off")

# Fields without an effect, with the values that they may have: what is done in any case.
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


class Fields:
    """The fields of a request's object, each taken once; null is not given."""

    def __init__(self, facts: object) -> None:
        if not isinstance(facts, dict):
            raise ApiError("the body must be a JSON object", code="invalid_type")
        self._left = {name: value for name, value in facts.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str) -> Any:
        self._known.append(name)
        return self._left.pop(name, None)

    def peek(self, name: str) -> Any:
        """A field that is yet to be taken."""
        return self._left.get(name)

    def typed(self, name: str, kind: type, what: str) -> Any:
        """A field of one type; `what` says which."""
        value = self.take(name)
        if value is not None and type(value) is not kind:
            raise ApiError(f"{name} must be {what}, got {shown(value)}", name, "invalid_type")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.typed(name, bool, "true or false"))

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        value: int | None = self.typed(name, int, "a whole number")
        if value is not None and (value < least or (most is not None and value > most)):
            limits = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ApiError(f"{name} must be {limits}, got {shown(value)}", name, "invalid_value")
        return value

    def skip(self, neutral: dict[str, Any]) -> None:
        """Take what has no effect; any other value of it is refused."""
        for name, values in neutral.items():
            value = self.take(name)
            if value is None or values is ANY or any(_same(value, one) for one in values):
                continue
            may = f", or be {' or '.join(map(json.dumps, values))}" if values else ""
            raise ApiError(
                f"{name} is not supported yet, got {shown(value)}; it must be left out{may}",
                name,
                UNSUPPORTED,
            )

    def end(self) -> None:
        """Refuse what was not taken."""
        for name in self._left:
            hint = suggest(name, self._known)
            raise ApiError(f"there is no field {shown(name)}{hint}", name[:100], "unknown_field")


@contextmanager
def within(place: str) -> Iterator[None]:
    """Errors inside name the place of the object that they are about."""
    try:
        yield
    except ApiError as error:
        error.param = f"{place}.{error.param}"
        error.message = f"{place}: {error.message}"
        raise


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def shown(value: Any) -> str:
    """A value in an error, cut."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."


def options_of(
    fields: Fields,
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
        schema: The JSON schema of the answer's format.
    """
    names = OPTIONS | {name: name for name in OWN}
    given = {
        ours: value for name, ours in names.items() if (value := fields.take(name)) is not None
    }
    if ignores := fields.flag("ignore_eos"):
        given["ignore_eos"] = ignores
    given |= _speculative(fields.typed("speculative", dict, "an object"))
    given = {**defaults, "max_new_tokens": max_new_tokens} | given
    if schema is not None:
        if "json_schema" in given:
            said = "json_schema and a format of the answer cannot both be given; leave one out"
            raise ApiError(said, "json_schema", "invalid_value")
        given["json_schema"] = schema
    for name, value in given.items():
        if isinstance(value, bool) and name != "ignore_eos":
            raise ApiError(f"{name} must not be {json.dumps(value)}", name, "invalid_type")
    for name in LISTS:
        value = given.get(name)
        if isinstance(value, list | dict) and len(value) > MAX_LISTED:
            said = f"{name} must have at most {MAX_LISTED} entries, got {len(value)}"
            raise ApiError(said, name, "invalid_value")
    words = given.get("bad_words")
    if isinstance(words, str | list) and _num_characters(words) > MAX_BAD_WORDS:
        said = f"bad_words must have at most {MAX_BAD_WORDS} characters together"
        raise ApiError(said, "bad_words", "invalid_value")
    try:
        request = build_request(**given)
    except OptionError as error:
        message = str(error).replace("max_new_tokens", limit_name)
        is_limit = error.option == "max_new_tokens"
        param = limit_name if is_limit else field_of(error.option)
        raise ApiError(message, param, "invalid_value") from error
    if (grammar := request.grammar_given) and len(grammar[1]) > MAX_GRAMMAR:
        said = f"{grammar[0]} must have at most {MAX_GRAMMAR} characters"
        raise ApiError(said, grammar[0], "invalid_value")
    return given


def _num_characters(words: str | list[Any]) -> int:
    texts = [words] if isinstance(words, str) else words
    return sum(len(text) for text in texts if isinstance(text, str))


def field_of(option: str | None) -> str | None:
    """Return the field of a request that gives an option of the pipeline."""
    return f"speculative.{option}" if option in SPECULATIVE else option


def _speculative(facts: dict[str, Any] | None) -> dict[str, Any]:
    """What drafts: a name, never a file or an object of one's own, and how many tokens a round."""
    if facts is None:
        return {}
    fields = Fields(facts)
    try:
        drafter = fields.typed("drafter", str, "a name")
        k, off = fields.take("num_draft_tokens"), fields.flag("off")
        fields.end()
    except ApiError as error:
        error.param = f"speculative.{error.param}"
        error.message = f"speculative: {error.message}"
        raise
    if drafter is not None and drafter not in [*DrafterName]:
        names = ", ".join(DrafterName)
        raise ApiError(
            f"speculative.drafter must be one of {names}, got {shown(drafter)}",
            "speculative.drafter",
            "invalid_value",
        )
    if off and (drafter or k):
        raise ApiError(
            "speculative.off leaves nothing to draft; leave drafter and num_draft_tokens out",
            "speculative.off",
            "invalid_value",
        )
    if isinstance(k, bool):
        name = "speculative.num_draft_tokens"
        raise ApiError(f"{name} must be a whole number or auto", name, "invalid_type")
    found = {"drafter": drafter, "num_draft_tokens": 0 if off else k}
    return {name: value for name, value in found.items() if value is not None}
