"""Responses of /v1/responses, complete and streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from specedge.runtime.requests.stream import TextPiece
from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.runtime.text.detokenizer import FinishReason

from .choices import (
    OutputItem,
    ResponseChoice,
    continues_item,
    new_id,
    new_item,
    part_text,
    sse_event,
    usage_of,
)
from .errors import ApiError
from .logprobs import LogprobFormatter, MessageLogprobs
from .messages import call_message, encode_reasoning
from .output_parser import AnswerPart
from .requests import ParsedRequest
from .response_store import StoredResponse

_INCOMPLETE = {FinishReason.LENGTH, FinishReason.CONTEXT}
_INCOMPLETE_DETAILS = {"reason": "max_output_tokens"}


class ResponsesShaper:
    """Shaper of response objects and of the events of their streams."""

    def __init__(self, model: str, request: ParsedRequest, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._logprobs: MessageLogprobs | None = None
        self._num_sent = 0  # entries of the last message that its deltas contain
        self._sequence_number = 0
        self._request = request
        self._ids: list[str] = []
        self._items: list[OutputItem] = []  # those reported by events so far
        options = request.options
        self._fields: dict[str, Any] = {
            "id": new_id("resp_"),
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
            "temperature": options["temperature"],
            "top_p": options.get("top_p", 1.0),
            "store": False,
            "background": False,
            "truncation": "disabled",
            "usage": None,
            **request.echoed,
        }

    def begin(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        yield self._event("response.created", response=self._fields)
        yield self._event("response.in_progress", response=self._fields)

    def piece(
        self, index: int, piece: TextPiece, parts: Sequence[AnswerPart], choice: ResponseChoice
    ) -> Iterator[str]:
        self._add_logprobs(choice, piece.logprobs)
        for part in parts:
            if not continues_item(self._items, part):
                if self._items:
                    yield from self._finish_item("completed")
                yield from self._add_item(new_item(part))
            item = self._items[-1]
            text = part_text(part)
            item.text += text
            yield from self._item_delta(item, text)

    def end(self, index: int, choice: ResponseChoice) -> Iterator[str]:
        self._end_logprobs()
        if not self._items or (self._items[-1].is_reasoning and _status(choice) == "completed"):
            if self._items:
                yield from self._finish_item("completed")
            yield from self._add_item(OutputItem())
        yield from self._finish_item(_status(choice))

    def finish(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        response = self.body(choices)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> Iterator[str]:
        error_fields = {"code": "server_error", "message": error.message}
        response = self._fields | {"status": "failed", "error": error_fields}
        yield self._event("response.failed", response=response)

    def body(self, choices: Sequence[ResponseChoice]) -> dict[str, Any]:
        (choice,) = choices
        if self._logprobs is None:
            self._add_logprobs(choice, choice.logprobs)
            self._end_logprobs()
        status = _status(choice)
        items = [*choice.items]
        if not items or (items[-1].is_reasoning and status == "completed"):
            items.append(OutputItem())
        statuses = ["completed"] * (len(items) - 1) + [status]
        usage = usage_of(choices, 1)
        response = self._fields | {
            "status": status,
            "incomplete_details": None if status == "completed" else _INCOMPLETE_DETAILS,
            "output": [self._item_json(items, i, status) for i, status in enumerate(statuses)],
            "seed": choice.generation.seed,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": choice.num_reasoning_tokens,
                },
                "total_tokens": usage["total_tokens"],
                "speculative": usage["speculative"],
            },
        }
        if self._request.store is not None:
            messages = [*self._request.messages, _message(choice)]
            self._request.store.add(StoredResponse(response, messages))
        return response

    def _add_logprobs(self, choice: ResponseChoice, logprobs: Sequence[TokenLogprobs]) -> None:
        if "logprobs" not in self._request.options:
            return
        if self._logprobs is None:
            formatter = LogprobFormatter(choice.detokenizer(self._tokenizer))
            detokenizer, parser = choice.detokenizer(self._tokenizer), choice.new_parser()
            self._logprobs = MessageLogprobs(formatter, detokenizer, parser)
        self._logprobs.add(logprobs)

    def _end_logprobs(self) -> None:
        if self._logprobs is not None:
            self._logprobs.end()

    def _logprobs_of(self, items: Sequence[OutputItem], index: int) -> list[dict[str, Any]]:
        """Return the log-probabilities of an item so far, empty unless they are requested."""
        number = sum(item.is_text for item in items[:index])
        messages = [] if self._logprobs is None else self._logprobs.messages
        return messages[number] if number < len(messages) else []

    def _add_item(self, item: OutputItem) -> Iterator[str]:
        """Yield the events at the start of an item."""
        self._items.append(item)
        self._num_sent = 0
        item_json = self._item_json(self._items, self._last, "in_progress")
        if item.name is None:
            item_json["content"] = []
        yield self._event("response.output_item.added", output_index=self._last, item=item_json)
        if item.name is None:
            part = _content_part(item, "")
            yield self._event("response.content_part.added", **self._content_location, part=part)

    def _item_delta(self, item: OutputItem, text: str) -> Iterator[str]:
        if item.is_reasoning:
            location = self._content_location
            yield self._event("response.reasoning_text.delta", **location, delta=text)
        elif item.name is None:
            logprobs = self._logprobs_of(self._items, self._last)[self._num_sent :]
            self._num_sent += len(logprobs)
            delta = {"delta": text, "logprobs": logprobs}
            yield self._event("response.output_text.delta", **self._content_location, **delta)
        elif text:
            location = {"item_id": self._id(self._last, item), "output_index": self._last}
            yield self._event("response.function_call_arguments.delta", **location, delta=text)

    def _finish_item(self, status: str) -> Iterator[str]:
        """Yield the events at the end of the last item."""
        item, last = self._items[-1], self._last
        if item.name is None:
            location = self._content_location
            part = _content_part(item, item.text, self._logprobs_of(self._items, last))
            text = {key: part[key] for key in ("text", "logprobs") if key in part}
            yield self._event(f"response.{part['type']}.done", **location, **text)
            yield self._event("response.content_part.done", **location, part=part)
        else:
            yield self._event(
                "response.function_call_arguments.done",
                item_id=self._id(last, item),
                output_index=last,
                name=item.name,
                arguments=item.text,
            )
        item_json = self._item_json(self._items, last, status)
        yield self._event("response.output_item.done", output_index=last, item=item_json)

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    @property
    def _content_location(self) -> dict[str, Any]:
        """Return the fields that identify the last item's content part."""
        item_id = self._id(self._last, self._items[-1])
        return {"item_id": item_id, "output_index": self._last, "content_index": 0}

    def _id(self, index: int, item: OutputItem) -> str:
        while len(self._ids) <= index:
            prefix = "rs" if item.is_reasoning else "msg" if item.name is None else "fc"
            self._ids.append(new_id(f"{prefix}_"))
        return self._ids[index]

    def _item_json(self, items: Sequence[OutputItem], index: int, status: str) -> dict[str, Any]:
        item = items[index]
        fields: dict[str, Any] = {"id": self._id(index, item), "status": status}
        if item.is_reasoning:
            content = [_content_part(item, item.text)]
            encrypted = encode_reasoning(item.text) if self._request.encodes_reasoning else None
            fields |= {"type": "reasoning", "summary": [], "content": content}
            return fields | {"encrypted_content": encrypted}
        if item.name is None:
            logprobs = self._logprobs_of(items, index)
            content = [_content_part(item, item.text, logprobs)]
            return fields | {"type": "message", "role": "assistant", "content": content}
        call = {"call_id": item.id, "name": item.name, "arguments": item.text}
        return fields | {"type": "function_call"} | call

    def _event(self, event_type: str, **fields: Any) -> str:
        payload = {"type": event_type, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return sse_event(payload, event_type)


def _message(choice: ResponseChoice) -> dict[str, Any]:
    """Return the assistant message of a choice, for later requests of the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if reasoning := choice.reasoning:
        message["reasoning_content"] = reasoning
    if calls := choice.calls:
        message["tool_calls"] = [
            call_message(call.id or "", call.name or "", call.text) for call in calls
        ]
    return message


def _status(choice: ResponseChoice) -> str:
    is_truncated = choice.generation.finish_reason in _INCOMPLETE
    return "incomplete" if is_truncated else "completed"


def _content_part(
    item: OutputItem, text: str, logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    if item.is_reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}
