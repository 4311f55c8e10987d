"""Request parsing: conversion of JSON bodies to prompts and options of the pipeline."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from specedge.errors import MissingExtraError, OptionError, PromptError
from specedge.request import GRAMMARS, build_request
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.text.messages import TemplateOptions

from .errors import UNSUPPORTED, ApiError, prompt_error
from .fields import (
    DEFAULTS,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    NEUTRAL,
    UNSUPPORTED_FIELDS,
    FieldReader,
    IgnoredFields,
    OutputRules,
    excerpt,
    field_error,
    parse_limit,
    parse_options,
)
from .messages import Message, has_tool_calls, parse_messages
from .output_parser import OutputParser
from .reasoning import (
    MAX_TAIL,
    ReasoningParser,
    ThinkingFormat,
    grammar_after_thinking,
    lark_rules,
    thinking_format_of,
)
from .response_format import ResponseFormat, parse_chat_format, parse_responses_format
from .response_store import ResponseStore
from .sampled_tokens import SampledTokens
from .tools.call_format import CallFormat, call_format_of
from .tools.declarations import ToolSet, parse_chat_tools, parse_responses_tools
from .tools.harmony import SPECIAL_TOKENS as HARMONY_TOKENS
from .tools.harmony import HarmonyParser, after_analysis, final_rules, is_harmony

DEFAULT_COMPLETION = 16  # tokens, as in OpenAI's API
_CHAT_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
_COMPLETION_LIMITS = ("max_tokens", "n_predict")
_MESSAGE_LOGPROBS = "message.output_text.logprobs"
_RESPONSE_LIMITS = ("max_output_tokens",)
# Template variables that have separate fields.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


@dataclass(frozen=True)
class ParserSettings:
    """Settings of request parsing.

    Attributes:
        context_length: Maximum number of tokens of a text.
        defaults: Values of options that a request omits.
        strict: True to reject unknown fields.
        template_variables: Variables of the chat template for all requests.
        store: Earlier responses, to which requests may refer.
        sampled: Sampled tokens to reuse in prompts; None to always use the tokenizer.
        max_prompt_length: Maximum number of tokens of a prompt; by default all but one of a text.
    """

    context_length: int
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    strict: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    store: ResponseStore | None = None
    sampled: SampledTokens | None = None
    max_prompt_length: int | None = None


@dataclass(frozen=True)
class ParsedRequest:
    """Request with validated fields.

    Attributes:
        prompts: Prompts, each a string, token ids or messages.
        options: Options of the pipeline.
        prompt_field: Field that contains the prompts.
        rules: Stop tokens and visible tokens of the text.
        template: Options of the chat template.
        num_choices_each: Number of choices of each prompt (`n`).
        stream: True for a stream of events.
        include_usage: True if the stream ends with the usage.
        continuous_usage: True if each chunk of the stream has the usage so far.
        trace: True if a stream reports the outcome of each token.
        return_token_ids: True if the response has the token ids of prompts and texts.
        echo: True if the text of a completion begins with its prompt.
        score_only: True to return only the log-probabilities of the prompt, without new text.
        prompt_logprobs: Number of most likely tokens to report at each position of the prompt;
            None for no log-probabilities of the prompt.
        add_special_tokens: True if the tokenizer adds its special tokens to a completion's prompt.
        truncate: Maximum number of prompt tokens, beyond which the beginning is dropped, or None.
        echoed: Fields that the response repeats.
        option_fields: Request fields of options that have another name in the request.
        tools: Functions that the model may call.
        ignored: Names of unknown fields.
        store: Store of the response, or None if it is not stored.
        messages: Messages to store with the response, without instructions.
        encodes_reasoning: True if reasoning items have `encrypted_content`.
        sampled: Sampled tokens to reuse in the prompts; None to always use the tokenizer.
    """

    prompts: list[Any]
    options: dict[str, Any]
    prompt_field: str
    rules: OutputRules = field(default_factory=OutputRules)
    template: TemplateOptions = field(default_factory=TemplateOptions)
    num_choices_each: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    trace: bool = False
    return_token_ids: bool = False
    echo: bool = False
    score_only: bool = False
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True
    truncate: int | None = None
    echoed: dict[str, Any] = field(default_factory=dict)
    option_fields: dict[str, str] = field(default_factory=dict)
    tools: ToolSet | None = None
    ignored: tuple[str, ...] = ()
    store: ResponseStore | None = None
    messages: list[Message] = field(default_factory=list)
    encodes_reasoning: bool = False
    sampled: SampledTokens | None = None

    @property
    def num_choices(self) -> int:
        """Return the total number of choices of all prompts."""
        return len(self.prompts) * self.num_choices_each

    @property
    def has_grammar(self) -> bool:
        """Return True if the request may need a compiled grammar."""
        return self.tools is not None or any(name in self.options for name in GRAMMARS)

    @property
    def is_chat(self) -> bool:
        """Return True if the prompts are messages."""
        return self.prompt_field != "prompt"


@dataclass(frozen=True)
class PreparedRequest:
    """Tokenized request, ready to run.

    Attributes:
        prompts: Token ids of each prompt.
        options: Options of the pipeline.
        call_format: Format of tool calls, or None if calls are not parsed.
        visible_tokens: Special tokens that are included in the text.
        thinking: Thinking format, or None if thinking is not parsed.
        is_thinking: True if the text begins within thinking.
        is_harmony: True if the text is in harmony format.
        num_sampled: Number of prompt tokens that differ from the tokenizer's output.
        decoder_tokens: Tokens that begin each text of an encoder-decoder.
    """

    prompts: list[list[int]]
    options: dict[str, Any]
    call_format: CallFormat | None = None
    visible_tokens: frozenset[int] = frozenset()
    thinking: ThinkingFormat | None = None
    is_thinking: bool = False
    is_harmony: bool = False
    num_sampled: int = 0
    decoder_tokens: tuple[int, ...] = ()

    @property
    def has_reasoning(self) -> bool:
        """Return True if the text may contain thinking."""
        return self.thinking is not None or self.is_harmony

    def parser(self) -> OutputParser | HarmonyParser:
        """Return a parser for one text."""
        if self.is_harmony:
            tools = None if self.call_format is None else self.call_format.tools
            names = () if tools is None else tuple(f.name for f in tools.callable)
            return HarmonyParser(names)
        thinking = self.thinking
        reasoning = None if thinking is None else ReasoningParser(thinking, self.is_thinking)
        calls = None if self.call_format is None else self.call_format.parser()
        return OutputParser(reasoning, calls)


def parse_chat(body: object, settings: ParserSettings) -> ParsedRequest:
    """Parse the body of a /v1/chat/completions request.

    Raises:
        ApiError: A field has an invalid value, or is unknown in strict mode.
    """
    fields = _reader(body, settings)
    messages = parse_messages(fields.take("messages"), "messages", fields.ignored)
    tools = parse_chat_tools(fields)
    limit, limit_name = parse_limit(fields, _CHAT_LIMITS)
    response_format = parse_chat_format(fields)
    options, rules, option_fields = _parse_options(
        fields, settings, limit, limit_name, response_format
    )
    has_logprobs = fields.take_flag("logprobs")
    top = fields.take_int("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if top and not has_logprobs:
        raise ApiError("top_logprobs requires logprobs", "top_logprobs", "invalid_value")
    if has_logprobs:
        options["logprobs"] = top or 0
    request = ParsedRequest(
        [messages],
        options,
        "messages",
        rules,
        _parse_template(fields, settings),
        prompt_logprobs=_parse_prompt_logprobs(fields),
        truncate=_parse_truncation(fields, settings),
        option_fields=option_fields,
        tools=tools,
    )
    return _finish(fields, "chat", request, settings)


def parse_completion(body: object, settings: ParserSettings) -> ParsedRequest:
    """Parse the body of a /v1/completions request, with the arguments of `parse_chat`."""
    fields = _reader(body, settings)
    prompts = _parse_prompts(fields.take("prompt"))
    echo = fields.take_flag("echo")
    has_limit = any(name in fields.names for name in _COMPLETION_LIMITS)
    limit, limit_name = parse_limit(fields, _COMPLETION_LIMITS)
    if not has_limit:
        limit = min(DEFAULT_COMPLETION, settings.context_length)
    score_only = limit == 0 and echo
    response_format: ResponseFormat = parse_chat_format(fields)
    options, rules, option_fields = _parse_options(
        fields, settings, 1 if score_only else limit, limit_name, response_format
    )
    if (prefix := fields.take("decoder_prefix")) is not None:  # validated with the pipeline
        options["decoder_prefix"] = prefix
    prompt_logprobs = _parse_prompt_logprobs(fields)
    if (top := fields.take_int("logprobs", 0, MAX_TOP_LOGPROBS)) is not None:
        options["logprobs"] = top
        prompt_logprobs = top if echo else prompt_logprobs
    request = ParsedRequest(
        prompts,
        options,
        "prompt",
        rules,
        echo=echo,
        score_only=score_only,
        prompt_logprobs=prompt_logprobs,
        add_special_tokens=fields.take_flag("add_special_tokens", True),
        truncate=_parse_truncation(fields, settings),
        option_fields=option_fields,
    )
    return _finish(fields, "completions", request, settings)


def parse_response(body: object, settings: ParserSettings) -> ParsedRequest:
    """Parse the body of a /v1/responses request, with the arguments of `parse_chat`."""
    fields = _reader(body, settings)
    tools_value, tool_choice = fields.peek("tools"), fields.peek("tool_choice")
    input_items = fields.take("input")
    if isinstance(input_items, str):
        input_items = [{"role": "user", "content": input_items}]
    previous_id = fields.take_typed("previous_response_id", str, "an id")
    history = _history(previous_id, settings)
    messages = parse_messages(input_items, "input", fields.ignored, history, settings.store)
    conversation = messages
    instructions = fields.take_typed("instructions", str, "text")
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    limit, limit_name = parse_limit(fields, _RESPONSE_LIMITS)
    tools = parse_responses_tools(fields)
    response_format = parse_responses_format(fields)
    options, rules, option_fields = _parse_options(
        fields, settings, limit, limit_name, response_format
    )
    echoed = {"instructions": instructions, "max_output_tokens": limit}
    echoed["metadata"] = fields.take_typed("metadata", dict, "an object") or {}
    echoed |= {"text": {"format": response_format.value}}
    stores = fields.take_flag("store", True)
    echoed |= {"store": stores, "previous_response_id": previous_id}
    include = fields.take_list("include", "a list of names")
    top = fields.take_int("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if _MESSAGE_LOGPROBS in include:
        options["logprobs"] = top or 0
    elif top:
        message = f"top_logprobs requires {_MESSAGE_LOGPROBS} in include"
        raise ApiError(message, "top_logprobs", "invalid_value")
    echoed |= {"top_logprobs": top or 0}
    reasoning = fields.peek("reasoning")
    echoed["reasoning"] = reasoning if isinstance(reasoning, dict) else None
    if tools is not None:
        echoed |= {"tools": tools_value, "tool_choice": tool_choice or "auto"}
        echoed |= {"parallel_tool_calls": tools.parallel}
    request = ParsedRequest(
        [messages],
        options,
        "input",
        rules,
        _parse_template(fields, settings),
        echoed=echoed,
        option_fields=option_fields,
        tools=tools,
        store=settings.store if stores else None,
        messages=conversation,
        encodes_reasoning="reasoning.encrypted_content" in include,
    )
    return _finish(fields, "responses", request, settings)


def _history(previous_id: str | None, settings: ParserSettings) -> list[Message]:
    """Return the messages of the conversation of an earlier response."""
    if previous_id is None:
        return []
    response = None if settings.store is None else settings.store.get(previous_id)
    if response is None:
        message = f"the response {excerpt(previous_id)} is not stored; send its items instead"
        name = "previous_response_id"
        raise ApiError(message, name, "previous_response_not_found", 404)
    return response.messages


def parse_tokenize(body: object, settings: ParserSettings) -> tuple[ParsedRequest, bool]:
    """Parse the body of a /tokenize request.

    Returns:
        A request with the prompt, and True if the response must include the text of each token.
    """
    fields = _reader(body, settings)
    messages = fields.take("messages")
    prompt = fields.take("prompt", "content")
    add_special = fields.take("add_special_tokens", "add_special")
    if messages is not None:
        template = _parse_template(fields, settings)
        tools = parse_chat_tools(fields)
        parsed = parse_messages(messages, "messages", fields.ignored)
        request = ParsedRequest([parsed], {}, "messages", template=template, tools=tools)
    else:
        if not isinstance(prompt, str):
            message = f"prompt must be text, got {excerpt(prompt)}"
            raise ApiError(message, "prompt", "invalid_type")
        add_special = add_special is not False
        request = ParsedRequest([prompt], {}, "prompt", add_special_tokens=add_special)
    with_pieces = fields.take_flag("with_pieces") or fields.take_flag("return_token_strs")
    fields.skip("model", "parse_special")
    fields.finish()
    return request, with_pieces


def parse_detokenize(body: object, settings: ParserSettings) -> list[int]:
    """Return the tokens in the body of a /detokenize request."""
    fields = _reader(body, settings)
    tokens: list[int] = fields.take_list("tokens", "a list of token ids")
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise fields.error("tokens", f"tokens must be token ids, got {excerpt(tokens)}")
    fields.skip("model")
    fields.finish()
    return tokens


def _parse_options(
    fields: FieldReader,
    settings: ParserSettings,
    limit: int | None,
    limit_name: str,
    response_format: ResponseFormat,
) -> tuple[dict[str, Any], OutputRules, dict[str, str]]:
    """Call `parse_options`; the default limit is the context length."""
    max_new_tokens = settings.context_length if limit is None else limit
    return parse_options(
        fields,
        max_new_tokens,
        limit_name,
        settings.defaults,
        response_format.schema,
        response_format.field_name,
    )


def _reader(body: object, settings: ParserSettings) -> FieldReader:
    return FieldReader(body, ignored=None if settings.strict else IgnoredFields())


def _finish(
    fields: FieldReader, endpoint: str, request: ParsedRequest, settings: ParserSettings
) -> ParsedRequest:
    """Parse the fields that are common to all endpoints; ignore or reject unknown ones."""
    fields.take_typed("model", str, "a name")
    num_choices, trace = 1, False
    if endpoint != "responses":
        num_choices = fields.take_int("n", 1, MAX_CHOICES) or 1
        trace = fields.take_flag("trace")
    stream = fields.take_flag("stream")
    usage, continuous_usage = False, False
    stream_options = fields.take_object("stream_options")
    if stream_options is not None:
        if not stream and fields.is_strict:
            raise ApiError("stream_options requires stream", "stream_options", "invalid_value")
        usage = stream_options.take_flag("include_usage")
        continuous_usage = stream_options.take_flag("continuous_usage_stats")
        stream_options.skip("include_obfuscation")
        stream_options.finish()
    return_token_ids = fields.take_flag("return_token_ids")
    fields.reject_unsupported(UNSUPPORTED_FIELDS[endpoint])
    fields.skip(*NEUTRAL[endpoint])
    fields.finish()
    return dataclasses.replace(
        request,
        num_choices_each=num_choices,
        stream=stream,
        include_usage=usage,
        continuous_usage=usage and continuous_usage,
        trace=trace,
        return_token_ids=return_token_ids,
        ignored=() if fields.ignored is None else tuple(fields.ignored.names),
        sampled=settings.sampled,
    )


def _parse_template(fields: FieldReader, settings: ParserSettings) -> TemplateOptions:
    """Parse the options of the chat template, including the thinking fields of several APIs."""
    variables = dict(settings.template_variables)
    effort = fields.take_typed("reasoning_effort", str, "a name")
    if (reasoning := fields.take("reasoning")) is not None:
        reasoning_fields = fields.child(reasoning, fields.path_of("reasoning"))
        effort = reasoning_fields.take_typed("effort", str, "a name") or effort
        reasoning_fields.skip("summary", "generate_summary")
        reasoning_fields.finish()
    if effort is not None:
        variables["reasoning_effort"] = effort
        variables |= thinking_variables(effort != "none")
    if (enabled := _parse_thinking_switch(fields)) is not None:
        variables |= thinking_variables(enabled)
    template_kwargs = fields.take_typed("chat_template_kwargs", dict, "an object") or {}
    if name := next((name for name in _RESERVED if name in template_kwargs), None):
        message = f"chat_template_kwargs cannot set {name}, which has a separate field"
        raise ApiError(message, f"chat_template_kwargs.{name}", "invalid_value")
    add_generation_prompt = fields.take_flag("add_generation_prompt", True)
    documents = fields.take_list("documents", "a list of objects") or None
    if documents and not all(isinstance(document, dict) for document in documents):
        raise ApiError("documents must be a list of objects", "documents", "invalid_type")
    return TemplateOptions(
        variables | template_kwargs,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=fields.take_flag("continue_final_message"),
        documents=documents,
    )


def _parse_thinking_switch(fields: FieldReader) -> bool | None:
    """Return whether thinking is enabled by Qwen's, Ollama's or Anthropic's field, or None."""
    thinking = fields.take("enable_thinking", "think", "thinking")
    if isinstance(thinking, dict):
        return thinking.get("type") != "disabled"
    if isinstance(thinking, str):
        return thinking != "none"
    return None if thinking is None else bool(thinking)


def thinking_variables(is_enabled: bool) -> dict[str, bool]:
    """Return the template variables that enable or disable thinking."""
    return {"enable_thinking": is_enabled, "thinking": is_enabled}


def _parse_prompt_logprobs(fields: FieldReader) -> int | None:
    return fields.take_int("prompt_logprobs", 0, MAX_TOP_LOGPROBS)


def _parse_truncation(fields: FieldReader, settings: ParserSettings) -> int | None:
    """Return the maximum number of prompt tokens; -1 selects the longest possible prompt."""
    limit = fields.take_int("truncate_prompt_tokens", -1)
    if limit == 0:
        raise fields.error("truncate_prompt_tokens", "truncate_prompt_tokens must not be 0")
    longest = settings.max_prompt_length or settings.context_length - 1
    return longest if limit == -1 else limit


def prepare(pipeline: Pipeline, request: ParsedRequest) -> PreparedRequest:
    """Render and tokenize the prompts of a request.

    Raises:
        ApiError: A prompt or an option is invalid.
    """
    prepared = _prepare(pipeline, request)
    if pipeline.bundle.target.encoder is not None:  # the source has no tokens of earlier texts
        first = pipeline.prompts.decoder_tokens(prepared.options.get("decoder_prefix"))
        return dataclasses.replace(prepared, decoder_tokens=tuple(first))
    if request.sampled is None:
        return prepared
    is_text = [request.is_chat or isinstance(prompt, str) for prompt in request.prompts]
    prompts = zip(prepared.prompts, is_text, strict=True)
    applied = [request.sampled.apply(tokens) if text else (tokens, 0) for tokens, text in prompts]
    return dataclasses.replace(
        prepared,
        prompts=[_checked(pipeline, request, tokens) for tokens, _ in applied],
        num_sampled=sum(count for _, count in applied),
    )


def _checked(pipeline: Pipeline, request: ParsedRequest, tokens: list[int]) -> list[int]:
    """Validate the length of a prompt that sampled tokens may have extended."""
    try:
        return pipeline.prompts.tokens(tokens)
    except PromptError as error:
        raise prompt_error(error, request.prompt_field) from error


def _prepare(pipeline: Pipeline, request: ParsedRequest) -> PreparedRequest:
    model = pipeline.bundle.target
    if request.is_chat and not pipeline.bundle.supports_chat:
        reason = "has no chat template" if model.encoder is None else "is an encoder-decoder"
        raise ApiError(
            f"{model.source.id} {reason}; use /v1/completions",
            request.prompt_field,
            "no_chat_template",
        )
    if model.encoder is not None and (request.echo or request.prompt_logprobs is not None):
        name = "echo" if request.echo else "prompt_logprobs"
        raise ApiError(
            f"{name} is not supported for {model.source.id}, an encoder-decoder, whose prompt is "
            "no part of its text",
            name,
            UNSUPPORTED,
        )
    visible = _special_tokens(pipeline) if request.rules.show_special else frozenset[int]()
    options = _with_text_biases(pipeline, request)
    chats: list[list[Message]] = request.prompts if request.is_chat else []
    if request.tools is None and not any(map(has_tool_calls, chats)):
        tokens = _tokenize(pipeline, request, request.prompts, options)
        return _with_thinking(pipeline, request, PreparedRequest(tokens, options, None, visible))
    template, tokenizer = pipeline.bundle.chat_template or "", pipeline.tokenizer
    text_rules = lark_rules(options, "inner__" if is_harmony(template) else "text__")
    if text_rules is not None and is_harmony(template):
        text_rules = final_rules(text_rules, "text__", tokenizer)
    call_format = call_format_of(pipeline.bundle, tokenizer, request.tools, text_rules)
    if call_format.grammar is not None:
        options = _with_grammar(options, call_format.grammar)
    prompts = [call_format.convert_messages(chat) for chat in chats]
    tokens = _tokenize(pipeline, request, prompts, options, call_format.template_tools)
    visible |= call_format.visible_tokens
    prepared = PreparedRequest(tokens, options, call_format if request.tools else None, visible)
    return _with_thinking(pipeline, request, prepared)


def _with_thinking(
    pipeline: Pipeline, request: ParsedRequest, prepared: PreparedRequest
) -> PreparedRequest:
    """Return the request with its thinking format, and with grammars that follow thinking."""
    template, tokenizer = pipeline.bundle.chat_template, pipeline.tokenizer
    if not request.is_chat or template is None:
        return prepared
    if is_harmony(template):
        return _with_harmony(pipeline, prepared)
    thinking = thinking_format_of(template, tokenizer)
    (prompt,) = prepared.prompts
    prompt_end = str(tokenizer.decode(prompt[-MAX_TAIL:], skip_special_tokens=False))
    if thinking is None or thinking.is_closed(prompt_end):
        return prepared
    is_open, options = thinking.is_open(prompt_end), prepared.options
    if grammar := grammar_after_thinking(options, thinking, tokenizer, is_open):
        options = _with_grammar(options, grammar)
    return dataclasses.replace(
        prepared,
        options=options,
        thinking=thinking,
        is_thinking=is_open,
        visible_tokens=prepared.visible_tokens | _special_tokens(pipeline, thinking.delimiters),
    )


def _with_harmony(pipeline: Pipeline, prepared: PreparedRequest) -> PreparedRequest:
    """Return the request with visible harmony tokens, and with grammars for its channels."""
    options, tokenizer = prepared.options, pipeline.tokenizer
    has_calls = prepared.call_format is not None and prepared.call_format.grammar is not None
    rules = lark_rules(options, "body__" if has_calls else "inner__")
    if rules is not None:
        rules = rules if has_calls else final_rules(rules, "body__", tokenizer)
        options = _with_grammar(options, after_analysis(rules, tokenizer))
    visible = prepared.visible_tokens | _special_tokens(pipeline, HARMONY_TOKENS)
    return dataclasses.replace(prepared, options=options, visible_tokens=visible, is_harmony=True)


def _with_grammar(options: Mapping[str, Any], grammar: str) -> dict[str, Any]:
    """Return options whose grammar is replaced."""
    return {k: v for k, v in options.items() if k not in GRAMMARS} | {"grammar": grammar}


def _special_tokens(pipeline: Pipeline, names: Collection[str] | None = None) -> frozenset[int]:
    """Return the ids of the special tokens with these names (default: all)."""
    added = pipeline.tokenizer.get_added_tokens_decoder().items()
    return frozenset(t for t, a in added if a.special and (names is None or a.content in names))


def _with_text_biases(pipeline: Pipeline, request: ParsedRequest) -> dict[str, Any]:
    """Return the options, with logit biases of texts converted to those of their tokens."""
    options = dict(request.options)
    for text, bias in request.rules.text_biases:
        tokens = pipeline.tokenizer.encode(text, add_special_tokens=False).ids
        by_token = dict.fromkeys(tokens, bias)
        options["logit_bias"] = by_token | dict(options.get("logit_bias", {}))
    return options


def _tokenize(
    pipeline: Pipeline,
    request: ParsedRequest,
    prompts: list[Any],
    options: dict[str, Any],
    tools: list[dict[str, Any]] | None = None,
) -> list[list[int]]:
    """Validate the options with the pipeline, and return the token ids of each prompt."""
    try:
        pipeline.sampling(build_request(**options))
        pipeline.prompts.decoder_tokens(options.get("decoder_prefix"))
        return [_tokens_of(pipeline, request, prompt, tools) for prompt in prompts]
    except OptionError as error:
        name, reason = _rejected_function(request, options, str(error))
        if name is not None:
            message = f"tools: the schema of the function {name!r} is rejected: {reason}"
            raise ApiError(message, "tools", "invalid_value") from error
        raise option_error(error, request) from error
    except PromptError as error:
        raise prompt_error(error, request.prompt_field) from error
    except MissingExtraError as error:
        raise ApiError(str(error), code=UNSUPPORTED) from error


def _tokens_of(
    pipeline: Pipeline, request: ParsedRequest, prompt: Any, tools: list[dict[str, Any]] | None
) -> list[int]:
    prompts, truncate = pipeline.prompts, request.truncate
    if isinstance(prompt, str):
        return prompts.completion_tokens(prompt, request.add_special_tokens, truncate)
    if not request.is_chat:
        return prompts.tokens(prompt if truncate is None else prompt[-truncate:])
    tokens = prompts.chat_tokens(prompt, tools=tools, options=request.template)
    return prompts.tokens(tokens if truncate is None else tokens[-truncate:])


def _rejected_function(
    request: ParsedRequest, options: Mapping[str, Any], message: str
) -> tuple[str | None, str]:
    """Return the function whose schema llguidance rejects, and the reason.

    llguidance's message begins with the line in the grammar, and ends with an excerpt of it.
    """
    match = re.search(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*?)( \d+ \||$)", message)
    if request.tools is None or match is None or "grammar" not in options:
        return None, message
    line = str(options["grammar"]).splitlines()[int(match[1]) - 1]
    rule = re.match(r"arguments_(\d+)", line)
    return request.tools.callable[int(rule[1])].name if rule else None, match[2]


def option_error(error: OptionError, request: ParsedRequest) -> ApiError:
    """Return the API error for an option, with the request field that set it."""
    if error.option != "grammar" or "grammar" in request.options:
        return field_error(error, request.option_fields)
    # The grammar was built by the server, from tools or from a format that follows thinking.
    names = [request.option_fields[name] for name in GRAMMARS if name in request.options]
    name = names[0] if names and request.tools is None else "tools"
    return ApiError(f"{name}: {error}", name, "invalid_value")


def _parse_prompts(prompt: object) -> list[Any]:
    """Return a list of prompts, each a string or token ids."""
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
