"""From the body of a request to what the pipeline is asked: prompts and options, all checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specedge.request import GRAMMARS, request_of
from specedge.runtime.pipeline import Pipeline

from . import formats
from .errors import UNSUPPORTED, ApiError, refused
from .fields import ANY, MAX_CHOICES, MAX_TOP_LOGPROBS, NEUTRAL, Fields, options_of, shown

ROLES = ("system", "developer", "user", "assistant")
DEFAULT_COMPLETION = 16  # tokens, as in OpenAI's API
TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Asked:
    """What a client asks for. `prompts` are a text, token ids or messages each, with `n` choices.

    With `trace` a stream tells what became of each token. `facts` are those of its fields that an
    answer repeats, `form` is the one that may have given a JSON schema.
    """

    prompts: list[Any]
    options: dict[str, Any]
    n: int
    stream: bool
    include_usage: bool
    trace: bool
    where: str  # the field that holds the prompts
    facts: dict[str, Any]
    form: str | None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def has_grammar(self) -> bool:
        return any(name in self.options for name in GRAMMARS)


def chat(facts: object, longest: int) -> Asked:
    """Of /v1/chat/completions; `longest` is as many tokens as there can be."""
    fields = Fields(facts)
    messages = _messages(fields.take("messages"), "messages")
    limits = {name: fields.whole(name, 1) for name in ("max_completion_tokens", "max_tokens")}
    name = next((name for name, limit in limits.items() if limit is not None), "max_tokens")
    form = formats.of_chat(fields)
    options = options_of(fields, limits[name] or longest, name, form.schema)
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise ApiError("top_logprobs needs logprobs", "top_logprobs", "invalid_value")
    if wanted:
        options["logprobs"] = top or 0
    return _asked(fields, "chat", "messages", [messages], options, form=form.name)


def completions(facts: object, longest: int) -> Asked:
    """Of /v1/completions."""
    fields = Fields(facts)
    prompts = _prompts(fields.take("prompt"))
    limit = fields.whole("max_tokens", 1)
    options = options_of(fields, limit or min(DEFAULT_COMPLETION, longest), "max_tokens")
    if (top := fields.whole("logprobs", 0, MAX_TOP_LOGPROBS)) is not None:
        options["logprobs"] = top
    return _asked(fields, "completions", "prompt", prompts, options)


def responses(facts: object, longest: int) -> Asked:
    """Of /v1/responses: a text or messages in, a text out; nothing is stored."""
    fields = Fields(facts)
    given = fields.take("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages = _messages(given, "input")
    instructions = fields.typed("instructions", str, "text")
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    limit = fields.whole("max_output_tokens", 1)
    form = formats.of_responses(fields)
    options = options_of(fields, limit or longest, "max_output_tokens", form.schema)
    repeated = {"instructions": instructions, "max_output_tokens": limit}
    repeated["metadata"] = fields.typed("metadata", dict, "an object") or {}
    repeated |= {"text": {"format": form.facts}}
    return _asked(fields, "responses", "input", [messages], options, repeated, form.name)


def _asked(
    fields: Fields,
    endpoint: str,
    where: str,
    prompts: list[Any],
    options: dict[str, Any],
    facts: dict[str, Any] | None = None,
    form: str | None = None,
) -> Asked:
    fields.typed("model", str, "a name")
    n, trace = 1, False
    if endpoint != "responses":
        n, trace = fields.whole("n", 1, MAX_CHOICES) or 1, fields.flag("trace")
    stream, include_usage = fields.flag("stream"), False
    given = fields.typed("stream_options", dict, "an object")
    if given is not None:
        if not stream:
            raise ApiError("stream_options needs stream", "stream_options", "invalid_value")
        inner = Fields(given)
        include_usage = inner.flag("include_usage")
        inner.flag("include_obfuscation")
        inner.end()
    fields.skip(NEUTRAL[endpoint])
    fields.end()
    return Asked(prompts, options, n, stream, include_usage, trace, where, facts or {}, form)


def tokens_of(pipeline: Pipeline, asked: Asked) -> list[list[int]]:
    """The tokens of each prompt, which the pipeline will take with these options; else ApiError."""
    if asked.where != "prompt" and pipeline.bundle.chat_template is None:
        raise ApiError(
            f"{pipeline.bundle.target.source.id} has no chat template; ask /v1/completions",
            asked.where,
            "no_chat_template",
        )
    try:
        pipeline.sampling(request_of(**asked.options))
        return [pipeline.prompts.tokens_of(prompt) for prompt in asked.prompts]
    except ValueError as error:
        name = str(error).split()[0]
        param, said = name if name in asked.options else None, str(error)
        if param == "json_schema" and asked.form is not None:
            param, said = asked.form, f"{asked.form}: {said}"
        raise ApiError(said, param, "invalid_value") from error
    except Exception as error:
        raise refused(error, asked.where) from error


def _prompts(given: object) -> list[Any]:
    """A text, texts, token ids, or lists of these."""
    if isinstance(given, str) or _are_ids(given):
        return [given]
    if isinstance(given, list) and given and all(isinstance(p, str) or _are_ids(p) for p in given):
        return given
    raise ApiError(
        f"prompt must be text, token ids, or a list of either, got {shown(given)}",
        "prompt",
        "invalid_type",
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def _messages(given: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise ApiError(f"{where} must be a list of at least one message", where, "invalid_type")
    return [_message(message, f"{where}[{i}]") for i, message in enumerate(given)]


def _message(given: object, place: str) -> dict[str, Any]:
    fields = Fields(given) if isinstance(given, dict) else None
    if fields is None:
        raise ApiError(f"{place} must be an object with a role and a content", place)
    try:
        role, content = fields.take("role"), _text(fields.take("content"), place)
        name = fields.typed("name", str, "text")
        fields.skip({"tool_calls": ([],), "function_call": (), "audio": (), "refusal": ()})
        fields.skip({"type": ("message",), "id": ANY, "status": ("completed", "incomplete")})
        fields.end()
    except ApiError as error:
        if error.param and not error.param.startswith(place):
            error.param = f"{place}.{error.param}"
            error.message = f"{place}: {error.message}"
        raise
    if role not in ROLES:
        raise ApiError(
            f"{place}.role must be one of {', '.join(ROLES)}, got {shown(role)}",
            f"{place}.role",
            UNSUPPORTED,
        )
    role = "system" if role == "developer" else role
    return {"role": role, "content": content} | ({"name": name} if name is not None else {})


def _text(content: object, place: str) -> str:
    """A content that is text, or parts of text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_part(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    raise ApiError(
        f"{place}.content must be text or a list of text parts, got {shown(content)}",
        f"{place}.content",
        "invalid_type",
    )


def _part(part: object, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if isinstance(part, dict) and kind in TEXT_PARTS and isinstance(part.get("text"), str):
        fields = Fields(part)
        fields.skip({"type": TEXT_PARTS, "annotations": ANY, "logprobs": ANY})
        text = str(fields.take("text"))
        try:
            fields.end()
        except ApiError as error:
            error.param, error.message = f"{place}.{error.param}", f"{place}: {error.message}"
            raise
        return text
    raise ApiError(f"{place} must be a text, got {shown(kind)}", place, UNSUPPORTED)
