"""Passes of all kinds along a stretch of the context, and what each has to give.

T tokens a pass, V vocabulary entries, n positions; H heads of D in the caches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from specedge.bundle.manifest import PREFILL_LENGTH, chunk_length
from specedge.bundle.op_sets import attention_ops

from ..graph.graphs import Length
from .judgement import Judge
from .reference import Reference
from .runner import Action, Fill, FillNoise, Pass, Rows, Runner

# Each is at most twice the one before, PREFILL_LENGTH and `chunk_length` among them: then all
# between count as tried.
INDEPENDENT = (1, 2, 3, 5, 9, 18, 36, 128)
SPAN = 128  # rows that passes of each T go over
TURNS = ("step", "verify", "catchup", "decoder", "prefill", "step", "verify")
LARGE_TURNS = TURNS[:5]
ENDS = ("verify", "catchup", "step", "decoder")
LARGE_ENDS = ENDS[:1]
Check = tuple[list[Action], Callable[[list[Any]], None]]


def schedule(runner: Runner, start: int, end: int) -> Iterator[tuple[str, int, int, int]]:
    """Graph, first position, real tokens and kept tokens of each pass from start to end.

    Every kind takes its turn; after a verify pass half of it is rolled back. At the context's end
    the passes have fewer real tokens than rows, as in a host that has only fixed shapes.
    """
    at = start
    turns, ends = (LARGE_TURNS, LARGE_ENDS) if runner.in_parts else (TURNS, ENDS)
    while at < end:
        for name in turns:
            length = runner.lengths[name].length or 7
            if at + length + (attention_ops(runner.ops) == "gqa") > runner.geometry.capacity:
                continue
            length = min(length, end - at)
            kept = length // 2 if name == "verify" else length
            if length > 0:
                yield name, at, length, kept
            at += kept
    for name in ends if end == runner.geometry.context_length else ():
        length = min(runner.lengths[name].length or 3, 2)
        if not runner.in_parts:
            yield name, end - length, length, length
        yield name, end - 1, 1, 1


def lengths_to_compare(runner: Runner) -> list[int]:
    """The T whose rows should have the same bits: a few, those of files, and a prompt's passes."""
    used = {x.length for x in runner.lengths.values() if x.length is not None}
    used.add(chunk_length(runner.geometry.capacity))
    most = min(max(used), runner.geometry.context_length)
    return sorted(t for t in {*INDEPENDENT, *used} if t <= most)


def through(runner: Runner, part: Reference, judge: Judge) -> Check:
    """A stretch in one pass through all layers, to be what PyTorch computes."""

    def decide(results: list[Any]) -> None:
        *_, logits, rows = results
        _compare_logits(part, judge, logits, part.start)
        _compare_caches(runner.geometry.cache_names(), part, judge, rows)

    actions: list[Action] = [
        Fill(part.history),
        FillNoise(part.start, runner.geometry.capacity),
        Pass("decoder", part.tokens, part.start),
        Rows(part.start, part.end),
    ]
    return actions, decide


def own(runner: Runner, part: Reference) -> tuple[Reference, Check]:
    """What the kept layers compute for a stretch in one pass; it is known when that has run."""
    own = replace(
        part,
        history=lambda i: part.history(runner.kept[i]),
        caches=[],
        caches_float32=[part.caches_float32[i] for i in runner.kept],
    )
    actions: list[Action] = [
        Fill(own.history),
        FillNoise(own.start, runner.geometry.capacity),
        Pass("decoder", own.tokens, own.start, then=functools.partial(setattr, own, "logits")),
        Rows(own.start, own.end, own.caches),
    ]
    return own, (actions, lambda results: None)


def stretch(
    runner: Runner, part: Reference, judge: Judge, alone: list[Length], differing: list[str]
) -> Check:
    """A stretch in passes of all kinds, with rollbacks and noise; everything is compared.

    The decoder's are made again for half of their rows. Of each file `alone` a pass is compared
    with the decoder's, too, and the file taken out.
    """

    def compared(start: int, length: int, keep: bool, found: np.ndarray) -> np.ndarray | None:
        _compare_logits(part, judge, found[:length], start)
        return found if keep else None

    actions: list[Action] = [Fill(part.history), FillNoise(part.start, runner.geometry.capacity)]
    twins: list[tuple[str, int]] = []
    for name, start, length, kept in schedule(runner, part.start, part.end):
        tokens = part.tokens[start - part.start :][:length]
        tokens = np.pad(tokens, (0, (runner.lengths[name].length or length) - length))
        first = start > 0 and runner.lengths[name] in alone  # a lone row attends to itself anyhow
        then = functools.partial(compared, start, length, first)
        if first:
            alone.remove(runner.lengths[name])
            twins.append((name, len(actions)))
            actions += _twice(name, tokens, start, then)
        else:
            actions.append(Pass(name, tokens, start, packed=name == "decoder", then=then))
        if name == "decoder":
            half = length // 2
            then = functools.partial(compared, start + half, length - half, False)
            actions.append(Pass(name, tokens, start, half, packed=True, then=then))
        actions.append(FillNoise(start + kept, start + len(tokens)))
    actions.append(Rows(part.start, part.end))

    def decide(results: list[Any]) -> None:
        differing.extend(name for name, i in twins if not _same(results[i:]))
        names = runner.geometry.cache_names()
        _compare_caches([names[i] for i in runner.kept], part, judge, results[-1])

    return actions, decide


def _compare_logits(part: Reference, judge: Judge, found: np.ndarray, start: int) -> None:
    rows = slice(start - part.start, start - part.start + len(found))
    largest = float(np.abs(part.logits).max())
    wanted, float32 = part.logits[rows], part.logits_float32[rows]
    judge.compare("logits", "logits", found, wanted, float32, start, largest)


def _compare_caches(
    names: list[str], part: Reference, judge: Judge, rows: list[np.ndarray]
) -> None:
    caches = zip(names, rows, part.caches, part.caches_float32, strict=True)
    for name, found, wanted, float32 in caches:
        present = name.replace("past_key_values", "present")
        judge.compare("cache", present, found, wanted, float32, part.start)


def independence(runner: Runner, tokens: np.ndarray, held: dict[int, bool]) -> Check:
    """Passes of each T, to have the bits that one pass over all rows has."""
    lengths = lengths_to_compare(runner)
    num_rows = max(lengths) + (12 if runner.in_parts else PREFILL_LENGTH)
    tokens = np.resize(tokens, min(num_rows, runner.geometry.context_length))
    wide: list[np.ndarray] = []
    actions: list[Action] = [
        FillNoise(0, len(tokens)),  # behind them there is noise since the stretches
        Pass("decoder", tokens, 0, packed=True, then=wide.append),
        Rows(0, len(tokens)),
    ]

    def same_logits(start: int, found: np.ndarray) -> bool:
        return np.array_equal(found, wide[0][start:][: len(found)])

    places: list[range] = []
    for length in lengths:
        last = len(tokens) - length
        # Of a large model one pass of each length, after the rows that the wide one left.
        first = last if runner.in_parts else max(last % length, last - SPAN // length * length)
        starts = range(first, last + 1, length)
        actions.append(FillNoise(starts[0], len(tokens)))
        for start in starts:
            part, then = tokens[start:][:length], functools.partial(same_logits, start)
            actions.append(Pass("decoder", part, start, packed=True, then=then))
        actions.append(Rows(starts[0], len(tokens)))
        places.append(starts)

    def decide(results: list[Any]) -> None:
        caches, rest = results[2], iter(results[3:])
        for length, starts in zip(lengths, places, strict=True):
            _, *same, rows = itertools.islice(rest, len(starts) + 2)
            wanted = [cache[:, starts[0] :] for cache in caches]
            held[length] = all(same) and all(map(np.array_equal, rows, wanted))

    return actions, decide


def alone(runner: Runner, tokens: np.ndarray) -> tuple[tuple[int, ...], list[str]]:
    """Ask a graph of itself alone: the T whose rows keep their bits, and the files with others."""
    tokens = tokens[: runner.geometry.context_length]
    held: dict[int, bool] = {}
    differing: list[str] = []
    ways = [independence(runner, tokens, held)]
    ways += [
        file(length, tokens, lambda start: Pass("decoder", tokens[:start], 0), differing)
        for length in runner.lengths.values()
        if length.length is not None
    ]
    results = iter(runner.run([action for actions, _ in ways for action in actions]))
    for actions, decide in ways:
        decide(list(itertools.islice(results, len(actions))))
    return tuple(length for length, same in held.items() if same), differing


def file(
    length: Length, tokens: np.ndarray, begin: Callable[[int], Action], differing: list[str]
) -> Check:
    """A fixed-shape file that found no room in a stretch, beside the file for any length.

    `begin` fills the rows before the pass, of which there are a few if there is room.
    """
    assert length.length is not None
    size = length.length
    start = max(0, min(8, len(tokens) - size))
    given = tokens[start:][:size]
    tokens = np.pad(given, (0, size - len(given)))
    stale = FillNoise(start, start + size)

    def decide(results: list[Any]) -> None:
        if not _same(results[2:]):
            differing.append(length.name)

    first = begin(start) if start else stale
    return [first, stale, *_twice(length.name, tokens, start)], decide


def _twice(
    name: str,
    tokens: np.ndarray,
    start: int,
    then: Callable[[np.ndarray], np.ndarray | None] | None = None,
) -> list[Action]:
    """A pass of the file for any length, and after it the same one of a fixed-shape file."""
    rows, stale = Rows(start, start + len(tokens)), FillNoise(start, start + len(tokens))
    return [Pass("decoder", tokens, start), rows, stale, Pass(name, tokens, start, then=then), rows]


def _same(results: list[Any]) -> bool:
    """Whether both passes of `_twice` gave the same bits; a file may have no logits."""
    wanted, wanted_rows, _, logits, rows = results[:5]
    same = all(map(np.array_equal, rows, wanted_rows))
    return same and (logits is None or np.array_equal(logits, wanted))
