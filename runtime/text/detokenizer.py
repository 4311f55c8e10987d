"""From tokens to text as they come: whole characters, and stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from tokenizers import Tokenizer

from .tokenizing import decode

_CONTEXT = 8  # tokens of the prompt that decoding sees, so that the first space is right


class Detokenizer:
    """Turns tokens into text pieces that never split a character.

    A piece is what a token adds to the text of the tokens before it, held back while it ends in an
    incomplete character. Pieces depend on the tokens alone, not on how they are grouped. Special
    tokens have no text, but for those that are `shown`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], shown: Collection[int] = ()
    ) -> None:
        self._decode = partial(decode, tokenizer)
        self._names = {token: str(tokenizer.id_to_token(token)) for token in shown}
        self._shown = list(prompt[-_CONTEXT:])
        self._pending: list[int] = []
        while self._shown and self._decode(self._shown).endswith("\ufffd"):
            self._pending.insert(0, self._shown.pop())
        self._prompts = ""  # what the prompt itself shows of the pending tokens
        self._prompts = self._new_text()

    def feed(self, token: int) -> str:
        """The text that has become certain with this token."""
        if token in self._names:
            text = self.flush() + self._names[token]
            self._shown, self._prompts = [token], ""
            return text
        self._pending.append(token)
        text = self._new_text()
        if not text or text.endswith("\ufffd"):
            return ""
        self._shown, self._pending, self._prompts = self._pending, [], ""
        return text

    def flush(self) -> str:
        """What is left: an incomplete character, shown as the replacement character."""
        text, self._pending = self._new_text(), []
        return text

    def _new_text(self) -> str:
        before = self._decode(self._shown)
        text = self._decode(self._shown + self._pending)[len(before) :]
        return text.removeprefix(self._prompts)


class StopStrings:
    """Passes text on, holding back a possible beginning of a stop string.

    With `include_stop` the text ends with the stop string, else before it.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops, self._include_stop = tuple(stops), include_stop
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that no stop string can take back; after a stop string, nothing more."""
        if self.found:
            return ""
        self._held += text
        starts = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if starts:
            self.found = True
            start, stop = min(starts)
            end = start + len(stop) if self._include_stop else start
            text, self._held = self._held[:end], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """What was held back, once nothing can follow."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
