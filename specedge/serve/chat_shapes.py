"""Responses of /v1/chat/completions and /v1/completions, complete and streamed."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from specedge.runtime.requests.stream import TextPiece
from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.runtime.text.detokenizer import Detokenizer
from specedge.runtime.text.tokenizer import decode
from specedge.version import __version__

from .choices import OutputItem, ResponseChoice, new_id, sse_event, usage_of
from .errors import ApiError
from .logprobs import LogprobFormatter
from .output_parser import AnswerPart
from .reasoning import ReasoningDelta
from .requests import ParsedRequest
from .tools.parser import CallDelta

FINGERPRINT = f"specedge-{__version__}"


class _ChunkShaper(ABC):
    """Base class of the shapers of chats and completions."""

    prefix = object_name = chunk_name = ""

    def __init__(self, model: str, request: ParsedRequest, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._formatters: dict[int, LogprobFormatter] = {}  # by choice
        self._fields = {
            "id": new_id(f"{self.prefix}-"),
            "created": int(time.time()),
            "model": model,
        }
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
        """Return a complete choice for a non-streaming response."""

    def _chunk(self, entry: dict[str, Any], choice: ResponseChoice | None, num_new: int = 0) -> str:
        """Return a chunk for a choice that has `num_new` further tokens."""
        usage: dict[str, Any] = {"usage": None} if self._request.include_usage else {}
        if self._request.continuous_usage and choice is not None:
            usage["usage"] = _usage_so_far(choice, num_new)
        return sse_event(self._fields | {"object": self.chunk_name, "choices": [entry]} | usage)

    def _token_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self._request.return_token_ids else {}

    def _prompt_fields(self, choice: ResponseChoice) -> dict[str, Any]:
        """Return the prompt's token ids and log-probabilities, if requested."""
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = choice.prompt_tokens
        if choice.prompt_logprobs is not None and not self._request.echo:
            formatter = LogprobFormatter(Detokenizer(self._tokenizer, []))
            first = choice.prompt_tokens[0]
            fields["prompt_logprobs"] = formatter.prompt_by_id(first, choice.prompt_logprobs)
        return fields

    def _ending(self, index: int, choice: ResponseChoice, num_sent: int = 0) -> dict[str, Any]:
        seed = choice.generation.seed
        token_ids = self._token_ids(choice.generation.tokens[num_sent:])
        ending = {"index": index, "finish_reason": choice.finish_reason, "seed": seed}
        return ending | token_ids

    def _spans(self, piece: TextPiece) -> dict[str, Any]:
        return {"spans": [span.to_json() for span in piece.spans]} if self._request.trace else {}

    def _formatter(
        self, index: int, choice: ResponseChoice, offset: int = 0
    ) -> LogprobFormatter | None:
        """Return the formatter of a choice's new tokens; None without log-probabilities."""
        if "logprobs" not in self._request.options:
            return None
        if index not in self._formatters:
            detokenizer = choice.detokenizer(self._tokenizer)
            self._formatters[index] = LogprobFormatter(detokenizer, offset)
        return self._formatters[index]


def _usage_so_far(choice: ResponseChoice, num_new: int) -> dict[str, int]:
    prompt, new = len(choice.prompt_tokens), choice.num_tokens + num_new
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


class ChatShaper(_ChunkShaper):
    """Shaper of responses of /v1/chat/completions."""

    prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        for i in range(self._request.num_choices):
            delta = self._delta({"role": "assistant", "content": ""})
            yield self._chunk(delta | {"index": i}, None)

    def piece(
        self, index: int, piece: TextPiece, parts: Sequence[AnswerPart], choice: ResponseChoice
    ) -> Iterator[str]:
        """Yield a chunk for each part; the first one has the spans and log-probabilities."""
        deltas = [_delta_of(part) for part in parts]
        spans, logprobs = self._spans(piece), self._format_logprobs(index, choice, piece.logprobs)
        token_ids = self._token_ids(piece.tokens)
        if not deltas and (spans or logprobs or token_ids):
            deltas = [{}]
        for delta in deltas:
            entry = self._delta(delta, logprobs) | {"index": index} | spans | token_ids
            yield self._chunk(entry, choice, len(piece.tokens))
            spans, logprobs, token_ids = {}, None, {}

    def end(self, index: int, choice: ResponseChoice) -> Iterator[str]:
        ending = self._ending(index, choice, choice.num_tokens)
        yield self._chunk(ending | {"delta": {}, "logprobs": None}, choice)

    def body(self, choices: Sequence[ResponseChoice]) -> dict[str, Any]:
        return super().body(choices) | self._prompt_fields(choices[0])

    def _delta(self, delta: dict[str, Any], logprobs: Any = None) -> dict[str, Any]:
        return {"delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, index: int, choice: ResponseChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if reasoning := choice.reasoning:
            message |= _reasoning_fields(reasoning)
        if calls := choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = self._format_logprobs(index, choice, choice.logprobs)
        return self._ending(index, choice) | {"message": message, "logprobs": logprobs}

    def _format_logprobs(
        self, index: int, choice: ResponseChoice, logprobs: list[TokenLogprobs]
    ) -> dict[str, Any] | None:
        formatter = self._formatter(index, choice)
        if formatter is None:
            return None
        return {"content": formatter.for_chat(logprobs), "refusal": None}


def _delta_of(part: AnswerPart) -> dict[str, Any]:
    if isinstance(part, CallDelta):
        return {"tool_calls": [_call_delta(part)]}
    return _reasoning_fields(part.text) if isinstance(part, ReasoningDelta) else {"content": part}


def _reasoning_fields(text: str) -> dict[str, Any]:
    """Return thinking under the field names of vLLM, llama.cpp and OpenRouter."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: OutputItem) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.text}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(part: CallDelta) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, **_call(OutputItem(part.arguments, part.id, part.name))}


class CompletionShaper(_ChunkShaper):
    """Shaper of responses of /v1/completions."""

    prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, request: ParsedRequest, tokenizer: Tokenizer) -> None:
        super().__init__(model, request, tokenizer)
        self._begun: set[int] = set()  # choices with at least one chunk

    def begin(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        yield from ()

    def piece(
        self, index: int, piece: TextPiece, parts: Sequence[AnswerPart], choice: ResponseChoice
    ) -> Iterator[str]:
        yield from self._prompt(index, choice)
        logprobs = self._format_logprobs(index, choice, piece.logprobs)
        entry = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}
        entry |= self._spans(piece) | self._token_ids(piece.tokens)
        yield self._chunk(entry, choice, len(piece.tokens))

    def end(self, index: int, choice: ResponseChoice) -> Iterator[str]:
        yield from self._prompt(index, choice)
        ending = self._ending(index, choice, choice.num_tokens)
        yield self._chunk(ending | {"text": "", "logprobs": None}, choice)

    def _prompt(self, index: int, choice: ResponseChoice) -> Iterator[str]:
        """Yield a chunk with the prompt before a choice's first text, if requested."""
        if index in self._begun:
            return
        self._begun.add(index)
        fields = self._prompt_fields(choice)
        if not (self._request.echo or fields):
            return
        text, logprobs = self._echo(index, choice)
        entry = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        yield self._chunk(entry | fields, choice)

    def _choice(self, index: int, choice: ResponseChoice) -> dict[str, Any]:
        text, logprobs = self._echo(index, choice)
        new = self._format_logprobs(index, choice, self._new_logprobs(choice))
        if logprobs is not None and new is not None:
            new = {name: logprobs[name] + new[name] for name in new}
        entry = {"text": text + choice.text, "logprobs": new}
        return self._ending(index, choice) | entry | self._prompt_fields(choice)

    def _new_logprobs(self, choice: ResponseChoice) -> list[TokenLogprobs]:
        """Return the log-probabilities of the new tokens, with `echo` including an end token.

        lm-evaluation-harness assumes that the last entry is that of the single new token.
        """
        generation = choice.generation
        if not self._request.echo or generation.logprobs is None:
            return choice.logprobs
        return generation.logprobs[: len(generation.tokens)]

    def _echo(self, index: int, choice: ResponseChoice) -> tuple[str, dict[str, Any] | None]:
        """Return the text of the prompt and its log-probabilities, if `echo` is set."""
        if not self._request.echo:
            return "", None
        prompt, tokens = self._request.prompts[index // self._request.num_choices_each], []
        if isinstance(prompt, str):
            text = prompt
        else:  # the text of ids includes special tokens
            tokens = choice.prompt_tokens
            text = decode(self._tokenizer, tokens, skip_special_tokens=False)
        if choice.prompt_logprobs is None or not self._formatter(index, choice, len(text)):
            return text, None
        formatter = LogprobFormatter(Detokenizer(self._tokenizer, [], visible_tokens=tokens))
        first = choice.prompt_tokens[0]
        return text, formatter.prompt_for_completion(first, choice.prompt_logprobs)

    def _format_logprobs(
        self, index: int, choice: ResponseChoice, logprobs: list[TokenLogprobs]
    ) -> dict[str, Any] | None:
        formatter = self._formatter(index, choice)
        return None if formatter is None else formatter.for_completion(logprobs)
