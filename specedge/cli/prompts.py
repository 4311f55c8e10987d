"""Files of prompts for `specedge generate --prompts`: read and checked whole, before any runs."""

from __future__ import annotations

import dataclasses
import json
import secrets
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options
from specedge.cli.terminal import one_line
from specedge.errors import PromptError
from specedge.option_specs import option_specs, suggest
from specedge.request import GenerationRequest
from specedge.runtime.requests.items import Item, item_of, seed_of
from specedge.strict_json import JsonError, parse

if TYPE_CHECKING:
    from specedge.runtime.text.prompts import UserPrompt


def read(
    name: str, form: str | None, chat: bool, system: str | None, request: dict[str, Any]
) -> list[Item]:
    """The prompts of a file, or of standard input for `-`; a bad line is a click.UsageError.

    `form` is "text", a prompt a line, or "jsonl". `request` holds for lines that say no other.
    The prompt of index i is drawn with seed + i, unless its line has a seed.
    """
    with options.usage_errors():
        GenerationRequest(**request)
    text = options.read_text(name)
    name = "standard input" if name == "-" else name
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise click.UsageError(f"{name} holds no prompt")
    if form is None:
        form = _form(name, lines[0][1])
    seed = secrets.randbits(32) if request["seed"] is None else request["seed"]
    items: list[Item] = []
    for index, (number, line) in enumerate(lines):
        defaults = request | {"seed": seed_of(seed, index)}
        try:
            facts = _facts(line) if form == "jsonl" else {"prompt": line.removesuffix("\r")}
            item = _item(index, facts, defaults, chat, system)
            place = f"{name}, line {number}: " if "drafter" in facts else ""
            items.append(dataclasses.replace(item, place=place))
        except (ValueError, PromptError) as error:
            raise click.UsageError(f"{name}, line {number}: {error}") from error
    _check_ids(name, items, [number for number, _ in lines])
    return items


def alone(name: str, form: str | None) -> list[UserPrompt]:
    """The prompts of a file where other options on its lines do not matter."""
    items = read(name, form, False, None, dataclasses.asdict(GenerationRequest()))
    return [item.messages or item.prompt or "" for item in items]


def _form(name: str, first: str) -> str:
    """By the file's name; text that looks like JSONL is not guessed at."""
    if name.lower().endswith((".jsonl", ".ndjson")):
        return "jsonl"
    try:
        value = parse(first)
    except JsonError:
        return "text"
    if isinstance(value, dict) and value.keys() & {"prompt", "messages"}:
        raise click.UsageError(f"{name} looks like JSONL; give --format jsonl or --format text")
    return "text"


def _facts(line: str) -> dict[str, Any]:
    facts = parse(line)
    if not isinstance(facts, dict):
        raise ValueError("a line must be a JSON object")
    known = ["id", "prompt", "messages", *option_specs(GenerationRequest)]
    if unknown := [key for key in facts if key not in known]:
        shown = one_line(unknown[0], 100)
        hint = suggest(shown, known) or f"; known are {', '.join(known)}"
        raise ValueError(f"key '{shown}' is unknown{hint}")
    return facts


def _item(
    index: int, facts: dict[str, Any], defaults: dict[str, Any], chat: bool, system: str | None
) -> Item:
    if system is not None and "messages" in facts:
        raise ValueError("a line with messages takes no --system; put it into the messages")
    item = item_of(index, facts, defaults)
    if not chat or item.messages is not None:
        return item
    if not isinstance(item.prompt, str):
        raise ValueError("a prompt of token ids is no message of a chat; do without --chat")
    return dataclasses.replace(item, prompt=None, messages=options.messages(item.prompt, system))


def _check_ids(name: str, items: list[Item], numbers: list[int]) -> None:
    seen: dict[str | int, int] = {}
    for item, number in zip(items, numbers, strict=True):
        if item.id is None:
            continue
        if item.id in seen:
            raise click.UsageError(
                f"{name}, line {number}: id {json.dumps(item.id)} is that of line {seen[item.id]}"
            )
        seen[item.id] = number
