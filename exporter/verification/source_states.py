"""Source of an encoder-decoder during verification.

N tokens of a source, F hidden size; H heads of D in E rows of the states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..checkpoint.encoder_decoder import SourceConditionedDecoder
from ..checkpoint.placeholders import WeightSources
from ..tracing.geometry import Geometry
from .exact_model import eager_passes
from .subgraph import NOISE, open_session, unpacked_options

NUM_TOKENS = 32  # of a source that is compared in float64
NUM_HASHED_TOKENS = 256  # of a source; T5's position biases differ up to a distance of 128


@dataclass(frozen=True)
class SourceStates:
    """States of cross-attention for one source, of which `length` rows are valid.

    Attributes:
        length: Number of hidden states of the source.
        constants: Keys and values of each layer, with noise from `length` on, [1, H, E, D] each.
    """

    length: int
    constants: list[np.ndarray]

    def inputs(self, geometry: Geometry, dtype: str = "float32") -> dict[str, np.ndarray]:
        """Return the inputs of a pass by name; states have the type of the graph's caches."""
        constants = (constant.astype(dtype) for constant in self.constants)
        states = dict(zip(geometry.constant_names(), constants, strict=False))
        return {"source_length": np.array([self.length], np.int64), **states}

    @property
    def rows(self) -> list[torch.Tensor]:
        """Valid rows. [1, H, length, D] each"""
        return [torch.from_numpy(state[:, :, : self.length].copy()) for state in self.constants]


class SourceGraphs:
    """Graphs of an exported encoder.

    Quantized weights are `packed`, without which ONNX Runtime does not quantize the inputs of
    MatMulNBits.
    """

    def __init__(
        self, encoder: Path, open_: Path, names: Sequence[str], packed: bool = False
    ) -> None:
        self._encoder, self._open = (
            open_session(path, None if packed else unpacked_options()) for path in (encoder, open_)
        )
        self._names = list(names)

    def hidden(self, source: np.ndarray) -> np.ndarray:
        """Return the hidden states of a source, int64 [N] or float32 [M, frames]. -> [1, N, F]"""
        (hidden,) = self._encoder.run(["hidden"], {"source": source[None]})
        return np.asarray(hidden)

    def states(self, source: np.ndarray) -> SourceStates:
        """Return the states of a source, int64 [N] or float32 [M, frames]."""
        hidden = self.hidden(source)
        constants = self._open.run(self._names, {"hidden": hidden})
        return SourceStates(hidden.shape[1], constants)


def compute_source_states(
    model: SourceConditionedDecoder, sources: WeightSources, geometry: Geometry, num_tokens: int
) -> SourceStates:
    """Run PyTorch's encoder in float32 over a source that does not fill the states' rows."""
    assert geometry.encoder is not None
    length = max(1, 2 * min(geometry.encoder.max_length, NUM_TOKENS) // 3)
    source = random_source(model, length, num_tokens)
    with eager_passes(model, sources):
        hidden = model.encode(source)
        states = [state.numpy() for state in model.open(hidden)]
    random = np.random.default_rng(0)
    constants = []
    for state, shape in zip(states, geometry.constant_shapes(), strict=True):
        constants.append(NOISE * random.standard_normal(shape, np.float32))
        constants[-1][:, :, : state.shape[2]] = state
    return SourceStates(hidden.shape[1], constants)


def encoder_digest(
    model: SourceConditionedDecoder, sources: WeightSources, geometry: Geometry, num_tokens: int
) -> str:
    """Return the SHA-256 of an encoder: its weights, sizes, and hidden states of a source.

    The hidden states depend on everything else in its config, such as activations.
    """
    entry = geometry.encoder
    assert entry is not None
    source = random_source(model, min(entry.max_length, NUM_HASHED_TOKENS), num_tokens)
    with eager_passes(model, sources):
        hidden = model.encode(source).float().contiguous().numpy()
    parts = model.weights_digest(sources), repr(entry), hashlib.sha256(hidden).hexdigest()
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def random_source(
    model: SourceConditionedDecoder, length: int, num_tokens: int, seed: int = 0
) -> torch.Tensor:
    """Return random tokens [1, N], or a spectrogram of noise [1, M, frames]."""
    random = np.random.default_rng(seed)
    sample = model.sample_source(length)
    if model.num_mel_bins is None:
        return torch.from_numpy(random.integers(0, num_tokens, sample.shape))
    return torch.from_numpy(random.standard_normal(sample.shape, np.float32))
