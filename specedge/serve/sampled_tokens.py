"""Store of sampled tokens, which are reused in prompts that contain their text.

A tokenizer may split a text differently from the tokens that the model sampled. A prompt that
contains the text then matches the prefix cache only up to the first different token.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from tokenizers import Tokenizer

MAX_SEQUENCES = 64
MAX_TOKENS = 2**20  # maximum total length of all sequences


class SampledTokens:
    """Thread-safe store of the latest token sequences (prompt and text) within limits."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._sequences: deque[list[int]] = deque()
        self._lock = threading.Lock()

    def add(self, tokens: Sequence[int]) -> None:
        """Store a sequence, replacing its prefixes, and evict the oldest ones beyond the limits."""
        sequence = list(tokens)
        with self._lock:
            others = [s for s in self._sequences if s != sequence[: len(s)]]
            self._sequences = deque([*others, sequence])
            while (
                len(self._sequences) > MAX_SEQUENCES or sum(map(len, self._sequences)) > MAX_TOKENS
            ):
                self._sequences.popleft()

    def apply(self, prompt: list[int]) -> tuple[list[int], int]:
        """Replace the beginning of a prompt by stored tokens that decode to the same text.

        The sequence that matches most of the prompt is used.

        Returns:
            The prompt, and the number of its tokens that differ from the tokenizer's output.
        """
        with self._lock:
            sequences = [*self._sequences]
        spans = [(*self._common_text(prompt, sequence), sequence) for sequence in sequences]
        if not spans:
            return prompt, 0
        num_prompt, num_sampled, sequence = max(spans, key=lambda span: span[0])
        begin = sequence[:num_sampled]
        if begin == prompt[:num_prompt]:
            return prompt, 0
        first = next(i for i, token in enumerate(begin) if token != prompt[i])
        num_equal = next(
            i
            for i in range(num_sampled)
            if i >= num_prompt or begin[-1 - i] != prompt[num_prompt - 1 - i]
        )
        return begin + prompt[num_prompt:], num_sampled - num_equal - first

    def _common_text(self, prompt: Sequence[int], sequence: Sequence[int]) -> tuple[int, int]:
        """Return the lengths of the longest prefixes of both that have the same text.

        Added tokens, such as special tokens, match only themselves.
        """
        i = j = 0
        lengths = 0, 0
        ahead = ""  # text of the longer side beyond the shorter one
        is_prompt_ahead = False
        while True:
            if not ahead:
                lengths = i, j
                if i == len(prompt) or j == len(sequence):
                    return lengths
                if prompt[i] == sequence[j]:
                    i, j = i + 1, j + 1
                    continue
                if {prompt[i], sequence[j]} & self._added:
                    return lengths
                ahead, is_prompt_ahead, i = self._text(prompt[i]), True, i + 1
                continue
            tokens, position = (sequence, j) if is_prompt_ahead else (prompt, i)
            if position == len(tokens) or tokens[position] in self._added:
                return lengths
            text = self._text(tokens[position])
            if not (ahead.startswith(text) or text.startswith(ahead)) or not text:
                return lengths
            i, j = (i, j + 1) if is_prompt_ahead else (i + 1, j)
            if len(text) > len(ahead):
                is_prompt_ahead = not is_prompt_ahead
            ahead = ahead[len(text) :] or text[len(ahead) :]

    def _text(self, token: int) -> str:
        """Return the text of a token in the vocabulary, which concatenates without loss."""
        return self._tokenizer.id_to_token(token) or ""
