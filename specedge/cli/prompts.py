"""Prompt files of `specedge generate --prompts`, validated before any prompt runs."""

from __future__ import annotations

import dataclasses
import json
import secrets
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options
from specedge.cli.terminal import sanitize_line
from specedge.errors import PromptError
from specedge.option_specs import option_specs, suggest
from specedge.request import GenerationRequest, item_seed
from specedge.runtime.requests.batch import BatchItem, parse_item
from specedge.strict_json import JsonError, parse

if TYPE_CHECKING:
    from specedge.runtime.text.prompts import UserPrompt


def read_prompts(
    name: str, form: str | None, chat: bool, system: str | None, request: dict[str, Any]
) -> list[BatchItem]:
    """Read the prompts of a file, or of standard input for `-`.

    Args:
        name: File name.
        form: "text" (one prompt per line) or "jsonl"; None is determined by the file name.
        chat: Apply the chat template to prompts.
        system: System message before each prompt.
        request: Options of lines that do not specify them. Prompt i is sampled with seed + i.

    Raises:
        click.UsageError: If a line is invalid.
    """
    with options.usage_errors():
        GenerationRequest(**request)
    text = options.read_text(name)
    name = "standard input" if name == "-" else name
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise click.UsageError(f"{name} has no prompts")
    if form is None:
        form = _form(name, lines[0][1])
    seed = secrets.randbits(32) if request["seed"] is None else request["seed"]
    items: list[BatchItem] = []
    for index, (number, line) in enumerate(lines):
        defaults = request | {"seed": item_seed(seed, index)}
        try:
            fields = _parse_line(line) if form == "jsonl" else {"prompt": line.removesuffix("\r")}
            item = _item(index, fields, defaults, chat, system)
            location = f"{name}, line {number}: " if "drafter" in fields else ""
            items.append(dataclasses.replace(item, location=location))
        except (ValueError, PromptError) as error:
            raise click.UsageError(f"{name}, line {number}: {error}") from error
    _check_ids(name, items, [number for number, _ in lines])
    return items


def read_prompt_texts(name: str, form: str | None) -> list[UserPrompt]:
    """Return the prompts of a file without the other options of its lines."""
    items = read_prompts(name, form, False, None, dataclasses.asdict(GenerationRequest()))
    return [item.messages or item.prompt or "" for item in items]


def _form(name: str, first: str) -> str:
    """Return the format by file name; raise click.UsageError for text that looks like JSONL."""
    if name.lower().endswith((".jsonl", ".ndjson")):
        return "jsonl"
    try:
        value = parse(first)
    except JsonError:
        return "text"
    if isinstance(value, dict) and value.keys() & {"prompt", "messages"}:
        raise click.UsageError(f"{name} looks like JSONL; specify --format jsonl or --format text")
    return "text"


def _parse_line(line: str) -> dict[str, Any]:
    fields = parse(line)
    if not isinstance(fields, dict):
        raise ValueError("a line must be a JSON object")
    names = ["id", "prompt", "messages", *option_specs(GenerationRequest)]
    if unknown := [key for key in fields if key not in names]:
        shown = sanitize_line(unknown[0], 100)
        hint = suggest(shown, names) or f"; valid keys are {', '.join(names)}"
        raise ValueError(f"key '{shown}' is unknown{hint}")
    return fields


def _item(
    index: int, fields: dict[str, Any], defaults: dict[str, Any], chat: bool, system: str | None
) -> BatchItem:
    if system is not None and "messages" in fields:
        raise ValueError(
            "--system does not apply to a line with messages; add a system message to the line"
        )
    item = parse_item(index, fields, defaults)
    if not chat or item.messages is not None:
        return item
    if not isinstance(item.prompt, str):
        raise ValueError("a prompt of token ids cannot be a chat message; omit --chat")
    return dataclasses.replace(item, prompt=None, messages=options.messages(item.prompt, system))


def _check_ids(name: str, items: list[BatchItem], numbers: list[int]) -> None:
    seen: dict[str | int, int] = {}
    for item, number in zip(items, numbers, strict=True):
        if item.id is None:
            continue
        if item.id in seen:
            raise click.UsageError(
                f"{name}, line {number}: id {json.dumps(item.id)} is also that of line "
                f"{seen[item.id]}"
            )
        seen[item.id] = number
