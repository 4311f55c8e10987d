"""Chat templates of checkpoints: files, and combination of named templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT, TOOL_USE = "default", "tool_use"
PROCESSOR_FILE = "chat_template.json"  # read if the tokenizer has no template


def combine(templates: Mapping[str, str]) -> str | None:
    """Combine named templates into one, by the rules of transformers; None if none applies.

    The template renders "tool_use" for requests with tools, else "default".
    """
    default, tool_use = templates.get(DEFAULT), templates.get(TOOL_USE)
    if default is None or tool_use is None:
        return tool_use if default is None else default
    # Preserves trim_blocks and lstrip_blocks at the start, and the final line break at the end.
    first, second = (
        re.sub(r"(\r\n|\r|\n)\Z", "", text) + "{{ '' }}" for text in (tool_use, default)
    )
    return f"{{% if tools is not none %}}\n{first}{{% else %}}\n{second}{{% endif %}}"


def chat_template_of(value: Any) -> str | None:
    """Return the chat template of a "chat_template" value: text, or templates by name."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {entry.get("name"): entry.get("template") for entry in entries}
    if not isinstance(value, dict):
        return None
    return combine({name: text for name, text in value.items() if isinstance(text, str)})


def read_template(path: Path) -> str | None:
    """Return the chat template of a file in Jinja, or in JSON under the key "chat_template".

    Raises:
        ValueError: The file is not UTF-8 text or not JSON.
        OSError: The file cannot be read.
    """
    text = path.read_text("utf-8")
    if path.suffix != ".json":
        return text
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    return chat_template_of(value.get("chat_template") if isinstance(value, dict) else value)
