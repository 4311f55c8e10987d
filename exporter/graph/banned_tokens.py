"""Masks of banned tokens as ONNX nodes: suppressed tokens, and those that repeat an n-gram.

They are the bans of `runtime/sampling/logits_processors.py`. L tokens of text, K draft tokens, R
rows, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import numpy as np
import onnx_ir as ir

from specedge.sampling_options import DecodingDefaults

from .nodes import FLOAT, INT, GraphBuilder


@dataclass(frozen=True)
class BannedTokens:
    """Builder of masks of banned tokens, which depend on the text before a row.

    L tokens of text, of which the first `prompt_length` [1] are the prompt. Both are None unless
    the bans depend on them.
    """

    nodes: GraphBuilder
    vocab_size: int
    defaults: DecodingDefaults
    text_tokens: ir.Value | None  # [1, L]
    prompt_length: ir.Value | None

    @classmethod
    def with_inputs(
        cls, nodes: GraphBuilder, vocab_size: int, defaults: DecodingDefaults
    ) -> BannedTokens | None:
        """Add the text and the length of the prompt to the inputs of a graph, if needed.

        Returns None if the model bans no token.
        """
        if defaults == DecodingDefaults():
            return None
        text_tokens = prompt_length = None
        if defaults.no_repeat_ngram_size or defaults.begin_suppress_tokens:
            text_tokens = nodes.input("text_tokens", INT, [1, "L"])
            prompt_length = nodes.input("prompt_length", INT, [1])
        return cls(nodes, vocab_size, defaults, text_tokens, prompt_length)

    def append(self, token: ir.Value) -> BannedTokens:
        """Add a token to the text. [1, 1]"""
        if self.text_tokens is None:
            return self
        tokens = self.nodes("Concat", self.text_tokens, token, axis=1)
        return replace(self, text_tokens=tokens)

    def mask(self, drafted: ir.Value | None) -> ir.Value:
        """Return the tokens banned after the text, and after each of these draft tokens.

        [K, 1] -> [K + 1, V], or [1, V] without draft tokens or if the text does not matter
        """
        masks = []
        if self.defaults.suppress_tokens:
            masks.append(self._columns(self.defaults.suppress_tokens))
        if self.text_tokens is not None:
            masks += self._masks_by_text(self.text_tokens, drafted)
        return reduce(partial(self.nodes, "Or"), masks)

    def _masks_by_text(self, text: ir.Value, drafted: ir.Value | None) -> list[ir.Value]:
        nodes = self.nodes
        ends = nodes("ReduceSum", _ones(nodes, text), [1])  # length of the text before each row
        if drafted is not None:
            numbers = nodes("CumSum", _ones(nodes, drafted), np.array(0))
            ends = nodes("Concat", ends, nodes("Add", ends, numbers), axis=0)
            text = nodes("Concat", text, nodes("Transpose", drafted, perm=[1, 0]), axis=1)
        masks = []
        if self.defaults.begin_suppress_tokens:
            is_first = nodes("Equal", ends, self.prompt_length)
            masks.append(nodes("And", is_first, self._columns(self.defaults.begin_suppress_tokens)))
        if self.defaults.no_repeat_ngram_size:
            masks.append(self._repeating_tokens(text, ends, self.defaults.no_repeat_ngram_size))
        return masks

    def _repeating_tokens(self, text: ir.Value, ends: ir.Value, size: int) -> ir.Value:
        """Return the tokens that would complete an n-gram of the text before each row.

        Token i of the text completes one if it is before the row, and the n - 1 tokens before both
        are equal. [1, L], [R, 1] -> [R, V]
        """
        nodes = self.nodes
        positions = nodes("CumSum", _ones(nodes, text), np.array(1), exclusive=1)
        is_banned = nodes("Less", positions, ends)
        # Padding is not a token, and never at the same place of two different n-grams.
        padded = nodes("Pad", text, [0, size - 1, 0, 0], np.array(-1, np.int64))
        for i in range(size - 1):
            before = nodes("Slice", padded, [i], [i - size + 1], [1])
            last = nodes("Gather", nodes("Reshape", padded, [-1]), nodes("Add", ends, i))
            is_banned = nodes("And", is_banned, nodes("Equal", before, last))
        zeros = nodes("Mul", ends, 0)
        counts = nodes("Expand", nodes("Cast", zeros, to=FLOAT), [1, self.vocab_size])
        columns, updates = nodes("Add", text, zeros), nodes("Cast", is_banned, to=FLOAT)
        counts = nodes("ScatterElements", counts, columns, updates, axis=1, reduction="max")
        return nodes("Greater", counts, 0.0)

    def _columns(self, tokens: Sequence[int]) -> ir.Value:
        """Return a mask of these tokens. [1, V]"""
        indices = np.array([tokens], np.int64)
        mask = self.nodes("Expand", np.zeros(1, bool), [1, self.vocab_size])
        ones = np.ones(indices.shape, bool)
        return self.nodes("ScatterElements", mask, indices, ones, axis=1)


def _ones(nodes: GraphBuilder, tokens: ir.Value) -> ir.Value:
    return nodes("Add", nodes("Mul", tokens, 0), 1)
