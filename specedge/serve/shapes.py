"""The answers of the older endpoints: whole, and as the chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specedge.runtime.requests.stream import Generation
from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.runtime.text.assembler import FinishReason
from specedge.version import __version__

from .asking import Asked
from .errors import ApiError
from .jobs import Piece
from .tokens import Tokens
from .tools.parsing import Called, Parser, Part

FINGERPRINT = f"specedge-{__version__}"
REASONS = {
    FinishReason.END: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
}


@dataclass
class Item:
    """A part of an answer: a text, or the arguments of a call of the function `name`."""

    text: str = ""
    id: str | None = None
    name: str | None = None


@dataclass
class Choice:
    """An answer as it grows, when its first piece came, and what became of it. Where it may call
    functions, a parser reads its text.
    """

    parser: Parser | None = None
    items: list[Item] = field(default_factory=list)
    first: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    done: Generation | None = None

    def parts(self, piece: Piece) -> list[Part]:
        """What a piece makes certain."""
        return [piece.text] if self.parser is None else self.parser.feed(piece.text)

    def last_parts(self) -> list[Part]:
        """What is certain now that the text has ended."""
        return [] if self.parser is None else self.parser.end()

    def add(self, parts: Sequence[Part], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        self.logprobs += logprobs
        for part in parts:
            if not goes_on(self.items, part):
                self.items.append(begun_by(part))
            self.items[-1].text += text_of(part)

    @property
    def text(self) -> str:
        return "".join(item.text for item in self.items if item.name is None)

    @property
    def calls(self) -> list[Item]:
        return [item for item in self.items if item.name is not None]

    @property
    def reason(self) -> str:
        """Why it has ended, as OpenAI's API says it."""
        reason = REASONS[self.generation.finish_reason]
        called = self.parser is not None and self.calls and self.parser.complete
        return "tool_calls" if called and reason == "stop" else reason

    @property
    def generation(self) -> Generation:
        assert self.done is not None
        return self.done


def goes_on(items: Sequence[Item], part: Part) -> bool:
    """Whether a part of an answer is of the last of its items so far."""
    if isinstance(part, Called):
        return part.name is None
    return bool(items) and items[-1].name is None


def begun_by(part: Part) -> Item:
    """The item that a part begins, without its text."""
    return Item("", part.id, part.name) if isinstance(part, Called) else Item()


def text_of(part: Part) -> str:
    return part.arguments if isinstance(part, Called) else part


class Shape(Protocol):
    """One endpoint's way to say things. Lines are of a stream of server-sent events."""

    def begin(self) -> Iterator[str]:
        """Before any text."""

    def piece(
        self, index: int, piece: Piece, parts: Sequence[Part], before: Choice
    ) -> Iterator[str]:
        """A piece of a choice that had come so far before, and what it makes certain."""

    def end(self, index: int, choice: Choice) -> Iterator[str]:
        """A choice has ended."""

    def finish(self, choices: Sequence[Choice]) -> Iterator[str]:
        """All have."""

    def failed(self, error: ApiError) -> Iterator[str]:
        """It goes no further."""

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer at once."""


def usage_of(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """What all choices took; those of one prompt share its tokens."""
    stats = [choice.generation.stats for choice in choices]
    prompt, new = sum(s.num_prompt_tokens for s in stats[::n]), sum(s.num_new_tokens for s in stats)
    drafted, accepted = sum(s.num_drafted for s in stats), sum(s.num_accepted for s in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(s.num_reused_tokens for s in stats[::n])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "speculative": {
            "num_rounds": sum(s.num_rounds for s in stats),
            "num_drafted": drafted,
            "num_accepted": accepted,
            "decode_seconds": sum(s.decode_seconds for s in stats),
        },
    }


def event(facts: Mapping[str, Any], name: str | None = None) -> str:
    """A server-sent event, in ASCII: some clients end lines at U+2028, too."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(facts)}\n\n"


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


class Chunked(ABC):
    """What chats and completions have in common."""

    prefix = object_name = chunk_name = ""

    def __init__(self, model: str, asked: Asked, tokens: Tokens) -> None:
        self.asked, self.tokens = asked, tokens
        self._facts = {"id": new_id(self.prefix), "created": int(time.time()), "model": model}
        self._facts["system_fingerprint"] = FINGERPRINT

    def _chunk(self, choices: list[dict[str, Any]]) -> str:
        usage = {"usage": None} if self.asked.include_usage else {}
        return event(self._facts | {"object": self.chunk_name, "choices": choices} | usage)

    def finish(self, choices: Sequence[Choice]) -> Iterator[str]:
        if self.asked.include_usage:
            usage = usage_of(choices, self.asked.n)
            named = {"object": self.chunk_name, "choices": [], "usage": usage}
            yield event(self._facts | named)
        yield "data: [DONE]\n\n"

    def failed(self, error: ApiError) -> Iterator[str]:
        yield event(error.body)

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        found = [self._choice(i, choice) for i, choice in enumerate(choices)]
        named = {"object": self.object_name, "choices": found}
        return self._facts | named | {"usage": usage_of(choices, self.asked.n)}

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """A whole text, as an answer that is no stream has it."""

    def _ended(self, index: int, choice: Choice) -> dict[str, Any]:
        one = choice.generation
        return {"index": index, "finish_reason": choice.reason, "seed": one.seed}

    def _spans(self, piece: Piece) -> dict[str, Any]:
        return {"spans": [vars(span) for span in piece.spans]} if self.asked.trace else {}

    @property
    def _has_logprobs(self) -> bool:
        return "logprobs" in self.asked.options


class Chat(Chunked):
    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self) -> Iterator[str]:
        for i in range(self.asked.num_choices):
            yield self._chunk([self._delta({"role": "assistant", "content": ""}) | {"index": i}])

    def piece(
        self, index: int, piece: Piece, parts: Sequence[Part], before: Choice
    ) -> Iterator[str]:
        """A chunk for each part; the first has what is known of the piece's tokens."""
        deltas = [
            {"tool_calls": [_call_delta(part)]} if isinstance(part, Called) else {"content": part}
            for part in parts
        ]
        spans, logprobs = self._spans(piece), self._logprobs(piece.logprobs)
        if not deltas and (spans or logprobs):
            deltas = [{}]
        for delta in deltas:
            yield self._chunk([self._delta(delta, logprobs) | {"index": index} | spans])
            spans, logprobs = {}, None

    def end(self, index: int, choice: Choice) -> Iterator[str]:
        yield self._chunk([self._ended(index, choice) | {"delta": {}, "logprobs": None}])

    def _delta(self, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if calls := choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = self._logprobs(choice.logprobs)
        return self._ended(index, choice) | {"message": message, "logprobs": logprobs}

    def _logprobs(self, found: list[TokenLogprobs]) -> dict[str, Any] | None:
        return self.tokens.of_chat(found) if self._has_logprobs else None


def _call(call: Item) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.text}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(part: Called) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, **_call(Item(part.arguments, part.id, part.name))}


class Completion(Chunked):
    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, asked: Asked, tokens: Tokens) -> None:
        super().__init__(model, asked, tokens)
        self._lengths = Counter[int]()  # of each choice's tokens so far, in characters

    def begin(self) -> Iterator[str]:
        yield from ()

    def piece(
        self, index: int, piece: Piece, parts: Sequence[Part], before: Choice
    ) -> Iterator[str]:
        if logprobs := self._logprobs(piece.logprobs, self._lengths[index]):
            self._lengths[index] += sum(map(len, logprobs["tokens"]))
        one = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}
        yield self._chunk([one | self._spans(piece)])

    def end(self, index: int, choice: Choice) -> Iterator[str]:
        yield self._chunk([self._ended(index, choice) | {"text": "", "logprobs": None}])

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.logprobs, 0)
        return self._ended(index, choice) | {"text": choice.text, "logprobs": logprobs}

    def _logprobs(self, found: list[TokenLogprobs], start: int) -> dict[str, Any] | None:
        return self.tokens.of_completion(found, start) if self._has_logprobs else None
