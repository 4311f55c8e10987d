"""Request parsing: from the JSON body to the prompts and options of the pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specedge.errors import MissingExtraError, OptionError, PromptError
from specedge.request import GRAMMARS, build_request
from specedge.runtime.requests.pipeline import Pipeline

from .errors import UNSUPPORTED, ApiError, prompt_error
from .fields import (
    DEFAULTS,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    NEUTRAL,
    FieldReader,
    excerpt,
    field_of,
    parse_options,
)
from .messages import Message, has_tool_calls, parse_messages
from .response_format import parse_chat_format, parse_responses_format
from .tools.call_format import CallFormat, call_format_of
from .tools.declarations import ToolSet, parse_chat_tools, parse_responses_tools

DEFAULT_COMPLETION = 16  # tokens, as in OpenAI's API


@dataclass(frozen=True)
class ParsedRequest:
    """A request whose fields are checked.

    Attributes:
        prompts: Text, token ids or messages each.
        options: Options of the pipeline's request.
        prompt_field: The field that holds the prompts.
        num_choices_each: Number of choices of each prompt (`n`).
        stream: True if the response is a stream of events.
        include_usage: True if the stream ends with the usage.
        trace: True if a stream reports the outcome of each token.
        echoed: Fields that the response repeats.
        format_field: The field that sets a JSON schema as response format, if one does.
        tools: Functions that the model may call.
    """

    prompts: list[Any]
    options: dict[str, Any]
    prompt_field: str
    num_choices_each: int = 1
    stream: bool = False
    include_usage: bool = False
    trace: bool = False
    echoed: dict[str, Any] = field(default_factory=dict)
    format_field: str | None = None
    tools: ToolSet | None = None

    @property
    def num_choices(self) -> int:
        """Return the number of texts of all prompts."""
        return len(self.prompts) * self.num_choices_each

    @property
    def has_grammar(self) -> bool:
        """Return True if the request may need a compiled grammar."""
        return self.tools is not None or any(name in self.options for name in GRAMMARS)


@dataclass(frozen=True)
class PreparedRequest:
    """Token ids of each prompt, options of the pipeline, and the format of calls, if any."""

    prompts: list[list[int]]
    options: dict[str, Any]
    call_format: CallFormat | None = None
    visible_tokens: frozenset[int] = frozenset()


def parse_chat(
    body: object, context_length: int, defaults: Mapping[str, Any] = DEFAULTS
) -> ParsedRequest:
    """Parse the body of a /v1/chat/completions request.

    Args:
        body: The parsed JSON.
        context_length: The maximum number of tokens of a text.
        defaults: Options that apply where the body leaves them out.

    Raises:
        ApiError: A field is unknown or its value invalid.
    """
    fields = FieldReader(body)
    messages = parse_messages(fields.take("messages"), "messages")
    tools = parse_chat_tools(fields)
    limits = {name: fields.take_int(name, 1) for name in ("max_completion_tokens", "max_tokens")}
    name = next((name for name, limit in limits.items() if limit is not None), "max_tokens")
    response_format = parse_chat_format(fields)
    limit = limits[name] or context_length
    options = parse_options(fields, limit, name, defaults, response_format.schema)
    has_logprobs = fields.take_flag("logprobs")
    top = fields.take_int("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top is not None and not has_logprobs:
        raise ApiError("top_logprobs needs logprobs", "top_logprobs", "invalid_value")
    if has_logprobs:
        options["logprobs"] = top or 0
    return _finish(
        fields,
        "chat",
        ParsedRequest(
            [messages],
            options,
            "messages",
            format_field=response_format.schema_field,
            tools=tools,
        ),
    )


def parse_completion(
    body: object, context_length: int, defaults: Mapping[str, Any] = DEFAULTS
) -> ParsedRequest:
    """Parse the body of a /v1/completions request, with the arguments of `parse_chat`."""
    fields = FieldReader(body)
    prompts = _parse_prompts(fields.take("prompt"))
    limit = fields.take_int("max_tokens", 1) or min(DEFAULT_COMPLETION, context_length)
    options = parse_options(fields, limit, "max_tokens", defaults)
    if (top := fields.take_int("logprobs", 0, MAX_TOP_LOGPROBS)) is not None:
        options["logprobs"] = top
    return _finish(fields, "completions", ParsedRequest(prompts, options, "prompt"))


def parse_response(
    body: object, context_length: int, defaults: Mapping[str, Any] = DEFAULTS
) -> ParsedRequest:
    """Parse the body of a /v1/responses request, with the arguments of `parse_chat`."""
    fields = FieldReader(body)
    tools_value, tool_choice = fields.peek("tools"), fields.peek("tool_choice")
    input_items = fields.take("input")
    if isinstance(input_items, str):
        input_items = [{"role": "user", "content": input_items}]
    messages = parse_messages(input_items, "input")
    instructions = fields.take_typed("instructions", str, "text")
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    limit = fields.take_int("max_output_tokens", 1)
    tools = parse_responses_tools(fields)
    response_format = parse_responses_format(fields)
    options = parse_options(
        fields, limit or context_length, "max_output_tokens", defaults, response_format.schema
    )
    echoed = {"instructions": instructions, "max_output_tokens": limit}
    echoed["metadata"] = fields.take_typed("metadata", dict, "an object") or {}
    echoed |= {"text": {"format": response_format.value}}
    if tools is not None:
        echoed |= {"tools": tools_value, "tool_choice": tool_choice or "auto"}
        echoed |= {"parallel_tool_calls": tools.parallel}
    return _finish(
        fields,
        "responses",
        ParsedRequest(
            [messages],
            options,
            "input",
            echoed=echoed,
            format_field=response_format.schema_field,
            tools=tools,
        ),
    )


def _finish(fields: FieldReader, endpoint: str, request: ParsedRequest) -> ParsedRequest:
    """Take the fields that all endpoints have, and refuse the rest."""
    fields.take_typed("model", str, "a name")
    num_choices, trace = 1, False
    if endpoint != "responses":
        num_choices = fields.take_int("n", 1, MAX_CHOICES) or 1
        trace = fields.take_flag("trace")
    stream, include_usage = fields.take_flag("stream"), False
    stream_options = fields.take_object("stream_options")
    if stream_options is not None:
        if not stream:
            raise ApiError("stream_options needs stream", "stream_options", "invalid_value")
        include_usage = stream_options.take_flag("include_usage")
        stream_options.take_flag("include_obfuscation")
        stream_options.finish()
    fields.skip_neutral(NEUTRAL[endpoint])
    fields.finish()
    if request.tools is not None:
        _check_no_grammar(request)
    return dataclasses.replace(
        request,
        num_choices_each=num_choices,
        stream=stream,
        include_usage=include_usage,
        trace=trace,
    )


def _check_no_grammar(request: ParsedRequest) -> None:
    """Raise ApiError if another grammar constrains a text that may call functions."""
    if name := next((name for name in GRAMMARS if name in request.options), None):
        is_format = name == "json_schema" and request.format_field
        param = request.format_field if is_format else name
        raise ApiError(
            f"{param} and tools cannot both be given; leave one out, or set tool_choice to none",
            param,
            "invalid_value",
        )


def prepare(pipeline: Pipeline, request: ParsedRequest) -> PreparedRequest:
    """Render and tokenize the prompts of a request.

    Raises:
        ApiError: The pipeline does not take the prompts or the options.
    """
    is_chat = request.prompt_field != "prompt"
    if is_chat and pipeline.bundle.chat_template is None:
        raise ApiError(
            f"{pipeline.bundle.target.source.id} has no chat template; use /v1/completions",
            request.prompt_field,
            "no_chat_template",
        )
    chats: list[list[Message]] = request.prompts if is_chat else []
    if request.tools is None and not any(map(has_tool_calls, chats)):
        tokens = _tokenize(pipeline, request, request.prompts, request.options)
        return PreparedRequest(tokens, request.options)
    call_format = call_format_of(
        pipeline.bundle, pipeline.tokenizer, request.tools, request.prompt_field
    )
    grammar = {} if call_format.grammar is None else {"grammar": call_format.grammar}
    options = request.options | grammar
    prompts = [call_format.convert_messages(chat) for chat in chats]
    tokens = _tokenize(pipeline, request, prompts, options, call_format.template_tools)
    return PreparedRequest(
        tokens, options, call_format if request.tools else None, call_format.visible_tokens
    )


def _tokenize(
    pipeline: Pipeline,
    request: ParsedRequest,
    prompts: list[Any],
    options: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
) -> list[list[int]]:
    """Return the token ids of each prompt, and check the options with the pipeline."""
    try:
        pipeline.sampling(build_request(**options))
        return [pipeline.prompts.tokens_of(prompt, tools=tools) for prompt in prompts]
    except OptionError as error:
        raise option_error(error, request) from error
    except PromptError as error:
        raise prompt_error(error, request.prompt_field) from error
    except MissingExtraError as error:
        raise ApiError(str(error), code=UNSUPPORTED) from error


def option_error(error: OptionError, request: ParsedRequest) -> ApiError:
    """Return the client's error for an option, with the field of the request that set it."""
    name = None
    if error.option == "json_schema":
        name = request.format_field
    elif error.option == "grammar" and "grammar" not in request.options:
        name = "tools"
    message = str(error) if name is None else f"{name}: {error}"
    return ApiError(message, name or field_of(error.option), "invalid_value")


def _parse_prompts(prompt: object) -> list[Any]:
    """Return a list of prompts: text or token ids each."""
    if isinstance(prompt, str) or _is_token_ids(prompt):
        return [prompt]
    items = prompt if isinstance(prompt, list) else []
    if items and all(isinstance(item, str) or _is_token_ids(item) for item in items):
        return items
    raise ApiError(
        f"prompt must be text, token ids, or a list of either, got {excerpt(prompt)}",
        "prompt",
        "invalid_type",
    )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
