"""Source of an encoder-decoder during verification, and verification of the encoder's graphs.

N tokens of a source, F hidden size; H heads of D in E rows of the states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from specedge.bundle.manifest import ENCODER, OPEN

from ..checkpoint.encoder_decoder import SourceConditionedDecoder
from ..checkpoint.placeholders import WeightSources
from ..tracing.geometry import Geometry
from .exact_graph import ExactGraph
from .exact_model import ROUNDINGS, eager_passes
from .row_errors import STRUCTURE, ErrorCheck, float32_error_bounds, row_errors
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
            open_session(path, ort.SessionOptions() if packed else unpacked_options())
            for path in (encoder, open_)
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


def verify_encoder(
    role: str,
    model: SourceConditionedDecoder,
    sources: WeightSources,
    geometry: Geometry,
    num_tokens: int,
    paths: dict[str, Path],
    tolerance: float | None = None,
) -> None:
    """Compare hidden states and states of cross-attention with PyTorch.

    Short sources are compared in float64 and float32, the longest one in float32.

    Args:
        role: "target" or "draft".
        model: Model, whose large matrices may be placeholders.
        sources: Their values.
        geometry: Sizes of the model.
        num_tokens: Number of token ids to sample from.
        paths: Files of the graphs by name; without an encoder the model reads another's.
        tolerance: Maximum float32 error relative to the largest value of an output, if any.

    Raises:
        ParityError: A graph differs from the model.
    """
    entry = geometry.encoder
    assert entry is not None
    lengths = dict.fromkeys((1, min(NUM_TOKENS, entry.max_length), entry.max_length))
    if entry.num_mel_bins is not None:
        lengths = {entry.max_length: None}
    exact_graphs = {name: ExactGraph(path) for name, path in paths.items()}
    sessions = {name: open_session(path, ort.SessionOptions()) for name, path in paths.items()}
    structure = ErrorCheck(role, "the PyTorch model's, both in float64,", multiple=STRUCTURE)
    float32 = ErrorCheck(role, "PyTorch's", tolerance)

    def run_exact(name: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(exact_graphs[name].run(feeds.__getitem__))

    def run_float32(name: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = [output.name for output in sessions[name].get_outputs()]
        return dict(zip(outputs, sessions[name].run(outputs, feeds), strict=True))

    def compare(
        check: ErrorCheck,
        run: Callable[[str, dict[str, np.ndarray]], dict[str, np.ndarray]],
        source: np.ndarray,
        expected: dict[str, np.ndarray],
        bounds: dict[str, np.ndarray],
    ) -> None:
        dtype = np.float64 if check is structure else np.float32
        actual = {"hidden": expected["hidden"][None].astype(dtype)}
        if ENCODER in paths:
            actual = run(ENCODER, {"source": source})
        actual |= run(OPEN, {"hidden": actual["hidden"]})
        for name, values in expected.items():
            rows = actual[name][0]
            if rows.ndim == 3:
                rows = rows[:, : values.shape[-2]]
            check.compare(name, name, rows, values, bounds[name])

    for seed, length in enumerate(lengths):
        is_exact = length <= NUM_TOKENS or entry.num_mel_bins is not None
        source = random_source(model, length, num_tokens, seed)
        repeated = source.expand(ROUNDINGS, *source.shape[1:])
        rounded = _run(model, sources, repeated, exact=False)
        results = _run(model, sources, source, exact=True) if is_exact else rounded
        expected = {name: values[0].astype(np.float64) for name, values in results.items()}
        bounds = {
            name: float32_error_bounds(row_errors(rounded[name], values).max(0), values)
            for name, values in expected.items()
        }
        if is_exact:
            exact_source = source.double() if source.is_floating_point() else source
            compare(structure, run_exact, exact_source.numpy(), expected, bounds)
        compare(float32, run_float32, source.numpy(), expected, bounds)


def _run(
    model: SourceConditionedDecoder, sources: WeightSources, source: torch.Tensor, exact: bool
) -> dict[str, np.ndarray]:
    """Run PyTorch over sources, exactly or with random rounding. -> [B, N, F], [B, H, N, D] each"""
    if exact and source.is_floating_point():
        source = source.double()
    with eager_passes(model, sources, exact):
        hidden = model.encode(source)
        states = model.open(hidden)
    layers = range(len(states) // 2)
    names = [f"present.{layer}.cross.{part}" for layer in layers for part in ("key", "value")]
    return {"hidden": hidden.numpy(), **{n: s.numpy() for n, s in zip(names, states, strict=True)}}
