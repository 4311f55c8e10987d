"""Hidden states that passes of a draft read during verification.

F channels of the target's concatenated hidden states, H of those that the draft reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specedge.bundle.manifest import HiddenStates

from ..checkpoint.draft_heads import DraftHeadModule
from ..checkpoint.placeholders import WeightSources
from .exact_model import eager_passes
from .subgraph import open_session

NUM_ROWS = 256  # positions after which the hidden states of verification repeat


@dataclass(frozen=True)
class FusedStates:
    """Hidden states that passes of a draft read.

    Attributes:
        states: States by position, which repeat, [P, H].
        texts: Tokens of texts, [T], with their states, [T, H].
        hidden: Sample of the target's hidden states before they are fused, [n, F].
    """

    states: np.ndarray
    texts: Sequence[tuple[np.ndarray, np.ndarray]] = ()
    hidden: np.ndarray | None = None

    def rows(self, start: int, length: int, text: np.ndarray | None = None) -> np.ndarray:
        """Return the states of a text's first tokens, or of positions. [1, T, H]

        Args:
            start: First position.
            length: Number of tokens.
            text: One of the texts or its beginning; None for states by position.
        """
        if text is None or not self.texts:
            return self.states[np.arange(start, start + length) % len(self.states)][None]
        for tokens, states in self.texts:
            if np.array_equal(tokens[: len(text)], text):
                return states[None, :length]
        raise ValueError("there are no hidden states of this text")


class FuseGraph:
    """Graph `fuse`, or none if a draft reads the target's hidden states as they are."""

    def __init__(self, path: Path | None = None) -> None:
        self._session = None if path is None else open_session(path)

    def __call__(self, hidden: np.ndarray) -> np.ndarray:
        """Return what a draft reads of hidden states. [T, F] -> [T, H]"""
        if self._session is None:
            return hidden.copy()
        (fused,) = self._session.run(["fused"], {"hidden": hidden[None]})
        rows: np.ndarray = fused[0]
        return rows


def sample_states(model: DraftHeadModule, sources: WeightSources) -> FusedStates:
    """Fuse random hidden states of a target in PyTorch."""
    hidden = torch.from_numpy(random_states(model.hidden))
    with eager_passes(model, sources, exact=False):
        return FusedStates(model.fuse(hidden)[0].numpy())


def random_states(hidden: HiddenStates, length: int = NUM_ROWS) -> np.ndarray:
    """Return random hidden states of the target. [1, T, F]"""
    return np.random.default_rng(0).standard_normal((1, length, hidden.size), np.float32)
