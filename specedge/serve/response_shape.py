"""The answers of /v1/responses: a message of one text, and calls of functions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from specedge.runtime.text.assembler import FinishReason

from .asking import Asked
from .errors import ApiError
from .jobs import Piece
from .shapes import Choice, Item, begun_by, event, goes_on, new_id, text_of, usage_of
from .tokens import Tokens
from .tools.parsing import Part

_INCOMPLETE = {FinishReason.LENGTH, FinishReason.CONTEXT}
_CUT = {"reason": "max_output_tokens"}


class Response:
    """A response, and the events by which it comes."""

    def __init__(self, model: str, asked: Asked, tokens: Tokens) -> None:
        self._number = 0
        self._ids: list[str] = []
        self._items: list[Item] = []  # as far as events have told them
        self._may_call = asked.tools is not None
        given = asked.options
        self._facts: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "in_progress",
            "output": [],
            "error": None,
            "incomplete_details": None,
            "metadata": {},
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "temperature": given["temperature"],
            "top_p": given.get("top_p", 1.0),
            "store": False,
            "usage": None,
            **asked.facts,
        }

    def begin(self) -> Iterator[str]:
        yield self._event("response.created", response=self._facts)
        yield self._event("response.in_progress", response=self._facts)
        if not self._may_call:
            yield from self._opened(Item())

    def piece(
        self, index: int, piece: Piece, parts: Sequence[Part], before: Choice
    ) -> Iterator[str]:
        for part in parts:
            if not goes_on(self._items, part):
                if self._items:
                    yield from self._closed("completed")
                yield from self._opened(begun_by(part))
            item = self._items[-1]
            text = text_of(part)
            item.text += text
            yield from self._grown(item, text)

    def end(self, index: int, choice: Choice) -> Iterator[str]:
        if not self._items:
            yield from self._opened(Item())
        yield from self._closed(self._status(choice))

    def finish(self, choices: Sequence[Choice]) -> Iterator[str]:
        found = self.whole(choices)
        yield self._event(f"response.{found['status']}", response=found)

    def failed(self, error: ApiError) -> Iterator[str]:
        said = {"code": "server_error", "message": error.message}
        yield self._event(
            "response.failed", response=self._facts | {"status": "failed", "error": said}
        )

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        one = choice.generation
        status = self._status(choice)
        items = choice.items or [Item()]
        ended = ["completed"] * (len(items) - 1) + [status]
        usage = usage_of(choices, 1)
        return self._facts | {
            "status": status,
            "incomplete_details": None if status == "completed" else _CUT,
            "output": [self._shown(i, items[i], ended[i]) for i in range(len(items))],
            "seed": one.seed,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
                "speculative": usage["speculative"],
            },
        }

    def _status(self, choice: Choice) -> str:
        cut = choice.generation.finish_reason in _INCOMPLETE
        return "incomplete" if cut else "completed"

    def _opened(self, item: Item) -> Iterator[str]:
        """An item begins, without its text."""
        self._items.append(item)
        shown = self._shown(self._last, item, "in_progress")
        if item.name is None:
            shown["content"] = []
        yield self._event("response.output_item.added", output_index=self._last, item=shown)
        if item.name is None:
            yield self._event("response.content_part.added", **self._place, part=_part(""))

    def _grown(self, item: Item, text: str) -> Iterator[str]:
        if item.name is None:
            delta = {"delta": text, "logprobs": []}
            yield self._event("response.output_text.delta", **self._place, **delta)
        elif text:
            place = {"item_id": self._id(self._last, item), "output_index": self._last}
            yield self._event("response.function_call_arguments.delta", **place, delta=text)

    def _closed(self, status: str) -> Iterator[str]:
        """The last item has ended."""
        item, last = self._items[-1], self._last
        if item.name is None:
            text, part = {"text": item.text, "logprobs": []}, _part(item.text)
            yield self._event("response.output_text.done", **self._place, **text)
            yield self._event("response.content_part.done", **self._place, part=part)
        else:
            place = {"item_id": self._id(last, item), "output_index": last}
            done = {"name": item.name, "arguments": item.text}
            yield self._event("response.function_call_arguments.done", **place, **done)
        shown = self._shown(last, item, status)
        yield self._event("response.output_item.done", output_index=last, item=shown)

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    @property
    def _place(self) -> dict[str, Any]:
        """Of the last item's text."""
        item_id = self._id(self._last, self._items[-1])
        return {"item_id": item_id, "output_index": self._last, "content_index": 0}

    def _id(self, index: int, item: Item) -> str:
        while len(self._ids) <= index:
            self._ids.append(new_id("msg" if item.name is None else "fc"))
        return self._ids[index]

    def _shown(self, index: int, item: Item, status: str) -> dict[str, Any]:
        facts: dict[str, Any] = {"id": self._id(index, item), "status": status}
        if item.name is None:
            message = {"type": "message", "role": "assistant", "content": [_part(item.text)]}
            return facts | message
        call = {"call_id": item.id, "name": item.name, "arguments": item.text}
        return facts | {"type": "function_call"} | call

    def _event(self, kind: str, **facts: Any) -> str:
        numbered = {"type": kind, "sequence_number": self._number, **facts}
        self._number += 1
        return event(numbered, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
