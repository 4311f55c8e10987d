"""Checks of passes with all graph files along a segment of the context.

T tokens per pass, V vocabulary entries, n positions; H heads of D in the caches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from specedge.bundle.graph_variants import attention_ops
from specedge.bundle.manifest import PREFILL_LENGTH, chunk_length

from ..graph.graphs import GraphFile
from ..progress import Advance
from .reference import Reference
from .row_errors import ErrorCheck
from .runner import Action, FillCaches, FillNoise, PassAction, ReadRows, RepeatRows, Runner

# Pass lengths that are tested for invariance. Each is at most twice the previous one, including
# PREFILL_LENGTH and `chunk_length`, so that lengths in between count as tested.
INDEPENDENT = (1, 2, 3, 5, 9, 18, 36, 128)
SPAN = 128  # rows that passes of each length cover
LONGEST_DRAFT = 18  # pass length up to which all residues of the total are tested
NUM_RESIDUES = 8
TURNS = ("step", "verify", "catchup", "decoder", "prefill", "step", "verify")
LARGE_TURNS = TURNS[:5]
ENDS = ("verify", "catchup", "step", "decoder")
LARGE_ENDS = ENDS[:1]
Check = tuple[list[Action], Callable[[list[Any]], None]]


def schedule(runner: Runner, start: int, end: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield graph, first position, number of tokens and of kept tokens of passes over a segment.

    Graphs alternate; after a verify pass half of its tokens are rolled back. At the end of the
    context passes are padded, as in a host that has only fixed-shape graphs.
    """
    at = start
    turns, ends = (LARGE_TURNS, LARGE_ENDS) if runner.in_parts else (TURNS, ENDS)
    while at < end:
        for name in turns:
            length = runner.files[name].length or 7
            if at + length + (attention_ops(runner.ops) == "gqa") > runner.geometry.capacity:
                continue
            length = min(length, end - at)
            kept = length // 2 if name == "verify" else length
            if length > 0:
                yield name, at, length, kept
            at += kept
    for name in ends if end == runner.geometry.context_length else ():
        length = min(runner.files[name].length or 3, 2)
        if not runner.in_parts:
            yield name, end - length, length, length
        yield name, end - 1, 1, 1


def compared_lengths(runner: Runner) -> list[int]:
    """Return the pass lengths to test for invariance, including those of graphs and prefill."""
    used = {x.length for x in runner.files.values() if x.length is not None}
    used.add(chunk_length(runner.geometry.capacity))
    longest = min(max(used), runner.geometry.context_length)
    return sorted(t for t in {*INDEPENDENT, *used} if t <= longest)


def segment_check(
    runner: Runner, part: Reference, error_check: ErrorCheck, in_two_passes: bool = False
) -> Check:
    """Compare passes over a segment with the reference, with rollbacks and noise.

    Passes of the decoder are repeated with half of their logits. `in_two_passes` checks two passes
    of the decoder only.
    """
    actions: list[Action] = [
        FillCaches(part.history),
        FillNoise(part.start, runner.geometry.capacity),
    ]
    passes = _two_passes(part) if in_two_passes else schedule(runner, part.start, part.end)
    for name, start, length, kept in passes:
        tokens = part.tokens[start - part.start :][:length]
        tokens = np.pad(tokens, (0, (runner.files[name].length or length) - length))
        is_decoder = name == "decoder" and not in_two_passes
        for row in (0, length // 2) if is_decoder else (0,):
            after = functools.partial(_compare_logits, part, error_check, start + row, length - row)
            actions.append(PassAction(name, tokens, start, row, packed=is_decoder, then=after))
        actions.append(FillNoise(start + kept, start + len(tokens)))
    actions.append(ReadRows(part.start, part.end))

    def decide(results: list[Any]) -> None:
        _compare_caches(runner.geometry.cache_names(), part, error_check, results[-1])

    return actions, decide


def _two_passes(part: Reference) -> Iterator[tuple[str, int, int, int]]:
    """Yield two passes of the decoder over a segment, as `schedule` does."""
    middle = part.start + max(1, 2 * len(part.tokens) // 3)
    for start, end in ((part.start, middle), (middle, part.end)):
        if start < end:
            yield "decoder", start, end - start, end - start


def _compare_logits(
    part: Reference, error_check: ErrorCheck, start: int, length: int, actual: np.ndarray
) -> None:
    actual, rows = actual[:length], slice(start - part.start, start - part.start + length)
    largest = float(np.abs(part.logits).max())
    expected, float32 = part.logits[rows], part.logits_float32[rows]
    error_check.compare("logits", "logits", actual, expected, float32, start, largest)


def _compare_caches(
    names: list[str], part: Reference, error_check: ErrorCheck, rows: list[np.ndarray]
) -> None:
    caches = zip(names, rows, part.caches, part.caches_float32, strict=True)
    for name, actual, expected, float32 in caches:
        present = name.replace("past_key_values", "present")
        error_check.compare("cache", present, actual, expected, float32, part.start)


def invariance_check(runner: Runner, tokens: np.ndarray, invariance: dict[int, bool]) -> Check:
    """Check that passes of each T are bitwise equal to one pass over all rows.

    Kernels may also depend on the total, the number of cache rows after a pass: flash attention of
    GroupQueryAttention does on Arm (ONNX Runtime 1.30 to 1.32). Short passes therefore end at
    totals of all residues modulo 8, at the beginning and at the end of the context.
    """
    lengths, context = compared_lengths(runner), runner.geometry.context_length
    size = NUM_RESIDUES * LONGEST_DRAFT
    num_rows = max(lengths) + (12 if runner.in_parts else PREFILL_LENGTH)
    num_rows = min(max(num_rows, size), context)
    actions, decide = _window_check(runner, np.resize(tokens, num_rows), 0, lengths, invariance)
    if (late := context - size) < num_rows:
        return actions, decide
    short = [length for length in lengths if length <= LONGEST_DRAFT]
    later, decide_later = _window_check(runner, np.resize(tokens, size), late, short, invariance)

    def decide_both(results: list[Any]) -> None:
        decide(results[: len(actions)])
        decide_later(results[len(actions) + 1 :])

    return [*actions, RepeatRows(num_rows, late), *later], decide_both


def _window_check(
    runner: Runner,
    tokens: np.ndarray,
    past: int,
    lengths: list[int],
    invariance: dict[int, bool],
) -> Check:
    """Compare passes of some lengths with one pass over all tokens after `past` rows.

    The LM head does not depend on the total, and takes most of the time in models with large
    vocabularies. So the first pass of each length compares up to LONGEST_DRAFT rows of logits, and
    the others compare caches, which show the attention of all layers but the last.
    """
    end = past + len(tokens)
    starts_of = {length: _starts(length, len(tokens), runner.in_parts) for length in lengths}
    every_pass = len(runner.geometry.layers) == 1 or not runner.in_parts
    first_rows = {
        (length, start): start + max(0, length - LONGEST_DRAFT)
        for length, starts in starts_of.items()
        for start in (starts if every_pass else starts[:1])
    }
    wide_from = min(first_rows.values())
    wide: list[np.ndarray] = []
    actions: list[Action] = [
        FillNoise(past, end),  # later rows have noise from the segments
        PassAction("decoder", tokens, past, wide_from, packed=True, then=wide.append),
        ReadRows(past, end),
    ]

    def same_logits(row: int | None, actual: np.ndarray) -> bool:
        if row is None:
            return True
        return np.array_equal(actual, wide[0][row - wide_from :][: len(actual)])

    for length, starts in starts_of.items():
        actions.append(FillNoise(past + starts[0], end))
        for start in starts:
            part, row = tokens[start:][:length], first_rows.get((length, start))
            logits_from = length if row is None else row - start
            after = functools.partial(same_logits, row)
            action = PassAction("decoder", part, past + start, logits_from, True, after)
            actions.append(action)
        actions.append(ReadRows(past + starts[0], end))

    def decide(results: list[Any]) -> None:
        caches, rest = results[2], iter(results[3:])
        for length, starts in starts_of.items():
            _, *same, rows = itertools.islice(rest, len(starts) + 2)
            expected = [cache[:, starts[0] :] for cache in caches]
            is_equal = all(same) and all(map(np.array_equal, rows, expected))
            invariance[length] = is_equal and invariance.get(length, True)

    return actions, decide


def _starts(length: int, num_rows: int, in_parts: bool) -> range:
    """Return the first rows of passes of a length; the last pass ends at the last row.

    Short passes of an even length overlap by a row, so that totals have all residues. Of other
    lengths, large models have one pass.
    """
    is_short = 1 < length <= LONGEST_DRAFT
    step = length - 1 if is_short and length % 2 == 0 else length
    count = 0 if in_parts else SPAN // step
    if is_short:
        count = max(count, NUM_RESIDUES - 1)
    last = num_rows - length
    return range(max(last % step, last - count * step), last + 1, step)


def check_standalone(
    runner: Runner,
    tokens: np.ndarray,
    advance: Advance = lambda amount: None,
    is_final: bool = True,
) -> tuple[tuple[int, ...], list[str]]:
    """Return a graph's invariant pass lengths, and the files that differ from its decoder.

    A large model runs one layer of each form. Files of graphs that are quantized afterwards, which
    are not final, are not compared.
    """
    tokens = tokens[: runner.geometry.context_length]
    invariance: dict[int, bool] = {}
    differing: list[str] = []
    all_checks = [invariance_check(runner, tokens, invariance)]
    all_checks += [
        _fixed_shape_check(file, tokens, differing)
        for file in runner.files.values()
        if file.length is not None and is_final
    ]
    run_checks(functools.partial(runner.run, advance=advance, only_representative=True), all_checks)
    return tuple(length for length, same in invariance.items() if same), differing


def run_checks(run: Callable[[list[Action]], list[Any]], checks: Sequence[Check]) -> None:
    """Run all actions in a single run, as each loads all subgraphs of a large model."""
    results = iter(run([action for actions, _ in checks for action in actions]))
    for actions, decide in checks:
        decide(list(itertools.islice(results, len(actions))))


def _fixed_shape_check(file: GraphFile, tokens: np.ndarray, differing: list[str]) -> Check:
    """Compare a pass of a fixed-shape file with the decoder, after a few rows if there is room."""
    assert file.length is not None
    size = file.length
    start = max(0, min(8, len(tokens) - size))
    padded = np.pad(tokens[start:][:size], (0, max(0, size - len(tokens) + start)))
    rows, stale = ReadRows(start, start + size), FillNoise(start, start + size)
    first = PassAction("decoder", tokens[:start], 0, packed=True) if start else stale

    def decide(results: list[Any]) -> None:
        logits, expected_rows, _, actual, actual_rows = results[2:]
        same = all(map(np.array_equal, actual_rows, expected_rows))
        if not same or not (actual is None or np.array_equal(actual, logits)):  # or without logits
            differing.append(file.name)

    passes = [PassAction(name, padded, start, packed=True) for name in ("decoder", file.name)]
    return [first, stale, passes[0], rows, stale, passes[1], rows], decide
