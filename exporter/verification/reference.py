"""Reference results: the PyTorch model in float64, and the error of float32 arithmetic.

Without float64, results are PyTorch's in float32, whose error is that of perturbed roundings.

Routing of mixture-of-experts models is recorded as well: two implementations may resolve a near-tie
between experts differently, after which all results differ. Every router selects experts with
`torch.topk`, so that call is recorded.

T tokens per pass, V vocabulary entries, n positions; H heads of D in the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from specedge.bundle.precision import ERROR_MULTIPLE
from specedge.errors import ParityError

from .. import internals
from ..checkpoint.placeholders import WeightSources
from ..internals import DynamicLayer
from ..progress import Advance
from ..tracing.geometry import Geometry
from ..tracing.hidden_states import HiddenStateRecorder
from .exact_model import ROUNDINGS, eager_passes
from .fused_states import FusedStates
from .row_errors import ErrorCheck, float32_error_bounds, row_errors

MAX_COMPLETE_LENGTH = 1024  # context length up to which all positions are compared
MAX_SMALL_PARAMETERS = 50_000_000  # maximum parameters of a small model
NUM_FIRST, NUM_LAST = 256, 48  # positions compared at the start and at the end of the context
LARGE_NUM_FIRST, LARGE_NUM_LAST = 32, 12  # the same for large models
MAX_RESAMPLINGS = 64  # of tokens with routing near-ties
MAX_RELATIVE_ERROR = 0.1  # float32 error, relative to the logits' standard deviation
CHUNK = 256  # maximum tokens per pass
MAX_PASS_LOGITS = 1 << 24  # maximum logits per pass
MAX_STORED_LOGITS = 1 << 27  # maximum logits in memory, in float64
History = Callable[[int], np.ndarray]


@dataclass
class Reference:
    """Results of PyTorch for a segment of the context.

    Attributes:
        tokens: Tokens of the segment, [n].
        start: Position of the first token.
        history: Returns the rows of cache i before `start`, [H, start, D].
        logits: Logits, [n, V].
        caches: Keys and values of each layer, [H, n, D] each.
        hidden: Hidden states that passes return, of each layer, [n, F] each.
        logits_float32: Float32 errors of logits relative to their row, [n].
        caches_float32: Float32 errors of caches relative to their row, [H, n] each.
        hidden_float32: Float32 errors of hidden states relative to their row, [n] each.
        logits_pytorch: Absolute errors of PyTorch's float32 logits, [n].
        is_exact: True if the results are computed in float64.
        num_experts: Number of experts per layer.
        left_out: Number of tokens that were sampled again because of routing near-ties.
    """

    tokens: np.ndarray
    start: int
    history: History
    logits: np.ndarray
    caches: list[np.ndarray]
    hidden: list[np.ndarray]
    logits_float32: np.ndarray
    caches_float32: list[np.ndarray]
    hidden_float32: list[np.ndarray]
    logits_pytorch: np.ndarray
    is_exact: bool = True
    num_experts: int = 0
    left_out: int = 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)

    def compare_hidden_states(
        self,
        error_check: ErrorCheck,
        quantity: str,
        layers: Sequence[int],
        start: int,
        actual: np.ndarray,
    ) -> None:
        """Compare the hidden states of `layers` from position `start` on, [T, F], one by one.

        Layers differ in magnitude. Rows after the segment's end are padding.
        """
        ends = np.cumsum([states.shape[1] for states in self.hidden])
        if actual.shape[1:] != (ends[-1],):
            raise ParityError(f"{error_check.role}: hidden states have shape {actual.shape}")
        actual = actual[: self.end - start]
        rows = slice(start - self.start, start - self.start + len(actual))
        parts = np.split(actual, ends[:-1], 1)
        pairs = zip(parts, self.hidden, self.hidden_float32, strict=True)
        for layer, (values, states, float32) in zip(layers, pairs, strict=True):
            largest = float(np.abs(states).max())
            name = f"hidden state {layer}"
            error_check.compare(quantity, name, values, states[rows], float32[rows], start, largest)


def compared_positions(geometry: Geometry, num_parameters: int) -> list[tuple[int, int]]:
    """Return the compared segments of the context: the whole, or its start and end."""
    context, small = geometry.context_length, num_parameters <= MAX_SMALL_PARAMETERS
    small &= min(context, MAX_COMPLETE_LENGTH) * geometry.padded_vocab_size <= MAX_STORED_LOGITS
    part, tail = (NUM_FIRST, NUM_LAST) if small else (LARGE_NUM_FIRST, LARGE_NUM_LAST)
    if context <= part + tail or (context <= MAX_COMPLETE_LENGTH and small):
        return [(0, context)]
    return [(0, part), (context - tail, context)]


def last_positions(segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a segment of as many positions at the end of the context."""
    context = segments[-1][1]
    return [(context - sum(end - start for start, end in segments), context)]


def chunk_length(geometry: Geometry) -> int:
    """Return the number of tokens per pass, fewer for large vocabularies."""
    return min(CHUNK, max(1, MAX_PASS_LOGITS // geometry.padded_vocab_size))


def compute_references(
    role: str,
    model: torch.nn.Module,
    sources: WeightSources,
    geometry: Geometry,
    num_tokens: int,
    advance: Advance = lambda amount: None,
    segments: Sequence[tuple[int, int]] | None = None,
    exact: bool = True,
    earlier: Sequence[np.ndarray] = (),
    fused: FusedStates | None = None,
) -> list[Reference]:
    """Run PyTorch over segments of the context.

    The cache rows before a segment are those of the first one, repeated.

    Args:
        role: "target" or "draft".
        model: Model, whose large matrices may be placeholders.
        sources: Their values.
        geometry: Sizes of the model.
        num_tokens: Number of token ids to sample from.
        advance: Called with the number of finished tokens.
        segments: First position of each segment and the position after it; those of
            `compared_positions` by default.
        exact: Compute the results in float64.
        earlier: Rows of each cache, [H, n, D], to repeat before the first segment.
        fused: Hidden states that passes of a draft read.

    Raises:
        ParityError: The model's logits are meaningless in float32, or its routers have near-ties.
    """
    random = np.random.default_rng(0)
    references: list[Reference] = []
    if segments is None:
        segments = compared_positions(geometry, num_parameters(model))
    for start, end in segments:
        tokens = random.integers(0, num_tokens, end - start)
        tokens[tokens == getattr(model, "padding_token", None)] = 0
        caches = references[0].caches if references else earlier
        history = _earlier_rows(start, caches, geometry)
        left_out = 0
        for _ in range(MAX_RESAMPLINGS):
            part, near = _compute_segment(
                model, sources, tokens, start, history, geometry, exact, fused
            )
            if not near.any():
                break
            # Tokens before the first near-tie do not change, so the number decreases.
            tokens[near] = random.integers(0, num_tokens, near.sum())
            left_out += int(near.sum())
        else:
            raise ParityError(
                f"{role}: its routers' margins are below the float32 error for {near.sum()} of "
                f"{len(tokens)} tokens, {MAX_RESAMPLINGS} times; such near-ties cannot be compared"
            )
        references.append(replace(part, left_out=left_out))
        advance(end - start)
    _check_magnitude(role, references)
    return references


def num_parameters(model: torch.nn.Module) -> int:
    """Count a model's parameters."""
    return sum(p.numel() for p in model.parameters())


def _check_magnitude(role: str, parts: list[Reference]) -> None:
    """Reject a model that float32 arithmetic cannot compute accurately. Raises ParityError."""
    for part in parts:
        if not np.isfinite(part.logits).all():
            raise ParityError(f"{role}: its logits are NaN or infinite; check its weights")
        if not part.logits.std(1).all():
            raise ParityError(f"{role}: its logits are the same for all tokens; check its LM head")
        off = part.logits_pytorch / part.logits.std(1)
        off = np.median(off) if np.isfinite(off).all() else np.inf
        if not off <= MAX_RELATIVE_ERROR:
            raise ParityError(
                f"{role}: this model is not accurate in float32: PyTorch's logits differ by "
                f"{off:.1e} of their standard deviation"
            )


def _compute_segment(
    model: torch.nn.Module,
    sources: WeightSources,
    tokens: np.ndarray,
    start: int,
    history: History,
    geometry: Geometry,
    exact: bool,
    fused: FusedStates | None = None,
) -> tuple[Reference, np.ndarray]:
    """Return the results of a segment, and the positions of routing near-ties."""
    logits: list[np.ndarray] = []
    logits_errors: list[np.ndarray] = []
    pytorch_errors: list[np.ndarray] = []
    caches: list[np.ndarray] = []
    hidden: list[np.ndarray] = []
    choices: RoutingRecorder | None = None
    if exact:
        with eager_passes(model, sources, exact=True), RoutingRecorder() as choices:
            caches, hidden = _run_passes(
                model, tokens, start, history, geometry, choices, logits.append, fused=fused
            )
        logits = [np.concatenate([part[0] for part in logits])]

    def compare(rounded_logits: np.ndarray) -> None:
        if exact:
            rows = logits[0][sum(map(len, logits_errors)) :][: rounded_logits.shape[1]]
        else:
            rows = rounded_logits[0].astype(np.float64)
            logits.append(rows)
        off = row_errors(rounded_logits, rows)
        logits_errors.append(off.max(0))
        pytorch_errors.append(off[0] if exact else off.max(0))

    with eager_passes(model, sources, exact=False), RoutingRecorder() as rounded:
        rounded_caches, rounded_hidden = _run_passes(
            model, tokens, start, history, geometry, rounded, compare, ROUNDINGS, fused
        )
    caches = caches or [cache[:1] for cache in rounded_caches]
    hidden = hidden or [states[:1] for states in rounded_hidden]
    choices = choices or rounded.of_first_sequence()
    expected = np.concatenate(logits)
    caches_float32, hidden_float32 = (
        [
            float32_error_bounds(row_errors(a, b).max(0), b[0])
            for a, b in zip(rounded_values, values, strict=True)
        ]
        for rounded_values, values in ((rounded_caches, caches), (rounded_hidden, hidden))
    )
    reference = Reference(
        tokens.copy(),
        start,
        history,
        expected,
        [cache[0] for cache in caches],
        [states[0] for states in hidden],
        float32_error_bounds(np.concatenate(logits_errors), expected),
        caches_float32,
        hidden_float32,
        np.concatenate(pytorch_errors),
        exact,
        choices.num_experts,
    )
    return reference, near_routing_ties(choices, rounded, len(tokens))


def _run_passes(
    model: torch.nn.Module,
    tokens: np.ndarray,
    start: int,
    history: History,
    geometry: Geometry,
    choices: RoutingRecorder,
    on_logits: Callable[[np.ndarray], None],
    batch: int = 1,
    fused: FusedStates | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Run PyTorch over tokens after `start` rows of cache, in chunks to limit memory.

    `on_logits` is called with the logits [B, t, V] of each chunk, where B is `batch`. Returns the
    rows that are added to the caches, [B, H, n, D] each, and hidden states, [B, n, F] each.
    """
    recorder = HiddenStateRecorder(model, geometry.hidden_layers)
    states: list[list[torch.Tensor]] = []
    cache = DynamicCache()
    cache.layers = [
        _ContinuedCacheLayer(history, start, layer)
        for layer in range(len(geometry.layers) if start else 0)
    ]
    caches = {internals.cache_name(model): cache}
    for ids in torch.from_numpy(tokens).expand(batch, -1).split(chunk_length(geometry), 1):
        at = cache.get_seq_length()
        positions = torch.arange(at, at + ids.shape[1])[None]
        choices.positions = slice(at - start, at - start + ids.shape[1])
        options = {}
        if fused is not None:
            rows = torch.from_numpy(fused.rows(at, ids.shape[1])).expand(batch, -1, -1)
            options["hidden"] = rows.double() if batch == 1 else rows
        with recorder.recorded():
            output = model(ids, position_ids=positions, use_cache=True, **caches, **options)
        on_logits(output.logits.numpy())
        states.append(recorder.take())
    hidden = [torch.cat(parts, 1).numpy() for parts in zip(*states, strict=True)]
    return [t.numpy() for x in cache.layers for t in (x.keys, x.values)], hidden


class _ContinuedCacheLayer(DynamicLayer):
    """Cache layer after `start` rows that a batch shares.

    Only added rows are stored: earlier rows of all layers would take gigabytes.
    """

    def __init__(self, history: History, start: int, layer: int) -> None:
        super().__init__()
        self._history, self._start, self._layer = history, start, layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add rows and return all of them. [B, H, start + n, D]"""
        added = super().update(key_states, value_states)
        keys, values = (self._with_history(i, new) for i, new in enumerate(added))
        return keys, values

    def _with_history(self, index: int, new: torch.Tensor) -> torch.Tensor:
        """Return the earlier and the new keys, or values for index 1. [B, H, start + n, D]"""
        rows = torch.from_numpy(self._history(2 * self._layer + index))
        return torch.cat((rows.expand(len(new), -1, -1, -1), new), 2)

    def get_seq_length(self) -> int:
        """Return the number of rows."""
        return self._start + super().get_seq_length()


def _earlier_rows(start: int, caches: Sequence[np.ndarray], geometry: Geometry) -> History:
    """Return cache rows [H, start, D] before a segment: those of caches, repeated."""
    shapes = geometry.cache_shapes()

    def rows(i: int) -> np.ndarray:
        if not start:
            return np.zeros((shapes[i][1], 0, shapes[i][3]), np.float32)
        cache = caches[i].astype(np.float32)
        return np.ascontiguousarray(cache[:, np.arange(start) % cache.shape[1]])

    return rows


class RoutingRecorder(TorchFunctionMode):
    """Recorder of router scores, [rows, E], and of the number of selected experts."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = slice(0, 0)  # positions of the current pass
        self.scores: list[tuple[slice, np.ndarray, int]] = []

    @property
    def num_experts(self) -> int:
        """Largest number of experts in a layer; 0 without routers."""
        numbers = (scores.shape[1] for _, scores, k in self.scores if k < scores.shape[1])
        return max(numbers, default=0)

    def of_first_sequence(self) -> RoutingRecorder:
        """Return the scores of the first sequence of a batch, which is not perturbed."""
        first = RoutingRecorder()
        for positions, scores, k in self.scores:
            first.scores.append((positions, scores[: len(scores) // ROUNDINGS], k))
        return first

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "topk":
            scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
            rows = scores.detach().double().reshape(-1, scores.shape[-1]).numpy()
            self.scores.append((self.positions, rows, int(k)))
        return func(*args, **kwargs)


def near_routing_ties(
    exact: RoutingRecorder, rounded: RoutingRecorder, num_positions: int
) -> np.ndarray:
    """Return True for positions whose routing margin is near float32's error. [n]"""
    near = np.zeros(num_positions, bool)
    for (positions, exact_scores, k), (_, rounded_scores, _) in zip(
        exact.scores, rounded.scores, strict=True
    ):
        if k < exact_scores.shape[1]:
            with np.errstate(invalid="ignore"):
                moved = np.abs(rounded_scores.reshape(-1, *exact_scores.shape) - exact_scores)
                noise = np.nan_to_num(moved, posinf=0).max((0, 2))
                ordered = -np.sort(-exact_scores, axis=1)
                margin = np.nan_to_num(ordered[:, k - 1] - ordered[:, k], nan=np.inf)
            part = near[positions]
            part |= (margin < 2 * ERROR_MULTIPLE * noise).reshape(len(part), -1).any(1)
    return near
