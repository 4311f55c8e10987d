"""A prompt with all that is asked of it, and the facts that answer it: a line of results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from specedge.errors import DrafterError, SpecEdgeError
from specedge.request import Request

if TYPE_CHECKING:
    from .drafters.registry import Drafters
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


def asked_of(item: Item, bundle: str, ops: str) -> str:
    """A hash that tells its line from those of other prompts, options, op sets and bundles.

    `bundle` is the hash of its manifest. Seed and K stand in the line itself, and are left out.
    """
    request = asdict(Request(**item.request))
    del request["seed"], request["num_draft_tokens"]
    facts = [bundle, ops, item.prompt, item.messages, request]
    text = json.dumps(facts, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seed_of(seed: int, index: int) -> int:
    """The seed of the prompt of an index, within the seeds that there are."""
    own = seed + index
    return own if own < 2**64 else own - 2**64


def check_drafters(drafters: Drafters, items: Iterable[tuple[str, object]]) -> None:
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
