"""Does the exported graph compute what the PyTorch model computes? Measured on every export.

T tokens a pass, V vocabulary entries, n positions; H heads of D in the caches.
"""

from __future__ import annotations

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

from specedge.errors import ParityError
from specedge.manifest import Parity

from .graphs import Length
from .playing import Action, Fill, Pass, Player, Rows, Spoil
from .progress import Advance
from .reference import Reference, largest, spread

TOLERANCE = 5e-6
INDEPENDENT = (1, 2, 3, 5, 9)
PACKAGES = (torch, transformers, onnx, onnxruntime, onnxscript)
TURNS = ("step", "verify", "catchup", "decoder", "prefill", "step", "verify")
LARGE_TURNS = TURNS[:5]
ENDS = ("verify", "catchup", "step", "decoder")
LARGE_ENDS = ENDS[:1]
Check = tuple[list[Action], Callable[[list[Any]], None]]


@dataclass
class Findings:
    """What a comparison found, and the fixed-shape files with other bits than the decoder's."""

    parity: Parity
    differing: list[str]


@dataclass
class Errors:
    """The largest differences seen, relative to the largest value of the same output."""

    role: str
    wanted: str
    largest: dict[str, float] = field(default_factory=lambda: {"logits": 0.0, "cache": 0.0})

    def compare(
        self, kind: str, name: str, found: np.ndarray, wanted: np.ndarray, scale: float, start: int
    ) -> None:
        """Note the error of rows whose first position is `start`. [n, ...], [n, ...]"""
        error = np.abs(found - wanted).reshape(len(found), -1).max(1) / scale
        error = np.where(np.isfinite(error), error, np.inf)
        worst = int(error.argmax())
        self.largest[kind] = max(self.largest[kind], float(error[worst]))
        if error[worst] > TOLERANCE:
            raise ParityError(
                f"{self.role}: {name} at position {start + worst} differs from {self.wanted} "
                f"by {error[worst]:.1e} of the largest value, allowed is {TOLERANCE:.0e}"
            )


def measure(
    role: str,
    parts: list[Reference],
    player: Player,
    advance: Advance = lambda amount: None,
) -> Findings:
    """Play the graphs along the same stretches and compare.

    Of a large model with layers of like form all layers run in one pass of each stretch, compared
    with PyTorch; then one layer of each form in passes of all kinds, compared with one such pass.
    """
    errors = Errors(role, "the PyTorch model's")
    std, num_positions = spread(parts[0]), sum(len(part.tokens) for part in parts)
    player.check_files()
    through: list[Check] = []
    checks: list[Check] = []
    if player.left_out is not None:
        through = [_through(player, part, errors) for part in parts]
        errors = Errors(role, "one pass over all rows", errors.largest)
        parts, checks = map(list, zip(*(_own(player, part) for part in parts), strict=True))
    differing: list[str] = []
    held: dict[int, bool] = {}
    alone = [length for length in player.lengths.values() if length.length is not None]
    checks += [_stretch(player, part, errors, alone, differing) for part in parts]
    checks.append(_independence(player, parts[0].tokens, held))
    checks += [_file(player, length, parts[0], differing) for length in alone]
    # All at once, because a model in parts is loaded for each play.
    results = iter(player.play(_actions(checks), advance, _actions(through)))
    for actions, judge in (*through, *checks):
        judge(list(itertools.islice(results, len(actions))))
    parity = Parity(
        tolerance=TOLERANCE,
        logits_error=errors.largest["logits"],
        cache_error=errors.largest["cache"],
        logits_std=std,
        num_positions=num_positions,
        row_independent_lengths=tuple(t for t, same in held.items() if same),
        versions={package.__name__: package.__version__ for package in PACKAGES},
    )
    return Findings(parity, differing)


def _actions(checks: list[Check]) -> list[Action]:
    return [action for actions, _ in checks for action in actions]


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
            if at + length + (player.ops == "gqa") > player.geometry.capacity:
                continue
            length = min(length, end - at)
            kept = length // 2 if name == "verify" else length
            if length > 0:
                yield name, at, length, kept
            at += kept
    for name in ends if end == player.geometry.context_length else ():
        length = min(player.lengths[name].length or 3, 2)
        if not player.in_parts:
            yield name, end - length, length, length
        yield name, end - 1, 1, 1


def lengths_to_compare(player: Player) -> list[int]:
    """The T whose rows should have the same bits: a few, and those that have files."""
    fixed = {x.length for x in player.lengths.values() if x.length is not None}
    return sorted(t for t in {*INDEPENDENT, *fixed} if t <= player.geometry.context_length)


def _through(player: Player, part: Reference, errors: Errors) -> Check:
    """A stretch in one pass through all layers, to be what PyTorch computes."""

    def judge(results: list[Any]) -> None:
        *_, logits, rows = results
        errors.compare("logits", "logits", logits, part.logits, part.scale, part.start)
        _compare_caches(player.geometry.cache_names(), part, errors, rows)

    actions: list[Action] = [
        Fill(part.past),
        Spoil(part.start, player.geometry.capacity),
        Pass("decoder", part.tokens, part.start),
        Rows(part.start, part.end),
    ]
    return actions, judge


def _own(player: Player, part: Reference) -> tuple[Reference, Check]:
    """What the kept layers compute for a stretch in one pass; it is known when that was played."""
    own = Reference(
        part.tokens, part.start, lambda i: part.past(player.kept[i]), np.zeros((0, 0)), []
    )
    actions: list[Action] = [
        Fill(own.past),
        Spoil(own.start, player.geometry.capacity),
        Pass("decoder", own.tokens, own.start, then=functools.partial(setattr, own, "logits")),
        Rows(own.start, own.end, own.caches),
    ]
    return own, (actions, lambda results: None)


def _stretch(
    player: Player, part: Reference, errors: Errors, alone: list[Length], differing: list[str]
) -> Check:
    """A stretch in passes of all kinds, with rollbacks and noise; everything is compared.

    Of each file `alone` a pass is compared with the decoder's, too, and the file taken out.
    """

    def compared(start: int, length: int, keep: bool, found: np.ndarray) -> np.ndarray | None:
        wanted = part.logits[start - part.start :][:length]
        errors.compare("logits", "logits", found[:length], wanted, part.scale, start)
        return found if keep else None

    actions: list[Action] = [Fill(part.past), Spoil(part.start, player.geometry.capacity)]
    twins: list[tuple[str, int]] = []
    for name, start, length, kept in schedule(player, part.start, part.end):
        tokens = _padded(player, name, part.tokens[start - part.start :][:length])
        first = start > 0 and player.lengths[name] in alone  # a lone row attends to itself anyhow
        then = functools.partial(compared, start, length, first)
        if first:
            alone.remove(player.lengths[name])
            twins.append((name, len(actions)))
            actions += _twice(name, tokens, start, then)
        else:
            actions.append(Pass(name, tokens, start, packed=name == "decoder", then=then))
        actions.append(Spoil(start + kept, start + len(tokens)))
    actions.append(Rows(part.start, part.end))

    def judge(results: list[Any]) -> None:
        differing.extend(name for name, i in twins if not _same(results[i:]))
        names = player.geometry.cache_names()
        _compare_caches([names[i] for i in player.kept], part, errors, results[-1])

    return actions, judge


def _compare_caches(
    names: list[str], part: Reference, errors: Errors, rows: list[np.ndarray]
) -> None:
    for name, found, wanted in zip(names, rows, part.caches, strict=True):
        present = name.replace("past_key_values", "present")
        errors.compare(
            "cache", present, _by_row(found), _by_row(wanted), largest(wanted), part.start
        )


def _independence(player: Player, tokens: np.ndarray, held: dict[int, bool]) -> Check:
    """Passes of each T, to have the bits that one pass over all rows has."""
    lengths = lengths_to_compare(player)
    num_rows = max(lengths) + 12 if player.in_parts else 2 * max(lengths)
    tokens = np.resize(tokens, min(num_rows, player.geometry.context_length))
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
    """A fixed-shape file that found no room in a stretch, beside the file for any length."""
    assert length.length is not None
    size = length.length
    start = max(0, min(8, len(part.tokens) - size))  # after a few rows, if there is room
    given = part.tokens[start:][:size]
    tokens = np.pad(given, (0, size - len(given)))
    past = Fill(lambda i: part.caches[i][:, :start])

    def judge(results: list[Any]) -> None:
        if not _same(results[2:]):
            differing.append(length.name)

    return [past, Spoil(start, start + size), *_twice(length.name, tokens, start)], judge


def _twice(
    name: str,
    tokens: np.ndarray,
    start: int,
    then: Callable[[np.ndarray], np.ndarray | None] | None = None,
) -> list[Action]:
    """A pass of the file for any length, and after it the same one of a fixed-shape file."""
    rows, stale = Rows(start, start + len(tokens)), Spoil(start, start + len(tokens))
    return [Pass("decoder", tokens, start), rows, stale, Pass(name, tokens, start, then=then), rows]


def _same(results: list[Any]) -> bool:
    """Whether both passes of `_twice` gave the same bits; a file may have no logits."""
    wanted, wanted_rows, _, logits, rows = results[:5]
    same = all(map(np.array_equal, rows, wanted_rows))
    return same and (logits is None or np.array_equal(logits, wanted))


def _padded(player: Player, name: str, tokens: np.ndarray) -> np.ndarray:
    return np.pad(tokens, (0, (player.lengths[name].length or len(tokens)) - len(tokens)))


def _by_row(cache: np.ndarray) -> np.ndarray:
    return cache.transpose(1, 0, 2)
