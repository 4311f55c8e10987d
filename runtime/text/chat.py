"""A chat as the prompt that the target was trained on: its own Jinja template, as transformers
renders it.

A template comes with a checkpoint, so it is code that nobody here has read: it runs in Jinja's
sandbox and sees plain values alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specedge.bundle import Bundle
from specedge.errors import BundleError, PromptError

from .messages import plain, plain_messages

_CURE = "export the pair again from a checkpoint whose template works, or do without --chat"


def render(
    bundle: Bundle,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Messages, each with a "role" and a "content", as text up to where the assistant answers.

    `tools` are what the assistant may call, as transformers passes them. Raises PromptError for
    messages that the template refuses, BundleError for a broken template.
    """
    name = bundle.target.source.id
    template, chat = load_template(bundle), plain_messages(messages)
    values = {"messages": chat, "add_generation_prompt": True, "documents": None}
    values["tools"] = None if tools is None else plain(tools, "tools")
    try:
        return template.render(bundle.special_tokens | values)
    except Exception as error:  # a template can fail in any way that code can
        fails = "refuses" if isinstance(error, _RefusedError) else "fails on"
        raise PromptError(
            f"{name}'s chat template {fails} these messages: {_one_line(error)}"
        ) from error


def load_template(bundle: Bundle) -> jinja2.Template:
    """The bundle's chat template, ready to render. Raises BundleError if it is broken,
    PromptError if there is none.
    """
    name, text = bundle.target.source.id, bundle.chat_template
    if text is None:
        raise PromptError(f"{name} has no chat template; give the prompt without --chat")
    try:
        return _compile(text)
    except Exception as error:  # what Jinja makes of a template is Python, with Python's errors
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise BundleError(
            f"{name}'s chat template is broken: {_one_line(error)}{line}; {_CURE}"
        ) from error


class _RefusedError(Exception):
    """What a template says of messages that it does not take."""


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        # Functions, so that a template cannot reach the attributes of a class.
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _namespace,
    }
    environment.globals.update(helpers)
    return environment.from_string(template)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _PlainNamespace(jinja2.utils.Namespace):
    """Refuses names that could reach into Python, as transformers does."""

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
    """As transformers has it: Jinja's own escapes HTML, which no model was trained on."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: object) -> NoReturn:
    raise _RefusedError(str(message))


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
