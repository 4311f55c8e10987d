"""Chat templates of checkpoints: their files, and named ones as one template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEFAULT, TOOL_USE = "default", "tool_use"
# A file of processors, read where the tokenizer has no template.
PROCESSOR_FILE = "chat_template.json"


def combine(templates: Mapping[str, str]) -> str | None:
    """Return one template of named ones, as transformers chooses among them; None if none fits.

    With tools "tool_use" is rendered, else "default".
    """
    default, tool_use = templates.get(DEFAULT), templates.get(TOOL_USE)
    if default is None or tool_use is None:
        return tool_use if default is None else default
    # As at the start of a file, blocks lose space before them; at its end a line break is lost.
    first, second = (
        re.sub(r"(\r\n|\r|\n)\Z", "", text) + "{{ '' }}" for text in (tool_use, default)
    )
    return f"{{% if tools is not none %}}\n{first}{{% else %}}\n{second}{{% endif %}}"


def chat_template_of(value: Any) -> str | None:
    """Return the chat template of a value of "chat_template": text, an object or a list by name."""
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
        ValueError: The file is no text or no JSON.
    """
    text = path.read_text("utf-8")
    if path.suffix != ".json":
        return text
    value = json.loads(text)
    return chat_template_of(value.get("chat_template") if isinstance(value, dict) else value)
