"""Chat messages and template options."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specedge.errors import PromptError


@dataclass(frozen=True)
class TemplateOptions:
    """Options of a chat template.

    Attributes:
        variables: Further variables of the template, such as `enable_thinking`.
        add_generation_prompt: True if the prompt ends where the assistant's answer begins.
        continue_final_message: True if the prompt ends within the last message, to continue it.
        documents: Documents for retrieval, as transformers passes them.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Sequence[Mapping[str, Any]] | None = None


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of messages as JSON values.

    Raises:
        PromptError: A message has no role or content, or the list is empty.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise PromptError("messages must be a list of at least one {'role': ..., 'content': ...}")
    for i, message in enumerate(messages):
        fields = message if isinstance(message, Mapping) else {}
        for key in ("role", "content"):
            if not isinstance(fields.get(key), str):
                raise PromptError(f"messages[{i}] must have '{key}' as text")
    return plain(messages, "messages")


def plain(objects: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return a copy of objects as JSON values; raise PromptError with their name."""
    try:
        copied: list[dict[str, Any]] = json.loads(json.dumps([dict(item) for item in objects]))
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{name} must contain plain values only ({error})") from error
    return copied
