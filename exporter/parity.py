"""Does the exported graph compute what the PyTorch model computes? Measured on every export.

T tokens a pass, V vocabulary entries, n positions; H heads of D in the caches.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
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
from .graphs import Length
from .playing import Action, Fill, Pass, Player, Rows, Spoil
from .progress import Advance
from .quiet import quiet
from .sources import Sources

TOLERANCE = 5e-6
SPREAD = 2.0  # a standard deviation of the logits below this hides errors in near-uniform attention
WHOLE = 1024  # contexts up to this length are played whole
SMALL = 50_000_000  # of models up to this many parameters
PART, TAIL = 256, 48  # of longer ones: so many positions from the start, so many up to the end
LARGE_PART, LARGE_TAIL = 76, 32  # and of large models: there every kind has one turn
SHARPENED = 200_000_000  # untrained models of more parameters are not compared a second time
INDEPENDENT = (1, 2, 3, 5, 9)
PACKAGES = (torch, transformers, onnx, onnxruntime, onnxscript)
TURNS = ("step", "verify", "catchup", "decoder", "prefill", "step", "verify")
LARGE_TURNS = TURNS[:5]
ENDS = ("verify", "catchup", "step", "decoder")
LARGE_ENDS = ENDS[:1]
_CHUNK = 256
Check = tuple[list[Action], Callable[[list[Any]], None]]


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

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


@dataclass
class Findings:
    """What a comparison found, and the fixed-shape files with other bits than the decoder's."""

    parity: Parity
    differing: list[str]


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
    """Run PyTorch over what is compared; `num_tokens` ids are real."""
    stretches = positions_played(geometry, num_parameters(model))
    for at_once in (False, True):
        with sources.reading(model, at_once):
            found = _references(model, stretches, geometry, num_tokens, advance)
        # A module that reads another's weights outside its call has read a stand-in.
        if all(np.isfinite(part.logits).all() for part in found):
            break
    return found


def num_parameters(model: torch.nn.Module) -> int:
    """How many numbers the model has."""
    return sum(p.numel() for p in model.parameters())


def measure(
    role: str,
    parts: list[Reference],
    player: Player,
    advance: Advance = lambda amount: None,
) -> Findings:
    """Play the graphs along the same stretches and compare."""
    errors = Errors(role)
    differing: list[str] = []
    held: dict[int, bool] = {}
    checks = [_stretch(player, part, errors) for part in parts]
    checks.append(_independence(player, parts[0].tokens, held))
    checks += [_file(player, length, parts[0], differing) for length in player.lengths.values()]
    player.check_files()
    # All at once, because a model in parts is loaded for each play.
    results = iter(player.play([a for actions, _ in checks for a in actions], advance))
    for actions, judge in checks:
        judge(list(itertools.islice(results, len(actions))))
    parity = Parity(
        tolerance=TOLERANCE,
        logits_error=errors.largest["logits"],
        cache_error=errors.largest["cache"],
        logits_std=spread(parts[0]),
        num_positions=sum(len(part.tokens) for part in parts),
        row_independent_lengths=tuple(t for t, same in held.items() if same),
        versions={package.__name__: package.__version__ for package in PACKAGES},
    )
    return Findings(parity, differing)


def spread(part: Reference) -> float:
    """The standard deviation of a row of logits, on average."""
    return float(part.logits.std(1).mean())


def reference(
    model: torch.nn.Module,
    tokens: np.ndarray,
    start: int = 0,
    past: Callable[[int], np.ndarray] = lambda i: np.zeros((0, 0, 0)),
    num_layers: int = 0,
) -> Reference:
    """Run PyTorch over tokens after rows of cache, in chunks that keep its memory small."""
    cache = DynamicCache()
    for layer in range(num_layers if start else 0):
        cache.update(*(torch.from_numpy(past(2 * layer + i))[None] for i in (0, 1)), layer)
    logits = []
    with torch.no_grad(), quiet():
        for ids in torch.from_numpy(tokens)[None].split(_CHUNK, 1):
            at = cache.get_seq_length()
            positions = torch.arange(at, at + ids.shape[1])[None]
            output = model(ids, position_ids=positions, past_key_values=cache, use_cache=True)
            logits.append(output.logits[0].float().numpy())
    rows = [t[0, :, start:].numpy().copy() for x in cache.layers for t in (x.keys, x.values)]
    return Reference(tokens, start, past, np.concatenate(logits), rows)


def schedule(player: Player, start: int, end: int) -> Iterator[tuple[str, int, int, int]]:
    """Graph, first position, real tokens and kept tokens of each pass from start to end.

    Every kind takes its turn; after a verify pass half of it is rolled back. At the context's end
    the passes have fewer real tokens than rows, as in a host that has only fixed shapes.
    """
    at = start
    turns, ends = (LARGE_TURNS, LARGE_ENDS) if player.in_parts else (TURNS, ENDS)
    while at < end:
        for name in turns:
            length = player.lengths[name].length or 7
            if at + length > player.geometry.capacity:
                continue
            length = min(length, end - at)
            kept = length // 2 if name == "verify" else length
            if length > 0:
                yield name, at, length, kept
            at += kept
    for name in ends if end == player.geometry.context_length else ():
        length = min(player.lengths[name].length or 3, 2)
        yield name, end - length, length, length
        yield name, end - 1, 1, 1


def lengths_to_compare(player: Player) -> list[int]:
    """The T whose rows should have the same bits: a few, and those that have files."""
    fixed = {x.length for x in player.lengths.values() if x.length is not None}
    return sorted(t for t in {*INDEPENDENT, *fixed} if t <= player.geometry.context_length)


def _references(
    model: torch.nn.Module,
    stretches: list[tuple[int, int]],
    geometry: Geometry,
    num_tokens: int,
    advance: Advance,
) -> list[Reference]:
    random = np.random.default_rng(0)
    found: list[Reference] = []
    for start, end in stretches:
        tokens = random.integers(0, num_tokens, end - start)
        past = _rows_before(start, found, geometry)
        found.append(reference(model, tokens, start, past, len(geometry.layers)))
        advance(end - start)
    return found


def _stretch(player: Player, part: Reference, errors: Errors) -> Check:
    """A stretch in passes of all kinds, with rollbacks and noise; everything is compared."""
    scale = _scale(part.logits)

    def compared(start: int, length: int, found: np.ndarray) -> None:
        wanted = part.logits[start - part.start :][:length]
        errors.compare("logits", "logits", found[:length], wanted, scale, start)

    actions: list[Action] = [Fill(part.past), Spoil(part.start, player.geometry.capacity)]
    for name, start, length, kept in schedule(player, part.start, part.end):
        tokens = _padded(player, name, part.tokens[start - part.start :][:length])
        then = functools.partial(compared, start, length)
        actions.append(Pass(name, tokens, start, packed=name == "decoder", then=then))
        actions.append(Spoil(start + kept, start + len(tokens)))
    actions.append(Rows(part.start, part.end))

    def judge(results: list[Any]) -> None:
        names = player.geometry.cache_names()
        for name, found, wanted in zip(names, results[-1], part.caches, strict=True):
            present = name.replace("past_key_values", "present")
            rows = _by_row(found), _by_row(wanted)
            errors.compare("cache", present, *rows, _scale(wanted), part.start)

    return actions, judge


def _independence(player: Player, tokens: np.ndarray, held: dict[int, bool]) -> Check:
    """Passes of each T, to have the bits that one pass over all rows has."""
    lengths = lengths_to_compare(player)
    tokens = tokens[: 2 * max(lengths)]
    wide: list[np.ndarray] = []
    actions: list[Action] = [
        Spoil(0, len(tokens)),  # behind them there is noise since the stretches
        Pass("decoder", tokens, 0, packed=True, then=wide.append),
        Rows(0, len(tokens)),
    ]

    def same_logits(start: int, found: np.ndarray) -> bool:
        return np.array_equal(found, wide[0][start:][: len(found)])

    played: list[range] = []
    for length in lengths:
        last = len(tokens) - length
        # Of a large model one pass of each length, after the rows that the wide one left.
        starts = range(last if player.in_parts else last % length, last + 1, length)
        actions.append(Spoil(starts[0], len(tokens)))
        for start in starts:
            part, then = tokens[start:][:length], functools.partial(same_logits, start)
            actions.append(Pass("decoder", part, start, packed=True, then=then))
        actions.append(Rows(starts[0], len(tokens)))
        played.append(starts)

    def judge(results: list[Any]) -> None:
        caches, rest = results[2], iter(results[3:])
        for length, starts in zip(lengths, played, strict=True):
            _, *same, rows = itertools.islice(rest, len(starts) + 2)
            wanted = [cache[:, starts[0] :] for cache in caches]
            held[length] = all(same) and all(map(np.array_equal, rows, wanted))

    return actions, judge


def _file(player: Player, length: Length, part: Reference, differing: list[str]) -> Check:
    """A fixed-shape file, to have the bits of the file for any length."""
    if length.length is None:
        return [], lambda results: None
    size = length.length
    start = min(8, len(part.tokens) - size)  # after a few rows, if there is room
    past = Fill(lambda i: part.caches[i][:, :start])
    actions: list[Action] = []
    for name in (length.name, "decoder"):
        tokens = part.tokens[start:][:size]
        actions += [past, Spoil(start, start + size), Pass(name, tokens, start)]
        actions.append(Rows(start, start + size))

    def judge(results: list[Any]) -> None:
        _, _, logits, rows, _, _, wanted, wanted_rows = results
        same = all(map(np.array_equal, rows, wanted_rows))
        if not same or (logits is not None and not np.array_equal(logits, wanted)):
            differing.append(length.name)

    return actions, judge


def sharpened(model: torch.nn.Module, sources: Sources, num_tokens: int) -> torch.nn.Module:
    """A copy of an untrained model with larger matrices, so that its structure shows in numbers.

    Inner matrices are scaled to keep the size of what they multiply; more would make the model
    chaotic, so that float32 itself loses more than the tolerance. The last one does the rest.
    """
    with sources.reading(model, at_once=True):
        model = copy.deepcopy(model)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    tokens = np.random.default_rng(0).integers(0, num_tokens, 16)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | Conv1D) and module is not head:
                fan_in = module.weight.shape[isinstance(module, torch.nn.Linear)]
                module.weight.mul_(max(1.0, float(1 / (module.weight.std() * fan_in**0.5))))
        for _ in range(40):
            if spread(reference(model, tokens)) >= SPREAD:
                break
            head.weight.mul_(1.5)
    return model


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


def _scale(wanted: np.ndarray) -> float:
    return max(1e-30, float(np.abs(wanted).max()))


def _padded(player: Player, name: str, tokens: np.ndarray) -> np.ndarray:
    return np.pad(tokens, (0, (player.lengths[name].length or len(tokens)) - len(tokens)))


def _by_row(cache: np.ndarray) -> np.ndarray:
    return cache.transpose(1, 0, 2)
