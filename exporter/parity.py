"""Does the exported graph compute what the PyTorch model computes? Measured on every export.

T tokens a pass, V vocabulary entries, n positions; H heads of D in the caches.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxscript
import torch
import transformers
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from specedge.errors import ParityError
from specedge.manifest import Parity

from .geometry import Geometry
from .playing import Player
from .progress import Advance
from .quiet import quiet

TOLERANCE = 5e-6
SPREAD = 2.0  # a standard deviation of the logits below this hides errors in near-uniform attention
WHOLE = 1024  # contexts up to this length are played whole
SMALL = 200_000_000  # models up to this many parameters, too
PART, TAIL = 256, 48  # of others: so many positions from the start, so many up to the end
INDEPENDENT = (1, 2, 3, 5, 9)
PACKAGES = (torch, transformers, onnx, onnxruntime, onnxscript)
TURNS = ("step", "verify", "catchup", "decoder", "prefill", "step", "verify")
_CHUNK = 256


@dataclass
class Reference:
    """What PyTorch computes for `tokens` that come after `past` rows of cache."""

    tokens: np.ndarray
    past: list[np.ndarray]
    logits: np.ndarray
    caches: list[np.ndarray]

    @property
    def start(self) -> int:
        """The position of the first token."""
        return self.past[0].shape[1]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


@dataclass
class Errors:
    """The largest differences seen, relative to the largest value of the same output."""

    role: str
    tolerance: float = TOLERANCE
    largest: dict[str, float] = field(default_factory=lambda: {"logits": 0.0, "cache": 0.0})

    def compare(
        self, kind: str, name: str, found: np.ndarray, wanted: np.ndarray, scale: float, start: int
    ) -> None:
        """Note the error of rows whose first position is `start`. [n, ...], [n, ...]"""
        error = np.abs(found - wanted).reshape(len(found), -1).max(1) / scale
        error = np.where(np.isfinite(error), error, np.inf)
        worst = int(error.argmax())
        self.largest[kind] = max(self.largest[kind], float(error[worst]))
        if error[worst] > self.tolerance:
            raise ParityError(
                f"{self.role}: {name} at position {start + worst} differs from the PyTorch model's "
                f"by {error[worst]:.1e} of the largest value, allowed is {self.tolerance:.0e}; "
                "this model cannot be exported"
            )


def positions_played(geometry: Geometry, num_parameters: int) -> list[tuple[int, int]]:
    """Which stretches of the context are compared: the whole, or its start and its end."""
    context = geometry.context_length
    if context <= PART + TAIL or (context <= WHOLE and num_parameters <= SMALL):
        return [(0, context)]
    return [(0, PART), (context - TAIL, context)]


def measure(
    role: str, model: torch.nn.Module, player: Player, num_tokens: int, advance: Advance
) -> Parity:
    """Play the graphs along the context and compare; `num_tokens` ids are real."""
    geometry, errors = player.geometry, Errors(role)
    random = np.random.default_rng(0)
    num_parameters = sum(p.numel() for p in model.parameters())
    parts: list[Reference] = []
    for start, end in positions_played(geometry, num_parameters):
        tokens = random.integers(0, num_tokens, end - start)
        past = _rows_before(start, parts, geometry)
        parts.append(reference(model, tokens, past))
        advance(end - start)
        play(player, parts[-1], errors)
        advance(end - start)
    return Parity(
        tolerance=TOLERANCE,
        logits_error=errors.largest["logits"],
        cache_error=errors.largest["cache"],
        logits_std=spread(parts[0]),
        num_positions=sum(len(part.tokens) for part in parts),
        row_independent_lengths=independent_lengths(player, parts[0].tokens),
        versions={package.__name__: package.__version__ for package in PACKAGES},
    )


def tokens(num_tokens: int, geometry: Geometry) -> np.ndarray:
    """A few tokens, the same each time."""
    return np.random.default_rng(1).integers(0, num_tokens, min(64, geometry.context_length))


def spread(part: Reference) -> float:
    """The standard deviation of a row of logits, on average."""
    return float(part.logits.std(1).mean())


def reference(model: torch.nn.Module, tokens: np.ndarray, past: list[np.ndarray]) -> Reference:
    """Run PyTorch over tokens after rows of cache, in chunks that keep its memory small."""
    cache = DynamicCache()
    start = past[0].shape[1]
    if start:
        for layer in range(len(past) // 2):
            pair = (torch.from_numpy(past[2 * layer + i])[None] for i in (0, 1))
            cache.update(*pair, layer)
    logits = []
    with torch.no_grad(), quiet():
        for ids in torch.from_numpy(tokens)[None].split(_CHUNK, 1):
            at = cache.get_seq_length()
            positions = torch.arange(at, at + ids.shape[1])[None]
            output = model(ids, position_ids=positions, past_key_values=cache, use_cache=True)
            logits.append(output.logits[0].float().numpy())
    rows = [t[0, :, start:].numpy() for x in cache.layers for t in (x.keys, x.values)]
    return Reference(tokens, past, np.concatenate(logits), rows)


def play(player: Player, part: Reference, errors: Errors) -> None:
    """Play a stretch in passes of all kinds, with rollbacks and noise, and compare everything."""
    scale = max(1e-30, float(np.abs(part.logits).max()))
    player.fill(part.past)
    for name, start, length in schedule(player, part.start, part.end):
        rows = slice(start - part.start, start - part.start + length)
        logits = player.run(name, _padded(player, name, part.tokens[rows]), start)
        if logits is not None:
            errors.compare("logits", "logits", logits[:length], part.logits[rows], scale, start)
        player.spoil(start + length, player.geometry.capacity)
    for name, found, wanted in zip(
        player.geometry.cache_names(), player.rows(part.start, part.end), part.caches, strict=True
    ):
        scale = max(1e-30, float(np.abs(wanted).max()))
        present = name.replace("past_key_values", "present")
        errors.compare("cache", present, _by_row(found), _by_row(wanted), scale, part.start)


def schedule(player: Player, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Graph, first position and number of real tokens of each pass from start to end.

    Every kind takes its turn; after a verify pass half of it is rolled back. At the end the passes
    have fewer real tokens than rows, as in a host that has only fixed shapes. Where graphs are
    costly to load, turns are longer.
    """
    at, repeats = start, 6 if player.one_at_a_time else 1
    while at < end:
        for name in (name for name in TURNS for _ in range(repeats)):
            length = player.lengths[name].length or 7
            if at + length > player.geometry.capacity:
                continue
            length = min(length, end - at)
            if length > 0:
                yield name, at, length
            at += length // 2 if name == "verify" else length
    for name in ("verify", "catchup", "step", "decoder"):
        length = min(player.lengths[name].length or 3, 2)
        yield name, end - length, length
        yield name, end - 1, 1


def lengths_to_compare(player: Player) -> list[int]:
    """The T whose rows should have the same bits: a few, and those that have files."""
    fixed = {x.length for x in player.lengths.values() if x.length is not None}
    return sorted(t for t in {*INDEPENDENT, *fixed} if t <= player.geometry.context_length)


def independent_lengths(player: Player, tokens: np.ndarray) -> tuple[int, ...]:
    """The T whose passes give the bits that one pass over all rows gives."""
    tokens = tokens[: 2 * max(lengths_to_compare(player))]
    player.fill(player.rows(0, 0))
    wide = player.run("decoder", tokens, 0)
    caches = player.rows(0, len(tokens))
    assert wide is not None
    held = []
    for length in lengths_to_compare(player):
        if _same_bits(player, tokens, length, wide, caches):
            held.append(length)
    return tuple(held)


def differing_files(player: Player, tokens: np.ndarray) -> list[str]:
    """The fixed-shape files whose bits are not those of the file for any length."""
    differing = []
    for length in player.lengths.values():
        if length.length is None or length.length > len(tokens):
            continue
        player.fill(player.rows(0, 0))
        results = []
        for name in (length.name, "decoder"):
            logits = player.run(name, tokens[: length.length], 0)
            results.append((logits, player.rows(0, length.length)))
        (logits, rows), (wanted, wanted_rows) = results
        same = all(map(np.array_equal, rows, wanted_rows))
        if not same or (logits is not None and (logits != wanted).any()):
            differing.append(length.name)
    return differing


def sharpened(model: torch.nn.Module, num_tokens: int) -> torch.nn.Module:
    """A copy of an untrained model with larger matrices, so that its structure shows in numbers.

    Inner matrices are scaled to keep the size of what they multiply; more would make the model
    chaotic, so that float32 itself loses more than the tolerance. The last one does the rest.
    """
    model = copy.deepcopy(model)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    tokens = np.random.default_rng(0).integers(0, num_tokens, 16)
    empty = _no_rows(model, tokens)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | Conv1D) and module is not head:
                fan_in = module.weight.shape[isinstance(module, torch.nn.Linear)]
                module.weight.mul_(max(1.0, float(1 / (module.weight.std() * fan_in**0.5))))
        for _ in range(40):
            if spread(reference(model, tokens, empty)) >= SPREAD:
                break
            head.weight.mul_(1.5)
    return model


def _same_bits(
    player: Player, tokens: np.ndarray, length: int, wide: np.ndarray, caches: list[np.ndarray]
) -> bool:
    player.fill(player.rows(0, 0))
    for start in range(0, len(tokens) - length + 1, length):
        rows = slice(start, start + length)
        logits = player.run("decoder", tokens[rows], start)
        found = player.rows(start, start + length)
        same = all(np.array_equal(a, b[:, rows]) for a, b in zip(found, caches, strict=True))
        if logits is None or not np.array_equal(logits, wide[rows]) or not same:
            return False
    return True


def _rows_before(start: int, parts: list[Reference], geometry: Geometry) -> list[np.ndarray]:
    """Rows [H, start, D] to begin at a late position: real ones, repeated, cost no pass."""
    if not start:
        shapes = geometry.cache_shapes()
        return [np.zeros((heads, 0, size), np.float32) for _, heads, _, size in shapes]
    caches = parts[0].caches
    index = np.arange(start) % caches[0].shape[1]
    return [np.ascontiguousarray(cache[:, index]) for cache in caches]


def _no_rows(model: torch.nn.Module, tokens: np.ndarray) -> list[np.ndarray]:
    with torch.no_grad():
        output = model(torch.from_numpy(tokens)[None], use_cache=True)
    layers = output.past_key_values.layers
    return [t[0, :, :0].numpy() for x in layers for t in (x.keys, x.values)]


def _padded(player: Player, name: str, tokens: np.ndarray) -> np.ndarray:
    return np.pad(tokens, (0, (player.lengths[name].length or len(tokens)) - len(tokens)))


def _by_row(cache: np.ndarray) -> np.ndarray:
    return cache.transpose(1, 0, 2)
