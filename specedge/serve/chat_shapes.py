"""Responses of /v1/chat/completions and /v1/completions, complete and streamed."""

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
from .output_parser import AnswerPart
from .reasoning import ReasoningDelta
from .requests import ParsedRequest
from .tools.parser import CallDelta

FINGERPRINT = f"specedge-{__version__}"
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON lacks, as in OpenAI's API
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class LogprobFormatter:
    """Formatter of log-probabilities, with the text of each token."""

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

    def prompt_for_completion(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """Return `choices[].logprobs` of a prompt; null for the first token."""
        formatted = self.for_completion(logprobs, len(self._text(tokens[0])))
        first = {
            "tokens": self._text(tokens[0]),
            "token_logprobs": None,
            "top_logprobs": None,
            "text_offset": 0,
        }
        return {name: [value, *formatted[name]] for name, value in first.items()}

    def prompt_by_id(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs` in vLLM's format: by token id, null for the first token."""
        return [None, *map(self._by_id, logprobs)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        rank = {token: i + 1 for i, (token, _) in enumerate(entry.top)}
        return {
            str(token): {
                "logprob": max(logprob, MIN_LOGPROB),
                "rank": rank.get(token),
                "decoded_token": self._text(token),
            }
            for token, logprob in dict([(entry.token, entry.logprob), *entry.top]).items()
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
    """Base class of the shapers of chats and completions."""

    prefix = object_name = chunk_name = ""

    def __init__(self, model: str, request: ParsedRequest, logprobs: LogprobFormatter) -> None:
        self._request, self._logprobs = request, logprobs
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
            fields["prompt_logprobs"] = self._logprobs.prompt_by_id(choice.prompt_logprobs)
        return fields

    def _ending(self, index: int, choice: ResponseChoice, num_sent: int = 0) -> dict[str, Any]:
        seed = choice.generation.seed
        token_ids = self._token_ids(choice.generation.tokens[num_sent:])
        ending = {"index": index, "finish_reason": choice.finish_reason, "seed": seed}
        return ending | token_ids

    def _spans(self, piece: TextPiece) -> dict[str, Any]:
        return {"spans": [span.to_json() for span in piece.spans]} if self._request.trace else {}

    @property
    def _has_logprobs(self) -> bool:
        return "logprobs" in self._request.options


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
        spans, logprobs = self._spans(piece), self._format_logprobs(piece.logprobs)
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
        logprobs = self._format_logprobs(choice.logprobs)
        return self._ending(index, choice) | {"message": message, "logprobs": logprobs}

    def _format_logprobs(self, logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        return self._logprobs.for_chat(logprobs) if self._has_logprobs else None


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

    def __init__(self, model: str, request: ParsedRequest, logprobs: LogprobFormatter) -> None:
        super().__init__(model, request, logprobs)
        self._lengths = Counter[int]()  # number of characters of each choice so far
        self._begun: set[int] = set()  # choices with at least one chunk

    def begin(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        yield from ()

    def piece(
        self, index: int, piece: TextPiece, parts: Sequence[AnswerPart], choice: ResponseChoice
    ) -> Iterator[str]:
        yield from self._prompt(index, choice)
        if logprobs := self._format_logprobs(piece.logprobs, self._lengths[index]):
            self._lengths[index] += sum(map(len, logprobs["tokens"]))
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
        if logprobs is not None:
            self._lengths[index] += sum(map(len, logprobs["tokens"]))
        entry = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        yield self._chunk(entry | fields, choice)

    def _choice(self, index: int, choice: ResponseChoice) -> dict[str, Any]:
        text, logprobs = self._echo(index, choice)
        start = 0 if logprobs is None else sum(map(len, logprobs["tokens"]))
        new = self._format_logprobs(self._new_logprobs(choice), start)
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
        prompt = self._request.prompts[index // self._request.num_choices_each]
        text = prompt if isinstance(prompt, str) else self._logprobs.decode(choice.prompt_tokens)
        if choice.prompt_logprobs is None or not self._has_logprobs:
            return text, None
        tokens = choice.prompt_tokens
        return text, self._logprobs.prompt_for_completion(tokens, choice.prompt_logprobs)

    def _format_logprobs(self, logprobs: list[TokenLogprobs], start: int) -> dict[str, Any] | None:
        return self._logprobs.for_completion(logprobs, start) if self._has_logprobs else None
