"""Batch items: prompts of a file with their options, and their results as JSON objects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from specedge.errors import DrafterError, SpecEdgeError
from specedge.option_specs import option_specs
from specedge.request import AUTO, GenerationRequest

from ..text.messages import plain_messages
from .stream import run_together

if TYPE_CHECKING:
    from specedge.bundle import Bundle

    from ..drafters.registry import DrafterRegistry
    from .pipeline import Pipeline
    from .stream import Generation, Stream


@dataclass(frozen=True)
class BatchItem:
    """Prompt of a batch: `prompt` or `messages`, and every option of its request.

    `location` is "prompts.jsonl, line 3: " if the line itself names a drafter, `fingerprint` the
    fingerprint of the item.
    """

    index: int
    id: str | int | None
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    request: dict[str, Any]
    location: str = ""
    fingerprint: str = ""


def parse_item(index: int, fields: dict[str, Any], request: dict[str, Any]) -> BatchItem:
    """Parse a batch item.

    Args:
        index: Index of the item.
        fields: Fields of the item: `prompt` or `messages`, optionally `id` and options.
        request: Every option, for those that the item does not give.

    Raises:
        ValueError: The fields are not valid.
        PromptError: The messages are not valid.
    """
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError("a line must have either 'prompt' or 'messages'")
    _check_unicode(fields)
    id_, prompt, messages = (fields.get(name) for name in ("id", "prompt", "messages"))
    if "id" in fields and type(id_) not in (str, int):
        raise ValueError("id must be text or an integer")
    if "messages" in fields:
        messages = plain_messages(fields["messages"])
    elif not (isinstance(prompt, str) or _are_tokens(prompt)):
        raise ValueError("prompt must be text or a list of token ids")
    request = request | _parse_options(fields)
    GenerationRequest(**request)
    return BatchItem(index, id_, prompt, messages, request)


def _are_tokens(prompt: object) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(type(token) is int and token >= 0 for token in prompt)


def _parse_options(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an item; null is the default."""
    options = {}
    for name, (_, spec) in option_specs(GenerationRequest).items():
        if (value := fields.get(name)) is None:
            continue
        if isinstance(value, bool) and spec.type != "flag":
            raise ValueError(f"{name} must not be {json.dumps(value)}")
        options[name] = value
    return options


def _check_unicode(fields: dict[str, Any]) -> None:
    try:
        json.dumps(fields, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode text ({error.reason})") from error


def item_fingerprint(item: BatchItem, bundle: str, ops: str) -> str:
    """Return the fingerprint of an item: its prompt, options, graph variant and bundle.

    Seed and K are fields of the result itself and left out.

    Args:
        item: Batch item.
        bundle: SHA-256 of the bundle's manifest.
        ops: Graph variants.
    """
    request = asdict(GenerationRequest(**item.request))
    del request["seed"], request["num_draft_tokens"]
    content = [bundle, ops, item.prompt, item.messages, request]
    text = json.dumps(content, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_items(items: Sequence[BatchItem], bundle: Bundle, drafters: DrafterRegistry) -> None:
    """Raise errors of the chat template and of drafters before the first item runs."""
    if any(item.messages for item in items):
        from ..text.chat import load_template  # other prompts do not need Jinja

        load_template(bundle)
    for item in items:
        try:
            drafters.check(item.request["drafter"])
        except DrafterError as error:
            raise DrafterError(f"{item.location}{error}") from error


def run_items(pipeline: Pipeline, items: Sequence[BatchItem]) -> Iterator[dict[str, Any]]:
    """Yield the result of each item, or its error, in their order.

    As many items run together as the pipeline has slots. They run one at a time if drafts depend on
    earlier outputs, or a custom drafter, which has one text at a time, is used.
    """
    is_ordered = any(item.request.get("remember") for item in items)
    has_object = any(not isinstance(item.request.get("drafter", ""), str) for item in items)
    limit = 1 if is_ordered or has_object else None
    begins = [partial(_begin, pipeline, item) for item in items]
    for item, result in zip(items, run_together(pipeline.slots, begins, limit), strict=True):
        if isinstance(result, SpecEdgeError):
            yield error_result(item, str(result))
            continue
        is_planned = result.num_draft_tokens == AUTO
        costs = {"costs": pipeline.costs.fingerprint} if is_planned else {}
        yield _identify(item) | _generation_fields(result) | costs


def _begin(pipeline: Pipeline, item: BatchItem, wait: bool) -> Stream:
    if item.messages is not None:
        return pipeline.stream_chat(item.messages, wait=wait, **item.request)
    return pipeline.stream(item.prompt or "", wait=wait, **item.request)


def error_result(item: BatchItem, error: str) -> dict[str, Any]:
    """Return the result of an item that failed."""
    return _identify(item) | {"error": error}


def _identify(item: BatchItem) -> dict[str, Any]:
    identity = {} if item.id is None else {"id": item.id}
    return {"index": item.index, **identity, "asked": item.fingerprint}


def _generation_fields(generation: Generation) -> dict[str, Any]:
    """Return the fields that the same seed and K reproduce byte for byte.

    Seconds and reused tokens are left out.
    """
    from .stats import as_dict

    counts = {
        name: value
        for name, value in as_dict(generation.stats).items()
        if "seconds" not in name and name != "num_reused_tokens"
    }
    names = ("text", "tokens", "finish_reason", "seed", "num_draft_tokens", "lossy", "drafter")
    fields: dict[str, Any] = {name: getattr(generation, name) for name in names}
    fields |= {"stats": counts, "near_ties": [vars(tie) for tie in generation.near_ties]}
    if generation.logprobs is not None:
        fields["logprobs"] = [vars(logprob) for logprob in generation.logprobs]
    return fields
