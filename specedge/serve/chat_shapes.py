"""Responses of /v1/chat/completions and /v1/completions, whole and as chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.version import __version__

from .choices import OutputItem, ResponseChoice, new_id, sse_event, usage_of
from .errors import ApiError
from .job_queue import TextPiece
from .requests import ParsedRequest
from .tools.parser import AnswerPart, CallDelta

FINGERPRINT = f"specedge-{__version__}"
MIN_LOGPROB = -9999.0  # instead of minus infinity, which JSON lacks; as in OpenAI's API
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class LogprobFormatter:
    """Formats log-probabilities with the texts of their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def for_chat(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return `choices[].logprobs` of a chat."""
        content = [
            self._entry(entry.token, entry.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top]}
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def for_completion(self, logprobs: Sequence[TokenLogprobs], start: int) -> dict[str, Any]:
        """Return `choices[].logprobs` of a completion; `start` is the first token's text offset."""
        texts = [self._text(entry.token) for entry in logprobs]
        return {
            "tokens": texts,
            "token_logprobs": [max(entry.logprob, MIN_LOGPROB) for entry in logprobs],
            "top_logprobs": [
                {self._text(token): max(logprob, MIN_LOGPROB) for token, logprob in entry.top}
                for entry in logprobs
            ],
            "text_offset": list(_offsets(texts, start)),
        }

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        utf8 = None if _REPLACEMENT in text else list(text.encode())  # None: part of a character
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": utf8}


def _offsets(texts: Sequence[str], start: int) -> Iterator[int]:
    for text in texts:
        yield start
        start += len(text)


class _ChunkShaper(ABC):
    """Common parts of the responses of chats and completions."""

    prefix = object_name = chunk_name = ""

    def __init__(self, model: str, request: ParsedRequest, logprobs: LogprobFormatter) -> None:
        self._request, self._logprobs = request, logprobs
        self._fields = {"id": new_id(self.prefix), "created": int(time.time()), "model": model}
        self._fields["system_fingerprint"] = FINGERPRINT

    def finish(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        if self._request.include_usage:
            usage = usage_of(choices, self._request.num_choices_each)
            yield sse_event(
                self._fields | {"object": self.chunk_name, "choices": [], "usage": usage}
            )
        yield "data: [DONE]\n\n"

    def fail(self, error: ApiError) -> Iterator[str]:
        yield sse_event(error.body)

    def body(self, choices: Sequence[ResponseChoice]) -> dict[str, Any]:
        entries = [self._choice(i, choice) for i, choice in enumerate(choices)]
        usage = usage_of(choices, self._request.num_choices_each)
        return self._fields | {"object": self.object_name, "choices": entries, "usage": usage}

    @abstractmethod
    def _choice(self, index: int, choice: ResponseChoice) -> dict[str, Any]:
        """Return a complete choice for a response that is no stream."""

    def _chunk(self, choices: list[dict[str, Any]]) -> str:
        usage = {"usage": None} if self._request.include_usage else {}
        return sse_event(self._fields | {"object": self.chunk_name, "choices": choices} | usage)

    def _ending(self, index: int, choice: ResponseChoice) -> dict[str, Any]:
        seed = choice.generation.seed
        return {"index": index, "finish_reason": choice.finish_reason, "seed": seed}

    def _spans(self, piece: TextPiece) -> dict[str, Any]:
        return {"spans": [vars(span) for span in piece.spans]} if self._request.trace else {}

    @property
    def _has_logprobs(self) -> bool:
        return "logprobs" in self._request.options


class ChatShaper(_ChunkShaper):
    """Responses of /v1/chat/completions."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self) -> Iterator[str]:
        for i in range(self._request.num_choices):
            yield self._chunk([self._delta({"role": "assistant", "content": ""}) | {"index": i}])

    def piece(
        self, index: int, piece: TextPiece, parts: Sequence[AnswerPart], choice: ResponseChoice
    ) -> Iterator[str]:
        """Yield a chunk for each part; the first has the spans and log-probabilities."""
        deltas = [
            {"tool_calls": [_call_delta(part)]}
            if isinstance(part, CallDelta)
            else {"content": part}
            for part in parts
        ]
        spans, logprobs = self._spans(piece), self._format_logprobs(piece.logprobs)
        if not deltas and (spans or logprobs):
            deltas = [{}]
        for delta in deltas:
            yield self._chunk([self._delta(delta, logprobs) | {"index": index} | spans])
            spans, logprobs = {}, None

    def end(self, index: int, choice: ResponseChoice) -> Iterator[str]:
        yield self._chunk([self._ending(index, choice) | {"delta": {}, "logprobs": None}])

    def _delta(self, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, index: int, choice: ResponseChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if calls := choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = self._format_logprobs(choice.logprobs)
        return self._ending(index, choice) | {"message": message, "logprobs": logprobs}

    def _format_logprobs(self, logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        return self._logprobs.for_chat(logprobs) if self._has_logprobs else None


def _call(call: OutputItem) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.text}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(part: CallDelta) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, **_call(OutputItem(part.arguments, part.id, part.name))}


class CompletionShaper(_ChunkShaper):
    """Responses of /v1/completions."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, request: ParsedRequest, logprobs: LogprobFormatter) -> None:
        super().__init__(model, request, logprobs)
        self._lengths = Counter[int]()  # characters of each choice's tokens so far

    def begin(self) -> Iterator[str]:
        yield from ()

    def piece(
        self, index: int, piece: TextPiece, parts: Sequence[AnswerPart], choice: ResponseChoice
    ) -> Iterator[str]:
        if logprobs := self._format_logprobs(piece.logprobs, self._lengths[index]):
            self._lengths[index] += sum(map(len, logprobs["tokens"]))
        entry = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}
        yield self._chunk([entry | self._spans(piece)])

    def end(self, index: int, choice: ResponseChoice) -> Iterator[str]:
        yield self._chunk([self._ending(index, choice) | {"text": "", "logprobs": None}])

    def _choice(self, index: int, choice: ResponseChoice) -> dict[str, Any]:
        logprobs = self._format_logprobs(choice.logprobs, 0)
        return self._ending(index, choice) | {"text": choice.text, "logprobs": logprobs}

    def _format_logprobs(self, logprobs: list[TokenLogprobs], start: int) -> dict[str, Any] | None:
        return self._logprobs.for_completion(logprobs, start) if self._has_logprobs else None
