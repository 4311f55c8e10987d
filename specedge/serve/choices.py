"""Choices of a response during generation, and the protocol of response shapers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenizers import Tokenizer

from specedge.runtime.requests.stream import Generation, TextPiece
from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.runtime.text.detokenizer import Detokenizer, FinishReason

from .errors import ApiError
from .output_parser import AnswerPart, OutputParser
from .reasoning import ReasoningDelta
from .tools.harmony import HarmonyParser
from .tools.parser import CallDelta

FINISH_REASONS = {
    FinishReason.END: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
}


@dataclass
class OutputItem:
    """Item of a choice: text, thinking, or the arguments of a call of the function `name`."""

    text: str = ""
    id: str | None = None
    name: str | None = None
    is_reasoning: bool = False

    @property
    def is_text(self) -> bool:
        """Return True if the item is text for the user."""
        return self.name is None and not self.is_reasoning


class ReasoningCounter:
    """Counter of thinking tokens, including the closing marker.

    Args:
        detokenizer: Detokenizer of the text.
        parser: Parser of the text, separate from that of the response.
    """

    def __init__(self, detokenizer: Detokenizer, parser: OutputParser | HarmonyParser) -> None:
        self._detokenizer, self._parser = detokenizer, parser
        self.count = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Count the next tokens."""
        for token in tokens:
            was_reasoning = self._parser.is_reasoning
            self._parser.feed(self._detokenizer.feed(token))
            self.count += was_reasoning or self._parser.is_reasoning


@dataclass
class ResponseChoice:
    """Choice of a response during and after generation.

    Attributes:
        new_parser: Function that returns a parser of thinking and tool calls.
        parser: Parser of the text.
        items: Text, thinking and calls so far.
        first_time: `time.perf_counter()` at the first piece.
        last_time: `time.perf_counter()` at the last piece so far.
        logprobs: Log-probabilities of the tokens so far.
        tokens: Tokens so far.
        reasoning_counter: Counter of thinking tokens, if the model supports thinking.
        prompt_tokens: Tokens of the prompt.
        decoder_tokens: Tokens that begin the text of an encoder-decoder.
        visible_tokens: Special tokens that are included in the text.
        prompt_logprobs: Log-probabilities of the prompt's tokens except the first, if requested.
        finished: The generation, after it has ended.
    """

    new_parser: Callable[[], OutputParser | HarmonyParser] = OutputParser
    items: list[OutputItem] = field(default_factory=list)
    first_time: float | None = None
    last_time: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reasoning_counter: ReasoningCounter | None = None
    prompt_tokens: list[int] = field(default_factory=list)
    visible_tokens: frozenset[int] = frozenset()
    prompt_logprobs: list[TokenLogprobs] | None = None
    finished: Generation | None = None
    decoder_tokens: Sequence[int] = ()
    parser: OutputParser | HarmonyParser = field(init=False)

    def __post_init__(self) -> None:
        self.parser = self.new_parser()

    def detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        """Return a detokenizer of the text, at its beginning."""
        before = list(self.decoder_tokens) or self.prompt_tokens
        return Detokenizer(tokenizer, before, self.visible_tokens)

    def add(self, parts: Sequence[AnswerPart], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Append parts to the items."""
        self.logprobs += logprobs
        for part in parts:
            if not continues_item(self.items, part):
                self.items.append(new_item(part))
            self.items[-1].text += part_text(part)

    def count_reasoning(self, tokens: Sequence[int]) -> None:
        """Count the thinking tokens among the next tokens."""
        if self.reasoning_counter is not None:
            self.reasoning_counter.add(tokens)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens so far."""
        return len(self.tokens)

    @property
    def num_reasoning_tokens(self) -> int:
        """Return the number of thinking tokens."""
        return 0 if self.reasoning_counter is None else self.reasoning_counter.count

    @property
    def text(self) -> str:
        """Return the text without thinking and calls."""
        return "".join(item.text for item in self.items if item.is_text)

    @property
    def reasoning(self) -> str:
        """Return the thinking."""
        return "".join(item.text for item in self.items if item.is_reasoning)

    @property
    def calls(self) -> list[OutputItem]:
        """Return the items that are calls."""
        return [item for item in self.items if item.name is not None]

    @property
    def finish_reason(self) -> str:
        """Return the finish reason in OpenAI's terms."""
        reason = FINISH_REASONS[self.generation.finish_reason]
        has_calls = self.calls and self.parser.is_complete
        return "tool_calls" if has_calls and reason == "stop" else reason

    @property
    def generation(self) -> Generation:
        """Return the generation of a finished choice."""
        assert self.finished is not None
        return self.finished


def continues_item(items: Sequence[OutputItem], part: AnswerPart) -> bool:
    """Return True if a part continues the last item."""
    if isinstance(part, CallDelta):
        return part.name is None
    if not items or items[-1].name is not None:
        return False
    return items[-1].is_reasoning == isinstance(part, ReasoningDelta)


def new_item(part: AnswerPart) -> OutputItem:
    """Return the item begun by a part, without its text."""
    if isinstance(part, CallDelta):
        return OutputItem("", part.id, part.name)
    return OutputItem(is_reasoning=isinstance(part, ReasoningDelta))


def part_text(part: AnswerPart) -> str:
    """Return the text of a part, or the arguments in a part of a call."""
    if isinstance(part, CallDelta):
        return part.arguments
    return part.text if isinstance(part, ReasoningDelta) else part


class ResponseShaper(Protocol):
    """Formatter of an endpoint's responses: a complete body, or server-sent events."""

    def begin(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        """Yield the lines at the start of a stream."""

    def piece(
        self, index: int, piece: TextPiece, parts: Sequence[AnswerPart], choice: ResponseChoice
    ) -> Iterator[str]:
        """Yield the lines of a piece before its parts are added to the choice."""

    def end(self, index: int, choice: ResponseChoice) -> Iterator[str]:
        """Yield the lines at the end of a choice."""

    def finish(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        """Yield the lines at the end of a stream."""

    def fail(self, error: ApiError) -> Iterator[str]:
        """Yield the lines that report an error during a stream."""

    def body(self, choices: Sequence[ResponseChoice]) -> dict[str, Any]:
        """Return the body of a non-streaming response."""


def usage_of(choices: Sequence[ResponseChoice], num_choices_each: int) -> dict[str, Any]:
    """Return the total usage; a prompt's tokens are counted once for all of its choices."""
    stats = [choice.generation.stats for choice in choices]
    prompt_stats = stats[::num_choices_each]
    prompt = sum(s.num_prompt_tokens for s in prompt_stats)
    new = sum(s.num_new_tokens for s in stats)
    drafted, accepted = sum(s.num_drafted for s in stats), sum(s.num_accepted for s in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(s.num_reused_tokens for s in prompt_stats)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices),
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


def sse_event(payload: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event in ASCII, since some clients split lines at U+2028."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(payload)}\n\n"


def new_id(prefix: str) -> str:
    """Return a random id with a prefix of OpenAI's API, which some clients check."""
    return f"{prefix}{secrets.token_hex(12)}"
