"""A prompt with all that is asked of it, and the facts that answer it: a line of results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specedge.errors import DrafterError, SpecEdgeError
from specedge.option_specs import option_specs
from specedge.request import GenerationRequest

from ..text.messages import plain_messages

if TYPE_CHECKING:
    from ..drafters.registry import DrafterRegistry
    from .pipeline import Pipeline
    from .stream import Generation


@dataclass(frozen=True)
class Item:
    """One prompt of a file: `prompt` or `messages`, and every option of its request."""

    index: int
    id: str | int | None
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    request: dict[str, Any]
    place: str = ""  # "prompts.jsonl, line 3: " where the line itself names a drafter
    asked: str = ""  # `asked_of` it


def item_of(index: int, facts: dict[str, Any], request: dict[str, Any]) -> Item:
    """A prompt by its facts: `prompt` or `messages`, perhaps `id`, and options of its own.

    `request` has every option for what the facts do not give. ValueError or PromptError for facts
    that cannot be.
    """
    if ("prompt" in facts) == ("messages" in facts):
        raise ValueError("a line must have either 'prompt' or 'messages'")
    _check_unicode(facts)
    id_, prompt, messages = (facts.get(name) for name in ("id", "prompt", "messages"))
    if "id" in facts and type(id_) not in (str, int):
        raise ValueError("id must be text or a whole number")
    if "messages" in facts:
        messages = plain_messages(facts["messages"])
    elif not (isinstance(prompt, str) or _are_tokens(prompt)):
        raise ValueError("prompt must be text or a list of token ids")
    request = request | _own_options(facts)
    GenerationRequest(**request)
    return Item(index, id_, prompt, messages, request)


def _are_tokens(prompt: object) -> bool:
    given = prompt if isinstance(prompt, list) else []
    return bool(given) and all(type(token) is int and token >= 0 for token in given)


def _own_options(facts: dict[str, Any]) -> dict[str, Any]:
    """The options that facts give, of the right types; null gives none."""
    found = {}
    for name, (_, declared) in option_specs(GenerationRequest).items():
        if (value := facts.get(name)) is None:
            continue
        if isinstance(value, bool) and declared.type != "flag":
            raise ValueError(f"{name} must not be {json.dumps(value)}")
        found[name] = value
    return found


def _check_unicode(facts: dict[str, Any]) -> None:
    try:
        json.dumps(facts, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode text ({error.reason})") from error


def asked_of(item: Item, bundle: str, ops: str) -> str:
    """A hash that tells its line from those of other prompts, options, op sets and bundles.

    `bundle` is the hash of its manifest. Seed and K stand in the line itself, and are left out.
    """
    request = asdict(GenerationRequest(**item.request))
    del request["seed"], request["num_draft_tokens"]
    facts = [bundle, ops, item.prompt, item.messages, request]
    text = json.dumps(facts, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seed_of(seed: int, index: int) -> int:
    """The seed of the prompt of an index, within the seeds that there are."""
    own = seed + index
    return own if own < 2**64 else own - 2**64


def check_drafters(drafters: DrafterRegistry, items: Iterable[tuple[str, object]]) -> None:
    """DrafterError for the first of places and the drafters named there that cannot be used."""
    for place, name in items:
        try:
            drafters.check(name)
        except DrafterError as error:
            raise DrafterError(f"{place}{error}") from error


def answered(pipeline: Pipeline, item: Item) -> dict[str, Any]:
    """What became of a prompt; one that cannot be continued has its error instead."""
    try:
        if item.messages is not None:
            made = pipeline.chat(item.messages, **item.request)
        else:
            made = pipeline.generate(item.prompt or "", **item.request)
    except SpecEdgeError as error:
        return failed(item, str(error))
    return _name(item) | _facts(made)


def failed(item: Item, error: str) -> dict[str, Any]:
    """The facts of a prompt that could not be continued."""
    return _name(item) | {"error": error}


def _name(item: Item) -> dict[str, Any]:
    own = {} if item.id is None else {"id": item.id}
    return {"index": item.index, **own, "asked": item.asked}


def _facts(made: Generation) -> dict[str, Any]:
    """What the same seed and table of costs give again, byte for byte, whatever ran before: no
    seconds, and nothing of what a cache held.
    """
    from .stats import as_dict

    counts = {
        name: value
        for name, value in as_dict(made.stats).items()
        if "seconds" not in name and name != "num_reused_tokens"
    }
    names = ("text", "tokens", "finish_reason", "seed", "num_draft_tokens", "lossy", "drafter")
    facts: dict[str, Any] = {name: getattr(made, name) for name in names}
    facts |= {"stats": counts, "near_ties": [vars(tie) for tie in made.near_ties]}
    if made.logprobs is not None:
        facts["logprobs"] = [vars(one) for one in made.logprobs]
    return facts
