"""What the PyTorch model computes: exactly, in float64, and how far float32 is from that.

T tokens a pass, V vocabulary entries, n positions; H heads of D in the caches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from specedge.errors import ParityError

from ..checkpoint.lazy_weights import Sources
from ..private import DynamicLayer
from ..progress import Advance
from ..quiet import quiet
from ..tracing.families import eager
from ..tracing.geometry import Geometry
from .exact_model import ROUNDINGS, Nudged, exactly
from .judgement import errors, float32_errors
from .routing import Choices, close

WHOLE = 1024  # contexts up to this length are compared whole
SMALL = 50_000_000  # of models up to this many parameters
PART, TAIL = 256, 48  # of longer ones: so many positions from the start, so many up to the end
LARGE_PART, LARGE_TAIL = 32, 12  # and of large models: there every kind has one turn
TRIES = 64  # times that tokens are drawn anew until float32 chooses every expert clearly
WORTHLESS = 0.1  # of the logits' standard deviation: an error that leaves little of a distribution
CHUNK = 256  # tokens a pass, and fewer for a vocabulary
ROOM = 1 << 24  # of more than this many logits a pass
HELD = 1 << 27  # logits that are kept at once, in float64
History = Callable[[int], np.ndarray]


@dataclass
class Reference:
    """What PyTorch computes for `tokens` that come after `start` rows of cache, past(layer part).

    `logits` [n, V] and `caches` [H, n, D] of each layer's keys and values are exact, in float64;
    `logits_float32` [n] and `caches_float32` [H, n] are the errors of PyTorch's own float32, and of
    it as other kernels round, relative to the rows; `logits_pytorch` [n] are those of PyTorch's
    alone, absolute. `left_out` counts tokens that were drawn anew, because rounding could turn a
    router, which chooses among `num_experts`.
    """

    tokens: np.ndarray
    start: int
    history: History
    logits: np.ndarray
    caches: list[np.ndarray]
    logits_float32: np.ndarray
    caches_float32: list[np.ndarray]
    logits_pytorch: np.ndarray
    num_experts: int = 0
    left_out: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def positions_compared(geometry: Geometry, num_parameters: int) -> list[tuple[int, int]]:
    """Which stretches of the context are compared: the whole, or its start and its end."""
    context, small = geometry.context_length, num_parameters <= SMALL
    small &= min(context, WHOLE) * geometry.padded_vocab_size <= HELD
    part, tail = (PART, TAIL) if small else (LARGE_PART, LARGE_TAIL)
    if context <= part + tail or (context <= WHOLE and small):
        return [(0, context)]
    return [(0, part), (context - tail, context)]


def chunk_length(geometry: Geometry) -> int:
    """How many tokens a pass has, so that its logits take little memory."""
    return min(CHUNK, max(1, ROOM // geometry.padded_vocab_size))


def references(
    role: str,
    model: torch.nn.Module,
    sources: Sources,
    geometry: Geometry,
    num_tokens: int,
    advance: Advance = lambda amount: None,
) -> list[Reference]:
    """Run PyTorch over what is compared; `num_tokens` ids are real.

    Raises ParityError for a model whose logits mean nothing in float32.
    """
    random = np.random.default_rng(0)
    found: list[Reference] = []
    for start, end in positions_compared(geometry, num_parameters(model)):
        tokens = random.integers(0, num_tokens, end - start)
        history = _rows_before(start, found, geometry)
        left_out = 0
        for _ in range(TRIES):
            part, near = _reference(model, sources, tokens, start, history, geometry)
            if not near.any():
                break
            # What comes before the first stays clear, so others are near less often each time.
            tokens[near] = random.integers(0, num_tokens, near.sum())
            left_out += int(near.sum())
        else:
            raise ParityError(
                f"{role}: its routers choose by less than float32's error for {near.sum()} of "
                f"{len(tokens)} tokens, {TRIES} times; such choices cannot be compared"
            )
        found.append(replace(part, left_out=left_out))
        advance(end - start)
    _check_float32(role, found)
    return found


def num_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _check_float32(role: str, parts: list[Reference]) -> None:
    """A model of which float32 leaves nothing cannot be run in it, by whatever graph."""
    for part in parts:
        if not np.isfinite(part.logits).all():
            raise ParityError(f"{role}: its logits are NaN or infinite; check its weights")
        if not part.logits.std(1).all():
            raise ParityError(f"{role}: its logits are the same for all tokens; is its head zero?")
        off = part.logits_pytorch / part.logits.std(1)
        off = np.median(off) if np.isfinite(off).all() else np.inf
        if not off <= WORTHLESS:
            raise ParityError(
                f"{role}: this model does not work in float32: PyTorch's own logits are off by "
                f"{off:.1e} of their standard deviation"
            )


def _reference(
    model: torch.nn.Module,
    sources: Sources,
    tokens: np.ndarray,
    start: int,
    history: History,
    geometry: Geometry,
) -> tuple[Reference, np.ndarray]:
    """One stretch, and which of its positions rounding could send to other experts."""
    logits: list[np.ndarray] = []
    near_logits: list[np.ndarray] = []
    own: list[np.ndarray] = []
    with _computing(model, sources, exact=True) as choices:
        caches = _passes(model, tokens, start, history, geometry, choices, logits.append)
    exact = np.concatenate([part[0] for part in logits])

    def compare(found: np.ndarray) -> None:
        rows = exact[sum(map(len, near_logits)) :][: found.shape[1]]
        off = errors(found, rows)
        near_logits.append(off.max(0))
        own.append(off[0])

    with _computing(model, sources, exact=False) as rounded:
        found = _passes(model, tokens, start, history, geometry, rounded, compare, ROUNDINGS)
    reference = Reference(
        tokens.copy(),
        start,
        history,
        exact,
        [cache[0] for cache in caches],
        float32_errors(np.concatenate(near_logits), exact),
        [float32_errors(errors(a, b).max(0), b[0]) for a, b in zip(found, caches, strict=True)],
        np.concatenate(own),
        choices.num_experts,
    )
    return reference, close(choices, rounded, len(tokens))


@contextlib.contextmanager
def _computing(model: torch.nn.Module, sources: Sources, exact: bool) -> Iterator[Choices]:
    """The model computes exactly, or rounds as float32 does; what it chooses is noted."""
    dtype = torch.float64 if exact else torch.float32
    mode = exactly(model) if exact else Nudged()
    reading = sources.reading(model, dtype)
    with torch.no_grad(), quiet(), eager(model), reading, mode, Choices() as choices:
        yield choices


def _passes(
    model: torch.nn.Module,
    tokens: np.ndarray,
    start: int,
    history: History,
    geometry: Geometry,
    choices: Choices,
    told: Callable[[np.ndarray], None],
    batch: int = 1,
) -> list[np.ndarray]:
    """Run PyTorch over tokens after rows of cache, in chunks that keep its memory small.

    `told` gets the logits [B, t, V] of each chunk, each of the B sequences being the same; returns
    what is added to the caches, [B, H, n, D].
    """
    cache = DynamicCache()
    cache.layers = [
        _LaterLayer(*(torch.from_numpy(history(2 * layer + i)) for i in (0, 1)))
        for layer in range(len(geometry.layers) if start else 0)
    ]
    for ids in torch.from_numpy(tokens).expand(batch, -1).split(chunk_length(geometry), 1):
        at = cache.get_seq_length()
        positions = torch.arange(at, at + ids.shape[1])[None]
        choices.positions = slice(at - start, at - start + ids.shape[1])
        told(
            model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits.numpy()
        )
    return [t.numpy() for x in cache.layers for t in (x.keys, x.values)]


class _LaterLayer(DynamicLayer):
    """A layer of a cache that begins with given rows 2 * [H, start, D], the same for a batch.

    It keeps what is added alone: rows before it, for each sequence and layer, take gigabytes.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.before = keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows that there are now. [B, H, start + n, D]"""
        added = super().update(key_states, value_states)
        keys, values = (
            torch.cat((rows.expand(len(new), -1, -1, -1), new), 2)
            for rows, new in zip(self.before, added, strict=True)
        )
        return keys, values

    def get_seq_length(self) -> int:
        return self.before[0].shape[1] + super().get_seq_length()


def _rows_before(start: int, parts: list[Reference], geometry: Geometry) -> History:
    """Rows [H, start, D] to begin at a late position: real ones, repeated, cost no pass."""
    shapes = geometry.cache_shapes()

    def rows(i: int) -> np.ndarray:
        if not start:
            return np.zeros((shapes[i][1], 0, shapes[i][3]), np.float32)
        cache = parts[0].caches[i].astype(np.float32)
        return np.ascontiguousarray(cache[:, np.arange(start) % cache.shape[1]])

    return rows
