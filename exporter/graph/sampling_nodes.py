"""Distributions over tokens, sampling, and the accept rule, as ONNX nodes.

The arithmetic is that of `runtime/sampling` and of `runtime/decoding/verification.py`, as specified
in docs/bundle.md: float32, with double sums where they decide a sample. R rows, V vocabulary
entries, K draft tokens; C columns: V above temperature 0, and 1 at temperature 0, where nothing is
sampled. There is no If node: nodes of a disabled filter process the first column (`_columns_if`),
as TopK and sums of empty tensors fail in ONNX Runtime before 1.31. Only candidates for the
nucleus's last token are sorted, not whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from specedge.bundle.manifest import ModelEntry

from .nodes import DOUBLE, END, FLOAT, INT, GraphBuilder

_BUCKETS = 4096
_UNDERFLOW = 104.0  # exp(-104) is 0 in float32
_LIMITS = np.finfo(np.float32)
_INFINITY = np.array(np.inf, np.float32)


@dataclass(frozen=True)
class SamplingInputs:
    """Sampling options, [1] each, and the tokens in the history, [1, V]."""

    temperature: ir.Value
    top_k: ir.Value
    top_p: ir.Value
    min_p: ir.Value
    penalty: ir.Value
    seen: ir.Value


@dataclass(frozen=True)
class TokenWeights:
    """Most probable token of each row, [R, 1], and unnormalized probabilities, [R, C]."""

    argmax: ir.Value
    weights: ir.Value


def sampling_inputs(nodes: GraphBuilder, vocab_size: int) -> SamplingInputs:
    """Add the sampling inputs to a graph."""
    return SamplingInputs(
        nodes.input("temperature", FLOAT, [1]),
        nodes.input("top_k", INT, [1]),
        nodes.input("top_p", DOUBLE, [1]),
        nodes.input("min_p", FLOAT, [1]),
        nodes.input("repetition_penalty", FLOAT, [1]),
        nodes.input("seen", ir.DataType.BOOL, [1, vocab_size]),
    )


def token_logits(nodes: GraphBuilder, logits: ir.Value, model: ModelEntry, rows: int) -> ir.Value:
    """Slice off padding columns. [1, R, padded] -> [R, V]"""
    logits = nodes("Reshape", logits, [rows, model.padded_vocab_size])
    if model.num_columns == model.padded_vocab_size:
        return logits
    return nodes("Slice", logits, [0], [model.num_columns], [1])


def _columns_if(nodes: GraphBuilder, rows: ir.Value, condition: ir.Value) -> ir.Value:
    """Slice all columns if a condition [1] is true, else the first. -> [R, V or 1]"""
    return nodes("Slice", rows, [0], _end_if(nodes, condition), [1])


def _end_if(nodes: GraphBuilder, condition: ir.Value) -> ir.Value:
    return nodes("Where", condition, [END], [1])


def _is_sampled(nodes: GraphBuilder, settings: SamplingInputs) -> ir.Value:
    return nodes("Greater", settings.temperature, 0.0)


def select_columns(nodes: GraphBuilder, weights: ir.Value, settings: SamplingInputs) -> ir.Value:
    """Slice the columns that exist at this temperature. [R, V] -> [R, C]"""
    return _columns_if(nodes, weights, _is_sampled(nodes, settings))


def restore_columns(
    nodes: GraphBuilder, weights: ir.Value, vocab_size: int, settings: SamplingInputs
) -> ir.Value:
    """Pad to all columns; values are meaningless at temperature 0. [R, C] -> [R, V]"""
    missing = nodes("Where", _is_sampled(nodes, settings), [0], [vocab_size - 1])
    return nodes("Pad", weights, nodes("Concat", [0, 0, 0], missing, axis=0))


def mark_seen(nodes: GraphBuilder, seen: ir.Value, token: ir.Value) -> ir.Value:
    """Add a token to the history. [1, V], [1, 1] -> [1, V]"""
    return nodes("ScatterElements", seen, token, np.ones((1, 1), bool), axis=1)


def seen_before_each(nodes: GraphBuilder, tokens: ir.Value, settings: SamplingInputs) -> ir.Value:
    """Return the history before each of these tokens, and after the last.

    Only the first column if no penalty applies. [K, 1] -> [K + 1, V or 1]
    """
    is_on = _has_penalty(nodes, settings)
    before = nodes("Cast", _columns_if(nodes, settings.seen, is_on), to=FLOAT)
    indices = nodes("Where", is_on, tokens, 0)
    zeros = nodes("Mul", nodes("Cast", indices, to=FLOAT), 0.0)
    rows = nodes("Add", nodes("Mul", before, 0.0), zeros)
    marked = nodes("ScatterElements", rows, indices, nodes("Add", zeros, 1.0), axis=1)
    seen = nodes("CumSum", nodes("Concat", before, marked, axis=0), np.array(0))
    return nodes("Greater", seen, 0.0)


def token_weights(
    nodes: GraphBuilder,
    logits: ir.Value,
    seen: ir.Value,
    vocab_size: int,
    settings: SamplingInputs,
    is_one: bool = False,
) -> TokenWeights:
    """Return the greedy choice and the weights to sample from. [R, V], [R, V or 1]

    `is_one` is True if R is 1, which requires fewer nodes.
    """
    logits = _penalize(nodes, logits, seen, settings)
    argmax = nodes("ArgMax", logits, axis=1)
    return TokenWeights(argmax, _weights(nodes, logits, vocab_size, settings, is_one))


def _penalize(
    nodes: GraphBuilder, logits: ir.Value, seen: ir.Value, settings: SamplingInputs
) -> ir.Value:
    """Apply the penalty where it is not 1."""
    is_on = _has_penalty(nodes, settings)
    some, seen = (_columns_if(nodes, x, is_on) for x in (logits, seen))
    changed = apply_penalty(nodes, some, seen, settings.penalty)
    rest = nodes("Slice", logits, _end_if(nodes, is_on), [END], [1])
    return nodes("Concat", changed, rest, axis=1)


def apply_penalty(
    nodes: GraphBuilder, logits: ir.Value, seen: ir.Value, penalty: ir.Value
) -> ir.Value:
    """Apply the repetition penalty to the logits of seen tokens. [R, C], [R, C], [1]"""
    penalty = nodes("Max", penalty, float(_LIMITS.tiny))
    smaller, larger = nodes("Div", logits, penalty), nodes("Mul", logits, penalty)
    changed = nodes("Where", nodes("Less", logits, 0.0), larger, smaller)
    return nodes("Where", seen, nodes("Min", changed, float(_LIMITS.max)), logits)


def _has_penalty(nodes: GraphBuilder, settings: SamplingInputs) -> ir.Value:
    return nodes("Not", nodes("Equal", settings.penalty, 1.0))


def _weights(
    nodes: GraphBuilder, logits: ir.Value, vocab_size: int, settings: SamplingInputs, is_one: bool
) -> ir.Value:
    """Return weights, 1 for the most probable token. [R, V] -> [R, C]"""
    is_drawn = _is_sampled(nodes, settings)
    logits = _columns_if(nodes, logits, is_drawn)
    top_k, top_p, min_p = settings.top_k, settings.top_p, settings.min_p
    is_few = nodes("And", nodes("Greater", top_k, 0), nodes("Less", top_k, vocab_size))
    is_few = nodes("And", is_few, is_drawn)
    some = _columns_if(nodes, logits, is_few)
    best = nodes("TopK", some, nodes("Where", is_few, top_k, 1), sorted=0, num_outputs=2)
    is_less = nodes("Less", some, nodes("ReduceMin", best, [1]))
    largest = nodes("Where", is_less, _INFINITY, nodes("ReduceMax", logits, [1]))
    heights = apply_temperature(nodes, logits, largest, settings.temperature)
    is_cut = nodes("And", nodes("Less", top_p, np.ones(1)), is_drawn)
    drawn = nodes("Mul", nodes("Exp", heights), _nucleus(nodes, heights, top_p, is_cut, is_one))
    return apply_min_p(nodes, drawn, min_p)


def apply_temperature(
    nodes: GraphBuilder, logits: ir.Value, largest: ir.Value, temperature: ir.Value
) -> ir.Value:
    """Return logarithms of weights, 0 for the most probable token."""
    divisor = nodes("Max", temperature, float(_LIMITS.tiny))
    divisor = nodes("Min", divisor, float(_LIMITS.max))
    return nodes("Div", nodes("Sub", logits, largest), divisor)


def apply_min_p(nodes: GraphBuilder, weights: ir.Value, min_p: ir.Value) -> ir.Value:
    """Set weights below `min_p` to 0; the most probable token has weight 1."""
    return nodes("Where", nodes("Less", weights, min_p), 0.0, weights)


def _nucleus(
    nodes: GraphBuilder, heights: ir.Value, share: ir.Value, is_on: ir.Value, is_one: bool
) -> ir.Value:
    """Return the mask of the nucleus: the fewest tokens with this share, lower ids on ties.

    The mask is 1 or 0; a single column of 1 if top-p is off. [R, C] -> [R, C or 1]

    Weights are summed in buckets by their logarithms `heights`. Only in the bucket where the sums
    reach the share are tokens sorted, which are few unless the row is flat.
    """
    lowest = nodes("Where", is_on, -_UNDERFLOW, 0.0)
    heights = nodes("Max", _columns_if(nodes, heights, is_on), lowest)
    drawn = nodes("Exp", heights)
    wide = nodes("Cast", drawn, to=DOUBLE)
    indices = nodes("Cast", nodes("Mul", heights, (1 - _BUCKETS) / _UNDERFLOW), to=INT)
    empty = _columns_if(nodes, nodes.constant(np.zeros((1, _BUCKETS))), is_on)
    if not is_one:
        empty = nodes("Mul", nodes("Slice", wide, [0], [1], [1]), empty)
    sums = nodes("ScatterElements", empty, indices, wide, axis=1, reduction="add")
    sums = nodes("CumSum", sums, np.array(1))
    goal = nodes("Mul", nodes("Slice", sums, [-1], [END], [1]), share)
    is_there = nodes("GreaterOrEqual", sums, goal)
    at = nodes("ArgMax", nodes("Cast", is_there, to=FLOAT), axis=1)
    before = nodes("ReduceMax", nodes("Where", is_there, np.zeros(1), sums), [1])
    is_candidate = nodes("Cast", nodes("Equal", indices, at), to=FLOAT)
    max_count = nodes("ReduceSum", is_candidate, [1], keepdims=0)
    if not is_one:
        max_count = nodes("ReduceMax", max_count, [0])
    candidates, max_count = nodes("Mul", drawn, is_candidate), nodes("Cast", max_count, to=INT)
    values = nodes("TopK", candidates, max_count, num_outputs=2)
    aheads = nodes("CumSum", nodes("Cast", values, to=DOUBLE), np.array(1), exclusive=1)
    is_wanted = nodes("Less", nodes("Add", aheads, before), goal)
    if not is_one:  # rows may have fewer than the maximum number of candidates
        is_wanted = nodes("And", is_wanted, nodes("Greater", values, 0.0))
    kept, last = (nodes("Cast", x, to=FLOAT) for x in (nodes("Less", indices, at), is_wanted))
    columns = nodes.others(values)[0]
    return nodes("ScatterElements", kept, columns, last, axis=1, reduction="max")


def _row_sums(nodes: GraphBuilder, rows: ir.Value) -> ir.Value:
    """Sum each row in double. [R, C] -> [R, 1]"""
    return nodes("ReduceSum", nodes("Cast", rows, to=DOUBLE), [1])


def choose_token(
    nodes: GraphBuilder, row: TokenWeights, uniform: ir.Value, settings: SamplingInputs
) -> ir.Value:
    """Return the most probable token at temperature 0, else sample. 1 row, [1] -> [1, 1]"""
    drawn = _sample(nodes, row.weights, uniform)
    return nodes("Where", _is_sampled(nodes, settings), drawn, row.argmax)


def _sample(nodes: GraphBuilder, weights: ir.Value, uniform: ir.Value) -> ir.Value:
    """Sample by inversion: the first token whose cumulative weight exceeds a share of the total.

    [1, C], [1] -> [1, 1]
    """
    sums = nodes("CumSum", nodes("Cast", weights, to=DOUBLE), np.array(1))
    # A uniform is below 1, so its product with the total is below the total.
    goal = nodes("Mul", nodes("Slice", sums, [-1], [END], [1]), uniform)
    return nodes("ArgMax", nodes("Cast", nodes("Greater", sums, goal), to=FLOAT), axis=1)


def accept_tokens(
    nodes: GraphBuilder,
    drafted: ir.Value,
    draft_weights: ir.Value,
    target: TokenWeights,
    limit: ir.Value,
    tests: ir.Value,
    last: ir.Value,
    settings: SamplingInputs,
) -> tuple[ir.Value, ir.Value]:
    """Return the number of accepted draft tokens [1], and the token after them [1, 1].

    Algorithm 1 of Leviathan et al. 2023, on the first `limit` [1] draft tokens; at temperature 0 a
    draft token is accepted if it is the target's most probable token.

    drafted [K, 1], draft_weights [K, C], target of K + 1 rows, uniforms `tests` [K] and `last` [1]
    """
    totals, draft_totals = _row_sums(nodes, target.weights), _row_sums(nodes, draft_weights)
    is_drawn = _is_sampled(nodes, settings)
    indices = nodes("Where", is_drawn, drafted, 0)
    judged, judged_totals, argmax = (
        nodes("Slice", x, [0], [-1], [0]) for x in (target.weights, totals, target.argmax)
    )
    t = _probability(nodes, judged, judged_totals, indices)
    d = _probability(nodes, draft_weights, draft_totals, indices)
    passed = nodes("Less", nodes("Mul", nodes("Unsqueeze", tests, [1]), d), t)
    passed = nodes("Or", passed, nodes("Not", is_drawn))
    is_argmax = nodes("Or", nodes("Equal", drafted, argmax), is_drawn)
    failed = nodes("Cast", nodes("Not", nodes("And", passed, is_argmax)), to=INT)
    accepted = nodes("ArgMax", nodes("Concat", failed, [[1]], axis=0), axis=0, keepdims=0)
    accepted = nodes("Min", accepted, limit)
    is_cut = nodes("Less", accepted, limit)
    at = nodes("Where", is_cut, accepted, 0)
    row, total, argmax = (
        nodes("Gather", x, accepted) for x in (target.weights, totals, target.argmax)
    )
    draft_row, draft_total = (nodes("Gather", x, at) for x in (draft_weights, draft_totals))
    scale = nodes("Cast", nodes("Div", total, draft_total), to=FLOAT)
    scale = nodes("Where", is_cut, scale, 0.0)
    residual = nodes("Max", nodes("Sub", row, nodes("Mul", scale, draft_row)), 0.0)
    is_left = nodes("Greater", nodes("ReduceMax", residual, [1]), 0.0)
    drawn_from = TokenWeights(argmax, nodes("Where", is_left, residual, row))
    return accepted, choose_token(nodes, drawn_from, last, settings)


def _probability(
    nodes: GraphBuilder, rows: ir.Value, totals: ir.Value, tokens: ir.Value
) -> ir.Value:
    """Return the probability of a token of each row. [K, C], [K, 1], [K, 1] -> [K, 1]"""
    weight = nodes("Cast", nodes("GatherElements", rows, tokens, axis=1), to=DOUBLE)
    return nodes("Div", weight, totals)
