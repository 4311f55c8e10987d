"""What `specedge generate --replay` reads: the rounds of an earlier run, from its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specedge.request import AUTO, GenerationRequest
from specedge.strict_json import JsonError, parse

LARGEST = 64 * 2**20


def options(name: str, num_draft_tokens: int | str) -> dict[str, Any]:
    """The options that repeat the rounds of a file; a bad one is a click.UsageError."""
    if num_draft_tokens != AUTO:
        raise click.UsageError("--replay has its own K; leave --num-draft-tokens out")
    try:
        facts = parse(_text(name))
        if not isinstance(facts, dict) or "plan" not in facts:
            raise JsonError("has no 'plan'; name what 'specedge generate --json' printed")
        GenerationRequest(replay=facts["plan"])
    except ValueError as error:
        raise click.UsageError(f"{name}: {error}") from error
    return {"replay": facts["plan"]}


def _text(name: str) -> str:
    try:
        with Path(name).open(encoding="utf-8-sig") as file:
            text = file.read(LARGEST + 1)
    except UnicodeDecodeError as error:
        raise JsonError(f"is not UTF-8 text ({error.reason})") from error
    except (OSError, ValueError) as error:  # a NUL in a path is a ValueError
        raise JsonError(str(getattr(error, "strerror", None) or error)) from error
    if len(text) > LARGEST:
        raise JsonError(f"has more than {LARGEST} characters")
    return text
