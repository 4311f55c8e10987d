"""Parser of generated text: thinking, then text and tool calls."""

from __future__ import annotations

from .reasoning import ReasoningDelta, ReasoningParser
from .tools.parser import CallDelta, ToolCallParser

AnswerPart = str | CallDelta | ReasoningDelta


class OutputParser:
    """Parser that splits generated text into thinking, text and tool calls.

    Args:
        reasoning: Parser of thinking, if the model supports it.
        calls: Parser of tool calls, if the request has tools.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, calls: ToolCallParser | None = None
    ) -> None:
        self._reasoning, self._calls = reasoning, calls

    def feed(self, text: str) -> list[AnswerPart]:
        """Append text; return the parts completed by it."""
        return self._parse_calls([text] if self._reasoning is None else self._reasoning.feed(text))

    def end(self) -> list[AnswerPart]:
        """Return the remaining parts at the end of the text."""
        parts = self._parse_calls([] if self._reasoning is None else self._reasoning.end())
        return [*parts, *(self._calls.end() if self._calls is not None else [])]

    @property
    def is_complete(self) -> bool:
        """Return True unless the last call is incomplete."""
        return self._calls is None or self._calls.is_complete

    @property
    def is_reasoning(self) -> bool:
        """Return True if the current position is within thinking."""
        return self._reasoning is not None and self._reasoning.is_inside

    def _parse_calls(self, parts: list[ReasoningDelta | str]) -> list[AnswerPart]:
        if self._calls is None:
            return [*parts]
        answer_parts: list[AnswerPart] = []
        for part in parts:
            answer_parts += self._calls.feed(part) if isinstance(part, str) else [part]
        return answer_parts
