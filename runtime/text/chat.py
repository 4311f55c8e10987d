"""Chat templates: the target's Jinja template, rendered as transformers does.

A template comes with a checkpoint and is untrusted code: it runs in Jinja's sandbox with JSON
values only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specedge.bundle import Bundle
from specedge.errors import BundleError, PromptError
from specedge.strict_json import escape_unprintable

from .messages import TemplateOptions, plain, plain_messages

_REMEDY = "export the pair again from a checkpoint whose template works, or omit --chat"
_DEFAULTS = TemplateOptions()
_MARKER = "specedge-marker-5f1c"
_ROLES = ("system", "user", "assistant", "tool")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # names used by templates


def render(
    bundle: Bundle,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: TemplateOptions = _DEFAULTS,
    *,
    check_visible: bool = True,
) -> str:
    """Render messages, each with a "role" and a "content", with the bundle's chat template.

    Contents are text, and are converted to lists of parts for roles for which the template requires
    that. Arguments of calls are mappings; a template that fails on them gets JSON text.

    Args:
        bundle: The bundle with the template.
        messages: The conversation.
        tools: Functions that the assistant may call, as transformers passes them.
        options: Variables and other options of the template.
        check_visible: Raise an error if the template omits a message.

    Raises:
        PromptError: The template rejects the messages, fails, or omits one of them.
        BundleError: The template is invalid.
    """
    load_template(bundle)
    chat = plain_messages(messages)
    values = {
        **plain([options.variables], "template variables")[0],
        "add_generation_prompt": options.add_generation_prompt
        and not options.continue_final_message,
        "documents": None if options.documents is None else plain(options.documents, "documents"),
        "tools": None if tools is None else plain(tools, "tools"),
    }
    try:
        text = _render_chat(bundle, chat, values)
    except Exception as error:  # a template can fail in any way that code can
        fails = "rejects" if isinstance(error, _RejectedError) else "fails on"
        raise PromptError(
            f"{bundle.target.source.id}'s chat template {fails} these messages: {_one_line(error)}"
        ) from error
    if check_visible and (i := _hidden_message(bundle, chat, values)) is not None:
        raise PromptError(
            f"{bundle.target.source.id}'s chat template drops messages[{i}], of the role "
            f"{chat[i]['role']!r}; remove it, or use another template"
        )
    if options.continue_final_message:
        end = text.rfind(content) if (content := chat[-1]["content"].strip()) else -1
        if end < 0:
            raise PromptError("the last message has no text to continue")
        text = text[: end + len(content)]
    return text


def _render_chat(bundle: Bundle, chat: Sequence[Mapping[str, Any]], values: dict[str, Any]) -> str:
    """Render messages with text as contents, in a form that the template supports."""
    template, text = load_template(bundle), bundle.chat_template or ""
    key = next((key for key in _REASONING_KEYS if re.search(rf"\b{key}\b", text)), None)
    parts_roles = _parts_roles(text, tuple(sorted(bundle.special_tokens.items())))
    converted = [_convert(message, parts_roles, key) for message in chat]

    has_calls = any("tool_calls" in message for message in chat)
    failure: Exception | None = None
    for form in _ARGUMENT_FORMS if has_calls else _ARGUMENT_FORMS[:1]:
        messages = [_with_arguments(message, form) for message in converted]
        try:
            return template.render(bundle.special_tokens | {**values, "messages": messages})
        except Exception as error:
            failure = failure or error
            if isinstance(failure, _RejectedError):
                break
    assert failure is not None
    raise failure


def _convert(
    message: Mapping[str, Any], parts_roles: Collection[str], reasoning_key: str | None
) -> dict[str, Any]:
    """Return a message with its content in parts if its role is one of `parts_roles`."""
    converted = dict(message)
    if message["role"] in parts_roles:
        converted["content"] = [{"type": "text", "text": message["content"]}]
    if reasoning_key and (reasoning := converted.get("reasoning_content")) is not None:
        del converted["reasoning_content"]
        converted[reasoning_key] = reasoning
    return converted


def _with_arguments(message: dict[str, Any], arguments_of: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(message.get("tool_calls"), list):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and function.get("arguments") is not None:
            function = function | {"arguments": arguments_of(function["arguments"])}
            call = call | {"function": function}
        calls.append(call)
    return message | {"tool_calls": calls}


class _JsonText(str):
    """JSON text, which the filter `tojson` does not quote again."""


# Forms of the arguments of calls, of which a template gets the first that it does not fail on.
_ARGUMENT_FORMS: tuple[Callable[[Any], Any], ...] = (
    lambda arguments: _JsonText(arguments) if isinstance(arguments, str) else arguments,
    lambda arguments: _JsonText(arguments if isinstance(arguments, str) else _tojson(arguments)),
    lambda arguments: arguments if isinstance(arguments, dict) else {"arguments": arguments},
)


def _shows_marker(
    template: jinja2.Template,
    special_tokens: tuple[tuple[str, str], ...],
    parts_roles: Collection[str],
    messages: Sequence[Mapping[str, Any]],
    tools: Any = None,
) -> bool | None:
    """Return True if a template renders the marker in messages or tools, None if it fails."""
    converted = [_convert(message, parts_roles, None) for message in messages]
    values = {"messages": converted, "add_generation_prompt": True, "tools": tools}
    try:
        return _MARKER in template.render(dict(special_tokens) | values)
    except Exception:
        return None


@lru_cache(maxsize=8)
def _parts_roles(text: str, special_tokens: tuple[tuple[str, str], ...]) -> frozenset[str]:
    """Return the roles whose messages a template shows only if their contents are lists of parts.

    Renders a conversation with a marker as text and as a part, and looks for the marker.
    """
    template = _compile(text)
    call = {"id": "a23456789", "type": "function", "function": {"name": "f", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "", "tool_call_id": "a23456789", "name": "f"}
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}
    chats: dict[str, list[dict[str, Any]]] = {
        "system": [{"role": "system", "content": ""}, user],
        "user": [user],
        "assistant": [user, answer, user],
        "tool": [user, called, result],
    }

    def shows(role: str, parts_roles: Collection[str]) -> bool:
        marked = [m | ({"content": _MARKER} if m["role"] == role else {}) for m in chats[role]]
        return _shows_marker(template, special_tokens, parts_roles, marked) is True

    return frozenset(
        role
        for role in chats
        if not shows(role, ()) and (shows(role, (role,)) or shows(role, chats.keys()))
    )


@dataclass(frozen=True)
class ToolSupport:
    """Parts of conversations with tools that a chat template renders; True if it fails on them.

    Attributes:
        tools: True if it renders the variable `tools`.
        message_tools: True if it renders the key "tools" of a system message, as JSON text.
        calls: True if it renders the calls of assistant messages.
    """

    tools: bool
    message_tools: bool
    calls: bool


def tool_support(bundle: Bundle, has_tools: bool) -> ToolSupport:
    """Return the parts of conversations with tools that a bundle's chat template renders.

    Args:
        bundle: The bundle with the template.
        has_tools: True if the conversation has tools, without which templates may omit calls.

    Raises:
        BundleError: The template is invalid.
        PromptError: The bundle has no template.
    """
    load_template(bundle)
    special_tokens = tuple(sorted(bundle.special_tokens.items()))
    return _tool_support(bundle.chat_template or "", special_tokens, has_tools)


@lru_cache(maxsize=8)
def _tool_support(
    text: str, special_tokens: tuple[tuple[str, str], ...], has_tools: bool
) -> ToolSupport:
    """Render conversations with a marker as the name of a function, and look for the marker."""
    template, parts_roles = _compile(text), _parts_roles(text, special_tokens)
    parameters = {"type": "object", "properties": {}}
    function = {"name": _MARKER, "description": "", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    system, user = {"role": "system", "content": "x"}, {"role": "user", "content": "x"}

    shows = partial(_shows_marker, template, special_tokens, parts_roles)

    def called(arguments: Any) -> list[dict[str, Any]]:
        call_function = {"name": _MARKER, "arguments": arguments}
        call = {"id": "a23456789", "type": "function", "function": call_function}
        result = {"role": "tool", "content": "x", "tool_call_id": "a23456789", "name": _MARKER}
        return [user, {"role": "assistant", "content": "", "tool_calls": [call]}, result, user]

    message_tools = [system | {"tools": json.dumps([function])}, user]
    other = [{"type": "function", "function": function | {"name": "f"}}] if has_tools else None
    forms: tuple[Any, ...] = ({}, "{}")
    calls = {shows(called(arguments), other) for arguments in forms}
    calls |= {shows(called(arguments)[:2], other) for arguments in forms}
    variable = {shows([user], tools), shows([system, user], tools)}
    return ToolSupport(
        True in variable or variable == {None},
        shows(message_tools, None) is True,
        True in calls or calls == {None},
    )


def _hidden_message(
    bundle: Bundle, chat: Sequence[Mapping[str, Any]], values: dict[str, Any]
) -> int | None:
    """Return the index of a message that the template omits, None if it renders all."""
    markers = {i: f"{_MARKER}-{i}-" for i, m in enumerate(chat) if m["content"].strip()}
    marked = [{**m, "content": markers[i]} if i in markers else m for i, m in enumerate(chat)]
    try:
        text = _render_chat(bundle, marked, values)
    except Exception:  # the template reads contents, so markers prove nothing
        return None
    hidden = [i for i in markers if markers[i] not in text and chat[i]["role"] in _ROLES]
    return next((i for i in hidden if not _shows_calls(chat[i], text)), None)


def _shows_calls(message: Mapping[str, Any], text: str) -> bool:
    """Return True if a text has the name of a function that a message calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return False
    functions = (call.get("function") for call in calls if isinstance(call, dict))
    names = (function.get("name") for function in functions if isinstance(function, dict))
    return any(isinstance(name, str) and name in text for name in names)


def load_template(bundle: Bundle) -> jinja2.Template:
    """Return the compiled chat template of a bundle.

    Raises:
        BundleError: The template is invalid.
        PromptError: The bundle has no template.
    """
    name, text = bundle.target.source.id, bundle.chat_template
    if text is None:
        raise PromptError(f"{name} has no chat template; omit --chat")
    try:
        return _compile(text)
    except Exception as error:  # Jinja compiles templates to Python, with Python's errors
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise BundleError(
            f"{name}'s chat template is invalid: {_one_line(error)}{line}; {_REMEDY}"
        ) from error


class _RejectedError(Exception):
    """Rejection of messages by a template."""


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        # Functions, so that a template cannot access the attributes of a class.
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _namespace,
    }
    environment.globals.update(helpers)
    return environment.from_string(template)


class _Generation(Extension):
    """Tag `{% generation %}`, which marks assistant text for training; renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _PlainNamespace(jinja2.utils.Namespace):
    """Namespace that rejects names of Python internals, as in transformers."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold '{name}'")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _PlainNamespace:
    namespace = _PlainNamespace()
    for name, value in dict(*args, **kwargs).items():
        namespace[name] = value
    return namespace


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize to JSON as transformers does; Jinja's own filter escapes HTML."""
    if isinstance(value, _JsonText):
        return str(value)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: object) -> NoReturn:
    raise _RejectedError(str(message))


def _one_line(error: Exception) -> str:
    return escape_unprintable(" ".join(str(error).split())[:300] or type(error).__name__)
