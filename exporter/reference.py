"""What the PyTorch model computes, for the exported graphs to be compared with.

T tokens a pass, V vocabulary entries, n positions; H heads of D in the caches.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from .families import eager_experts
from .geometry import Geometry
from .progress import Advance
from .quiet import quiet
from .sources import Sources

SPREAD = 2.0  # a standard deviation of the logits below this hides errors in near-uniform attention
WHOLE = 1024  # contexts up to this length are played whole
SMALL = 50_000_000  # of models up to this many parameters
PART, TAIL = 256, 48  # of longer ones: so many positions from the start, so many up to the end
LARGE_PART, LARGE_TAIL = 32, 12  # and of large models: there every kind has one turn
SHARPENED = 200_000_000  # untrained models of more parameters are not compared a second time
_CHUNK = 256


@dataclass
class Reference:
    """What PyTorch computes for `tokens` that come after `start` rows of cache, past(layer part).

    `logits` [n, V], and `caches` [H, n, D] of each layer's keys and values.
    """

    tokens: np.ndarray
    start: int
    past: Callable[[int], np.ndarray]
    logits: np.ndarray
    caches: list[np.ndarray]

    @functools.cached_property
    def scale(self) -> float:
        """The largest logit's size."""
        return largest(self.logits)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


def positions_played(geometry: Geometry, num_parameters: int) -> list[tuple[int, int]]:
    """Which stretches of the context are compared: the whole, or its start and its end."""
    context, small = geometry.context_length, num_parameters <= SMALL
    part, tail = (PART, TAIL) if small else (LARGE_PART, LARGE_TAIL)
    if context <= part + tail or (context <= WHOLE and small):
        return [(0, context)]
    return [(0, part), (context - tail, context)]


def references(
    model: torch.nn.Module,
    sources: Sources,
    geometry: Geometry,
    num_tokens: int,
    advance: Advance = lambda amount: None,
) -> list[Reference]:
    """Run PyTorch over what is compared; `num_tokens` ids are real.

    In float64, so that what the comparison finds is the graph's own error and not PyTorch's too;
    in float32 for a model that cannot.
    """
    stretches = positions_played(geometry, num_parameters(model))
    ways = ((torch.float64, False), (torch.float32, False), (torch.float32, True))
    for dtype, at_once in ways:
        try:
            with eager_experts(model), sources.reading(model, dtype, at_once):
                found = _references(model, stretches, geometry, num_tokens, dtype, advance)
        except RuntimeError as error:
            if dtype == torch.float32 or "double" not in str(error).lower():
                raise
            continue  # an operator without this type
        # A module that reads another's weights outside its call has read a stand-in.
        if all(np.isfinite(part.logits).all() for part in found):
            break
    return found


def largest(numbers: np.ndarray) -> float:
    """The size of the largest, to which errors are relative."""
    return max(1e-30, float(np.abs(numbers).max()))


def num_parameters(model: torch.nn.Module) -> int:
    """How many numbers the model has."""
    return sum(p.numel() for p in model.parameters())


def spread(part: Reference) -> float:
    """The standard deviation of a row of logits, on average."""
    return float(part.logits.std(1).mean())


def reference(
    model: torch.nn.Module,
    tokens: np.ndarray,
    start: int = 0,
    past: Callable[[int], np.ndarray] = lambda i: np.zeros((0, 0, 0)),
    num_layers: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Reference:
    """Run PyTorch over tokens after rows of cache, in chunks that keep its memory small."""
    cache = DynamicCache()
    for layer in range(num_layers if start else 0):
        rows = (torch.from_numpy(past(2 * layer + i))[None].to(dtype) for i in (0, 1))
        cache.update(*rows, layer)
    logits = []
    with torch.no_grad(), quiet():
        for ids in torch.from_numpy(tokens)[None].split(_CHUNK, 1):
            at = cache.get_seq_length()
            positions = torch.arange(at, at + ids.shape[1])[None]
            output = model(ids, position_ids=positions, past_key_values=cache, use_cache=True)
            logits.append(output.logits[0].float().numpy())
    caches = [t[0, :, start:].float().numpy() for x in cache.layers for t in (x.keys, x.values)]
    return Reference(tokens, start, past, np.concatenate(logits), list(map(np.copy, caches)))


def sharpened(model: torch.nn.Module, sources: Sources, num_tokens: int) -> torch.nn.Module:
    """A copy of an untrained model with larger matrices, so that its structure shows in numbers.

    Inner matrices are scaled to keep the size of what they multiply; more would make the model
    chaotic, so that float32 itself loses more than the tolerance. The last one does the rest.
    """
    with sources.reading(model, at_once=True):
        model = copy.deepcopy(model)
    model.tie_weights()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    tokens = np.random.default_rng(0).integers(0, num_tokens, 16)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | Conv1D) and module is not head:
                fan_in = module.weight.shape[isinstance(module, torch.nn.Linear)]
                if (std := float(module.weight.std())) > 0:
                    module.weight.mul_(max(1.0, 1 / (std * fan_in**0.5)))
        for _ in range(40):
            if spread(reference(model, tokens)) >= SPREAD:
                break
            head.weight.mul_(1.5)
    return model


def _references(
    model: torch.nn.Module,
    stretches: list[tuple[int, int]],
    geometry: Geometry,
    num_tokens: int,
    dtype: torch.dtype,
    advance: Advance,
) -> list[Reference]:
    random = np.random.default_rng(0)
    found: list[Reference] = []
    for start, end in stretches:
        tokens = random.integers(0, num_tokens, end - start)
        past = _rows_before(start, found, geometry)
        found.append(reference(model, tokens, start, past, len(geometry.layers), dtype))
        advance(end - start)
    return found


def _rows_before(
    start: int, parts: list[Reference], geometry: Geometry
) -> Callable[[int], np.ndarray]:
    """Rows [H, start, D] to begin at a late position: real ones, repeated, cost no pass."""
    shapes = geometry.cache_shapes()

    def rows(i: int) -> np.ndarray:
        if not start:
            return np.zeros((shapes[i][1], 0, shapes[i][3]), np.float32)
        cache = parts[0].caches[i]
        return np.ascontiguousarray(cache[:, np.arange(start) % cache.shape[1]])

    return rows
