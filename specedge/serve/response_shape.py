"""The answers of /v1/responses: one message of one text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from specedge.runtime.text.assembler import FinishReason

from .asking import Asked
from .errors import ApiError
from .jobs import Piece
from .shapes import Choice, event, new_id, usage_of
from .tokens import Tokens

_INCOMPLETE = {FinishReason.LENGTH, FinishReason.CONTEXT}


class Response:
    """A response, and the events by which it comes."""

    def __init__(self, model: str, asked: Asked, tokens: Tokens) -> None:
        self._number = 0
        self._item = new_id("msg")
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
        item = self._message("in_progress", [])
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=_part(""))

    def piece(self, index: int, piece: Piece, before: Choice) -> Iterator[str]:
        delta = {"delta": piece.text, "logprobs": []}
        yield self._event("response.output_text.delta", **self._place, **delta)

    def end(self, index: int, choice: Choice) -> Iterator[str]:
        text, part = {"text": choice.text, "logprobs": []}, _part(choice.text)
        yield self._event("response.output_text.done", **self._place, **text)
        yield self._event("response.content_part.done", **self._place, part=part)
        item = self.whole([choice])["output"][0]
        yield self._event("response.output_item.done", output_index=0, item=item)

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
        cut = one.finish_reason in _INCOMPLETE
        status = "incomplete" if cut else "completed"
        usage = usage_of(choices, 1)
        return self._facts | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._message(status, [_part(choice.text)])],
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

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": 0, "content_index": 0}

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        facts = {"id": self._item, "type": "message", "role": "assistant"}
        return facts | {"status": status, "content": content}

    def _event(self, kind: str, **facts: Any) -> str:
        numbered = {"type": kind, "sequence_number": self._number, **facts}
        self._number += 1
        return event(numbered, kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
