"""Checks of passes with all graph files along a segment of the context.

T tokens per pass, V vocabulary entries, n positions; H heads of D in the caches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from specedge.attention_kernels import pass_boundaries
from specedge.bundle.graph_variants import attention_ops, has_single_rows
from specedge.bundle.manifest import PREFILL_LENGTH, chunk_length

from ..graph.graphs import GraphFile
from ..progress import Advance
from .reference import Reference
from .row_errors import ErrorCheck
from .runner import (
    Action,
    FillCaches,
    FillNoise,
    PassAction,
    ReadHiddenStates,
    ReadRows,
    RepeatRows,
    Runner,
)

# Pass lengths that are tested for invariance. Each is at most twice the previous one, including
# PREFILL_LENGTH and `chunk_length`, so that lengths in between count as tested.
INDEPENDENT = (1, 2, 3, 5, 9, 18, 36, 128)
SPAN = 128  # rows that passes of each length cover
LONGEST_DRAFT = 18  # pass length up to which all residues of the total are tested
NUM_RESIDUES = 8
TURNS = ("step", "verify", "catchup", "decoder", "prefill", "step", "verify")
ENDS = ("verify", "catchup", "step", "decoder")


def schedule(runner: Runner, start: int, end: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield graph, first position, number of tokens and of kept tokens of passes over a segment.

    Graphs alternate; after a verify pass half of its tokens are rolled back. At the end of the
    context passes are padded, as in a host that has only fixed-shape graphs.
    """
    at = start
    while at < end:
        for name in TURNS:
            length = runner.files[name].length or 7
            if at + length + (attention_ops(runner.ops) == "gqa") > runner.geometry.capacity:
                continue
            length = min(length, end - at)
            kept = length // 2 if name == "verify" else length
            if length > 0:
                yield name, at, length, kept
            at += kept
    for name in ENDS if end == runner.geometry.context_length else ():
        length = min(runner.files[name].length or 3, 2)
        yield name, end - length, length, length
        yield name, end - 1, 1, 1


def compared_lengths(runner: Runner) -> list[int]:
    """Return the pass lengths to test for invariance, including those of graphs and prefill.

    A single row may be bitwise equal by chance.
    """
    used = {x.length for x in runner.files.values() if x.length is not None}
    used.add(chunk_length(runner.geometry.capacity))
    longest = min(max(used), runner.geometry.context_length)
    shortest = 2 if has_single_rows(runner.ops) else 1
    return sorted(t for t in {*INDEPENDENT, *used} if shortest <= t <= longest)


def segment_actions(
    runner: Runner, part: Reference, error_check: ErrorCheck, in_two_passes: bool
) -> list[Action]:
    """Return passes over a segment that are compared with the reference, with rollbacks and noise.

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
            if layers := runner.geometry.hidden_layers:
                compare = functools.partial(
                    part.compare_hidden_states, error_check, "hidden", layers, start
                )
                actions.append(ReadHiddenStates(then=compare))
        actions.append(FillNoise(start + kept, start + len(tokens)))
    names = runner.geometry.cache_names()
    compare_cache = functools.partial(_compare_cache, names, part, error_check)
    return [*actions, ReadRows(part.start, part.end, then=compare_cache)]


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


def _compare_cache(
    names: list[str], part: Reference, error_check: ErrorCheck, name: str, actual: np.ndarray
) -> None:
    expected, float32 = (x[names.index(name)] for x in (part.caches, part.caches_float32))
    present = name.replace("past_key_values", "present")
    error_check.compare("cache", present, actual, expected, float32, part.start)


def invariance_actions(
    runner: Runner, tokens: np.ndarray, invariance: dict[int, bool]
) -> list[Action]:
    """Return passes of each T that are compared bitwise with one pass over all rows.

    Kernels may also depend on the total, the number of cache rows after a pass: flash attention of
    GroupQueryAttention does on Arm (ONNX Runtime 1.30 to 1.32). Short passes therefore end at
    totals of all residues modulo 8, at the beginning and at the end of the context.

    Args:
        runner: Runner of the graph variant.
        tokens: Tokens to repeat.
        invariance: Result by T, for all `compared_lengths`.
    """
    lengths, context = [*invariance], runner.geometry.context_length
    size = NUM_RESIDUES * LONGEST_DRAFT
    num_rows = max(lengths) + (12 if runner.in_parts else PREFILL_LENGTH)
    num_rows = min(max(num_rows, size), context)
    actions = _window_actions(runner, np.resize(tokens, num_rows), 0, lengths, invariance)
    if (late := context - size) >= num_rows:
        short = [length for length in lengths if length <= LONGEST_DRAFT]
        actions.append(RepeatRows(num_rows, late))
        actions += _window_actions(runner, np.resize(tokens, size), late, short, invariance)
    return actions


def _window_actions(
    runner: Runner,
    tokens: np.ndarray,
    past: int,
    lengths: list[int],
    invariance: dict[int, bool],
) -> list[Action]:
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
    boundaries = pass_boundaries(runner.geometry.states, runner.ops)

    def split(start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the first row and the end of the passes that the runtime takes for some rows."""
        inner = (row for boundary in boundaries if start < (row := boundary - past) < end)
        return itertools.pairwise((start, *inner, end))

    expected: dict[str, np.ndarray] = {}

    def compare(length: int, first: int, name: str, actual: np.ndarray) -> None:
        rows = expected[name][..., first:, :][..., : actual.shape[-2], :]
        invariance[length] &= np.array_equal(actual, rows)

    def keep_logits(logits: np.ndarray) -> None:
        expected["logits"] = np.concatenate([expected.get("logits", logits[:0]), logits])

    actions: list[Action] = [FillNoise(past, end)]  # later rows have noise from the segments
    for start, stop in split(0, len(tokens)):
        row = min(max(start, wide_from), stop)
        part = tokens[start:stop]
        actions.append(PassAction("decoder", part, past + start, row - start, True, keep_logits))
    actions.append(ReadRows(past, end, then=expected.__setitem__))
    for length, starts in starts_of.items():
        actions.append(FillNoise(past + starts[0], end))
        for first in starts:
            for start, stop in split(first, first + length):
                row = min(max(start, first_rows.get((length, first), stop)), stop)
                after = functools.partial(compare, length, row - wide_from, "logits")
                part = tokens[start:stop]
                actions.append(PassAction("decoder", part, past + start, row - start, True, after))
        same_rows = functools.partial(compare, length, starts[0])
        actions.append(ReadRows(past + starts[0], end, then=same_rows))
    return actions


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
    invariance = dict.fromkeys(compared_lengths(runner), True)
    is_equal = {x.name: True for x in runner.files.values() if x.length is not None and is_final}
    actions = invariance_actions(runner, tokens, invariance)
    for name in is_equal:
        actions += _fixed_shape_actions(runner.files[name], tokens, is_equal)
    runner.run(actions, advance, only_representative=True)
    return (
        tuple(length for length, same in invariance.items() if same),
        [name for name, same in is_equal.items() if not same],
    )


def _fixed_shape_actions(
    file: GraphFile, tokens: np.ndarray, is_equal: dict[str, bool]
) -> list[Action]:
    """Compare a pass of a fixed-shape file with the decoder, after a few rows if there is room."""
    assert file.length is not None
    size = file.length
    start = max(0, min(8, len(tokens) - size))
    padded = np.pad(tokens[start:][:size], (0, max(0, size - len(tokens) + start)))
    expected: dict[str, np.ndarray] = {}

    def compare(name: str, actual: np.ndarray) -> None:
        is_equal[file.name] &= np.array_equal(actual, expected[name])

    actions: list[Action] = [PassAction("decoder", tokens[:start], 0, packed=True)] if start else []
    for name, keep in (("decoder", expected.__setitem__), (file.name, compare)):
        after = functools.partial(keep, "logits")
        actions += [
            FillNoise(start, start + size),
            PassAction(name, padded, start, packed=True, then=after),
            ReadRows(start, start + size, then=keep),
        ]
    return actions
