"""Hidden states that passes of a draft read during verification, and verification of `fuse`.

F channels of the target's concatenated hidden states, H of those that the draft reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from specedge.bundle.manifest import HiddenStates

from ..checkpoint.draft_heads import DraftHeadModule
from ..checkpoint.placeholders import WeightSources
from .exact_graph import ExactGraph
from .exact_model import ROUNDINGS, eager_passes
from .row_errors import STRUCTURE, ErrorCheck, float32_error_bounds, row_errors
from .subgraph import open_session

NUM_ROWS = 256  # positions after which the hidden states of verification repeat
NUM_COMPARED = 32  # rows of `fuse` that are compared


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


def sample_states(model: DraftHeadModule, sources: WeightSources) -> FusedStates:
    """Fuse random hidden states of a target in PyTorch."""
    hidden = torch.from_numpy(random_states(model.hidden))
    return FusedStates(_fuse(model, sources, hidden, exact=False)[0])


def run_fuse(path: Path, hidden: HiddenStates) -> FusedStates:
    """Fuse random hidden states of a target by the graph `fuse`."""
    session = open_session(path, ort.SessionOptions())
    return FusedStates(session.run(["fused"], {"hidden": random_states(hidden)})[0][0])


def verify_fuse(
    role: str,
    model: DraftHeadModule,
    sources: WeightSources,
    path: Path,
    tolerance: float | None = None,
) -> None:
    """Compare the graph `fuse` with PyTorch, in float64 and in float32.

    Args:
        role: Role of the draft.
        model: Model, whose large matrices may be placeholders.
        sources: Their values.
        path: File of the graph.
        tolerance: Maximum float32 error relative to the largest value of the output, if any.

    Raises:
        ParityError: The graph differs from the model.
    """
    hidden = torch.from_numpy(random_states(model.hidden, NUM_COMPARED))
    exact = _fuse(model, sources, hidden.double(), exact=True)[0]
    rounded = _fuse(model, sources, hidden.expand(ROUNDINGS, -1, -1), exact=False)
    bounds = float32_error_bounds(row_errors(rounded, exact).max(0), exact)
    structure = ErrorCheck(role, "the PyTorch model's, both in float64,", multiple=STRUCTURE)
    values = dict(ExactGraph(path).run(lambda name: hidden.double().numpy()))
    structure.compare("fused", "fused", values["fused"][0], exact, bounds)
    session = open_session(path, ort.SessionOptions())
    (actual,) = session.run(["fused"], {"hidden": hidden.numpy()})
    ErrorCheck(role, "PyTorch's", tolerance).compare("fused", "fused", actual[0], exact, bounds)


def random_states(hidden: HiddenStates, length: int = NUM_ROWS) -> np.ndarray:
    """Return random hidden states of the target. [1, T, F]"""
    return np.random.default_rng(0).standard_normal((1, length, hidden.size), np.float32)


def _fuse(
    model: DraftHeadModule, sources: WeightSources, hidden: torch.Tensor, exact: bool
) -> np.ndarray:
    """Run PyTorch, exactly or with random rounding. [B, T, F] -> [B, T, H]"""
    with eager_passes(model, sources, exact):
        return model.fuse(hidden).numpy()
