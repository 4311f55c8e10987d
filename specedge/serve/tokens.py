"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from specedge.runtime.sampling.logprobs import TokenLogprobs

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
LEAST = -9999.0  # what a token of no probability has, as in OpenAI's API: JSON has no infinity


class Tokens:
    """Shows log-probabilities by the texts of their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def of_chat(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """As `choices[].logprobs` of a chat."""
        content = [
            self._entry(one.token, one.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in one.top]}
            for one in found
        ]
        return {"content": content, "refusal": None}

    def of_completion(self, found: Sequence[TokenLogprobs], start: int) -> dict[str, Any]:
        """As `choices[].logprobs` of a completion; `start` characters came before."""
        texts = [self.text(one.token) for one in found]
        return {
            "tokens": texts,
            "token_logprobs": [max(one.logprob, LEAST) for one in found],
            "top_logprobs": [
                {self.text(token): max(logprob, LEAST) for token, logprob in one.top}
                for one in found
            ],
            "text_offset": list(_offsets(texts, start)),
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        known = None if UNKNOWN in text else list(text.encode())  # a part of a character
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": known}


def _offsets(texts: Sequence[str], start: int) -> Iterator[int]:
    for text in texts:
        yield start
        start += len(text)
