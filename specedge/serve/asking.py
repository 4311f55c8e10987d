"""From the body of a request to what the pipeline is asked: prompts and options, all checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specedge.errors import MissingExtraError, OptionError, PromptError
from specedge.request import GRAMMARS, build_request
from specedge.runtime.requests.pipeline import Pipeline

from . import formats
from .errors import UNSUPPORTED, ApiError, prompt_error
from .fields import (
    DEFAULTS,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    NEUTRAL,
    Fields,
    field_of,
    options_of,
    shown,
)
from .messages import have_calls, messages_of
from .tools import declared
from .tools.calling import Calling, calling_of
from .tools.declared import Tools

DEFAULT_COMPLETION = 16  # tokens, as in OpenAI's API


@dataclass(frozen=True)
class Asked:
    """What a client asks for. `prompts` are a text, token ids or messages each, with `n` choices.

    With `trace` a stream tells what became of each token. `facts` are those of its fields that an
    answer repeats, `form` is the one that gave a JSON schema, if any. `tools` are functions that
    the model may call.
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
    tools: Tools | None = None

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def has_grammar(self) -> bool:
        """Whether there may be a grammar to compile."""
        return self.tools is not None or any(name in self.options for name in GRAMMARS)


@dataclass(frozen=True)
class Ready:
    """What the pipeline is asked: each prompt's tokens, options, and how calls are read."""

    prompts: list[list[int]]
    options: dict[str, Any]
    calling: Calling | None = None
    shown: frozenset[int] = frozenset()


def chat(facts: object, longest: int, defaults: Mapping[str, Any] = DEFAULTS) -> Asked:
    """Parse the body of a /v1/chat/completions request.

    Args:
        facts: The parsed JSON.
        longest: The most tokens that a text can have.
        defaults: Options that apply where the body leaves them out.

    Raises:
        ApiError: If a field is unknown or its value invalid.
    """
    fields = Fields(facts)
    messages = messages_of(fields.take("messages"), "messages")
    tools = declared.of_chat(fields)
    limits = {name: fields.whole(name, 1) for name in ("max_completion_tokens", "max_tokens")}
    name = next((name for name, limit in limits.items() if limit is not None), "max_tokens")
    form = formats.of_chat(fields)
    options = options_of(fields, limits[name] or longest, name, defaults, form.schema)
    wanted = fields.flag("logprobs")
    top = fields.whole("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise ApiError("top_logprobs needs logprobs", "top_logprobs", "invalid_value")
    if wanted:
        options["logprobs"] = top or 0
    return _asked(
        fields, "chat", "messages", [messages], options, form=form.field_of_schema, tools=tools
    )


def completions(facts: object, longest: int, defaults: Mapping[str, Any] = DEFAULTS) -> Asked:
    """Parse the body of a /v1/completions request, as `chat`."""
    fields = Fields(facts)
    prompts = _prompts(fields.take("prompt"))
    limit = fields.whole("max_tokens", 1)
    options = options_of(fields, limit or min(DEFAULT_COMPLETION, longest), "max_tokens", defaults)
    if (top := fields.whole("logprobs", 0, MAX_TOP_LOGPROBS)) is not None:
        options["logprobs"] = top
    return _asked(fields, "completions", "prompt", prompts, options)


def responses(facts: object, longest: int, defaults: Mapping[str, Any] = DEFAULTS) -> Asked:
    """Parse the body of a /v1/responses request, as `chat`; nothing is stored."""
    fields = Fields(facts)
    given_tools, choice = fields.peek("tools"), fields.peek("tool_choice")
    given = fields.take("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    messages = messages_of(given, "input")
    instructions = fields.typed("instructions", str, "text")
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    limit = fields.whole("max_output_tokens", 1)
    tools = declared.of_responses(fields)
    form = formats.of_responses(fields)
    options = options_of(fields, limit or longest, "max_output_tokens", defaults, form.schema)
    repeated = {"instructions": instructions, "max_output_tokens": limit}
    repeated["metadata"] = fields.typed("metadata", dict, "an object") or {}
    repeated |= {"text": {"format": form.facts}}
    if tools is not None:
        repeated |= {"tools": given_tools, "tool_choice": choice or "auto"}
        repeated |= {"parallel_tool_calls": tools.parallel}
    return _asked(
        fields, "responses", "input", [messages], options, repeated, form.field_of_schema, tools
    )


def _asked(
    fields: Fields,
    endpoint: str,
    where: str,
    prompts: list[Any],
    options: dict[str, Any],
    facts: dict[str, Any] | None = None,
    form: str | None = None,
    tools: Tools | None = None,
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
    if tools is not None:
        _check_alone(options, form)
    return Asked(prompts, options, n, stream, include_usage, trace, where, facts or {}, form, tools)


def _check_alone(options: dict[str, Any], form: str | None) -> None:
    """Nothing else may say what a text with calls follows."""
    if name := next((name for name in GRAMMARS if name in options), None):
        param = form if name == "json_schema" and form else name
        said = f"{param} and tools cannot both be given; leave one out, or let tool_choice be none"
        raise ApiError(said, param, "invalid_value")


def ready(pipeline: Pipeline, asked: Asked) -> Ready:
    """What the pipeline will take; ApiError for what it will not."""
    template = pipeline.bundle.chat_template
    if asked.where != "prompt" and template is None:
        raise ApiError(
            f"{pipeline.bundle.target.source.id} has no chat template; ask /v1/completions",
            asked.where,
            "no_chat_template",
        )
    if asked.tools is None and not any(map(have_calls, _chats(asked))):
        return Ready(_tokens(pipeline, asked, asked.prompts, asked.options), asked.options)
    calling = calling_of(pipeline.bundle, pipeline.tokenizer, asked.tools, asked.where)
    given = {} if calling.grammar is None else {"grammar": calling.grammar}
    options = asked.options | given
    prompts = [calling.messages(chat) for chat in _chats(asked)]
    tokens = _tokens(pipeline, asked, prompts, options, calling.facts)
    return Ready(tokens, options, calling if asked.tools else None, calling.shown)


def _chats(asked: Asked) -> list[list[dict[str, Any]]]:
    return [] if asked.where == "prompt" else asked.prompts


def _tokens(
    pipeline: Pipeline,
    asked: Asked,
    prompts: list[Any],
    options: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
) -> list[list[int]]:
    """The tokens of each prompt, which the pipeline will take with these options."""
    try:
        pipeline.sampling(build_request(**options))
        return [pipeline.prompts.tokens_of(prompt, tools=tools) for prompt in prompts]
    except OptionError as error:
        raise option_error(error, asked) from error
    except PromptError as error:
        raise prompt_error(error, asked.where) from error
    except MissingExtraError as error:
        raise ApiError(str(error), code=UNSUPPORTED) from error


def option_error(error: OptionError, asked: Asked) -> ApiError:
    """Return the client's error for an option, with the field of the request that gave it."""
    name = None
    if error.option == "json_schema":
        name = asked.form
    elif error.option == "grammar" and "grammar" not in asked.options:
        name = "tools"
    message = str(error) if name is None else f"{name}: {error}"
    return ApiError(message, name or field_of(error.option), "invalid_value")


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
