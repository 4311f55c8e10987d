"""The text before a position, which a law may depend on beside the model's logits."""

from __future__ import annotations

from collections.abc import Sequence


class Past:
    """A prompt's tokens and those that follow it: generated ones, then perhaps drafted ones."""

    def __init__(self, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        self.tokens = [*prompt, *generated]
        self.num_prompt_tokens = len(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        """These follow."""
        self.tokens += tokens

    def then(self, tokens: Sequence[int]) -> Past:
        """A copy that goes on with these."""
        prompt, end = self.tokens[: self.num_prompt_tokens], self.num_prompt_tokens
        return Past(prompt, [*self.tokens[end:], *tokens])
