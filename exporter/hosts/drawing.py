"""Rows of logits as distributions, draws from them, and the accept rule, as ONNX nodes.

The arithmetic of `runtime/sampling` and `runtime/loop/verify.py`, which docs/bundle.md states: in
float32, but sums that decide a draw in double. Letters: R rows, V vocabulary entries, K draft
tokens. There is no If: a setting that is off changes nothing of the rows, or is asked of none or
one of them (`_part`). Rows are not sorted whole, but where most of one ties.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .nodes import DOUBLE, END, FLOAT, INT, LEAST, Nodes

_BUCKETS = 4096
_DEEPEST = 104.0  # exp of less than minus this is 0 in float32
_LIMITS = np.finfo(np.float32)


@dataclass(frozen=True)
class Settings:
    """What a distribution depends on beside logits, [1] each, and the tokens seen [1, V]."""

    temperature: ir.Value
    top_k: ir.Value
    top_p: ir.Value
    min_p: ir.Value
    penalty: ir.Value
    seen: ir.Value


def settings(nodes: Nodes, vocab_size: int) -> Settings:
    """Inputs for them."""
    return Settings(
        nodes.input("temperature", FLOAT, [1]),
        nodes.input("top_k", INT, [1]),
        nodes.input("top_p", DOUBLE, [1]),
        nodes.input("min_p", FLOAT, [1]),
        nodes.input("repetition_penalty", FLOAT, [1]),
        nodes.input("seen", ir.DataType.BOOL, [1, vocab_size]),
    )


def penalised(nodes: Nodes, logits: ir.Value, seen: ir.Value, settings: Settings) -> ir.Value:
    """Logits with those of seen tokens divided by the repetition penalty. [R, V], [R, V]"""
    is_on = _is_penalised(nodes, settings)
    (changed, rest), (seen, _) = (_part(nodes, x, is_on) for x in (logits, seen))
    penalty = nodes("Max", settings.penalty, float(_LIMITS.tiny))
    smaller, larger = nodes("Div", changed, penalty), nodes("Mul", changed, penalty)
    penalised = nodes("Where", nodes("Less", changed, 0.0), larger, smaller)
    penalised = nodes("Min", penalised, float(_LIMITS.max))
    return nodes("Concat", nodes("Where", seen, penalised, changed), rest, axis=0)


def _is_penalised(nodes: Nodes, settings: Settings) -> ir.Value:
    return nodes("Not", nodes("Equal", settings.penalty, 1.0))


def also_seen(nodes: Nodes, seen: ir.Value, token: ir.Value) -> ir.Value:
    """What is seen after one more token. [1, V], [1] -> [1, V]"""
    place = nodes("Reshape", token, [1, 1])
    return nodes("ScatterElements", seen, place, np.ones((1, 1), bool), axis=1)


def _seen_before(nodes: Nodes, settings: Settings, tokens: ir.Value) -> ir.Value:
    """What is seen before each of these tokens and after the last; the first row alone where
    nothing is penalised. [K] -> [K + 1, V]
    """
    tokens, _ = _part(nodes, nodes("Unsqueeze", tokens, [1]), _is_penalised(nodes, settings))
    before = nodes("Cast", settings.seen, to=FLOAT)
    zeros = nodes("Mul", nodes("Cast", tokens, to=FLOAT), 0.0)
    rows = nodes("Add", nodes("Mul", before, 0.0), zeros)
    own = nodes("ScatterElements", rows, tokens, nodes("Add", zeros, 1.0), axis=1)
    seen = nodes("CumSum", nodes("Concat", before, own, axis=0), np.array(0))
    return nodes("Greater", seen, 0.0)


def target_weights(
    nodes: Nodes, logits: ir.Value, tokens: ir.Value, vocab_size: int, settings: Settings
) -> ir.Value:
    """The target's rows after each of these drafted tokens and before them. [K + 1, V], [K]"""
    rows = penalised(nodes, logits, _seen_before(nodes, settings, tokens), settings)
    return weights(nodes, rows, vocab_size, settings)


def weights(nodes: Nodes, logits: ir.Value, vocab_size: int, settings: Settings) -> ir.Value:
    """Rows as weights, the likeliest token's 1; at temperature 0 it has all. [R, V] -> [R, V]"""
    is_greedy = nodes("Equal", settings.temperature, 0.0)
    likeliest = nodes("ArgMax", logits, axis=-1, keepdims=0)
    alone = nodes("OneHot", likeliest, vocab_size, np.array([0, 1], np.float32))
    return nodes("Where", is_greedy, alone, _drawn(nodes, logits, vocab_size, settings))


def _part(nodes: Nodes, rows: ir.Value, condition: ir.Value) -> tuple[ir.Value, ir.Value]:
    """All rows where a condition [1] holds and none, or none and all: what If would do."""
    split = nodes("Mul", nodes("Cast", condition, to=INT), END)
    first = nodes("Slice", rows, [0], split, [0])
    return first, nodes("Slice", rows, split, [END], [0])


def _drawn(nodes: Nodes, logits: ir.Value, vocab_size: int, settings: Settings) -> ir.Value:
    """The weights of rows above temperature 0. [R, V] -> [R, V]

    With ONNX Runtime 1.30 a TopK of no rows ends the process, and sums of none have another shape:
    so a nucleus is asked of one row at least, which is dropped again.
    """
    largest = nodes("ReduceMax", logits, [-1])
    divisor = nodes("Max", settings.temperature, float(_LIMITS.tiny))
    divisor = nodes("Min", divisor, float(_LIMITS.max))
    top_k, top_p, min_p = settings.top_k, settings.top_p, settings.min_p
    is_few = nodes("And", nodes("Greater", top_k, 0), nodes("Less", top_k, vocab_size))
    best = nodes("TopK", logits, nodes("Where", is_few, top_k, 1), sorted=0, num_outputs=2)
    least = nodes("Where", is_few, nodes("ReduceMin", best, [-1]), LEAST)
    logits = nodes("Where", nodes("Less", logits, least), LEAST, logits)
    heights = nodes("Div", nodes("Sub", logits, largest), divisor)
    few, rest = _part(nodes, heights, nodes("Less", top_p, np.ones(1)))
    few = nodes("Concat", few, nodes("Slice", heights, [0], [1], [0]), axis=0)
    few = nodes("Slice", _nucleus(nodes, few, top_p), [0], [-1], [0])
    drawn = nodes("Concat", few, nodes("Exp", rest), axis=0)
    return nodes("Where", nodes("Less", drawn, min_p), 0.0, drawn)


def _nucleus(nodes: Nodes, heights: ir.Value, share: ir.Value) -> ir.Value:
    """Weights of these logarithms: the fewest that have this share of all, the first on ties.

    Weights are summed in buckets of their heights. Of the bucket where the sums get there the
    largest come first, a few tokens of a row that is not flat.
    """
    drawn = nodes("Exp", heights)
    wide = nodes("Cast", drawn, to=DOUBLE)
    goal = nodes("Mul", nodes("ReduceSum", wide, [-1]), share)
    scaled = nodes("Mul", nodes("Max", heights, -_DEEPEST), (1 - _BUCKETS) / _DEEPEST)
    places = nodes("Cast", scaled, to=INT)
    empty = nodes("Mul", goal, np.zeros((1, _BUCKETS)))
    sums = nodes("ScatterElements", empty, places, wide, axis=1, reduction="add")
    aheads = nodes("CumSum", sums, np.array(1), exclusive=1)
    is_ahead = nodes("Less", aheads, goal)
    at = nodes("Sub", nodes("ReduceSum", nodes("Cast", is_ahead, to=INT), [-1]), 1)
    before = nodes("ReduceMax", nodes("Where", is_ahead, aheads, np.zeros(1)), [-1])
    candidates = nodes("Where", nodes("Equal", places, at), drawn, -1.0)
    last = _largest(nodes, candidates, goal, before)
    kept = nodes("Or", nodes("Less", places, at), last)
    return nodes("Where", kept, drawn, 0.0)


def _largest(nodes: Nodes, candidates: ir.Value, goal: ir.Value, before: ir.Value) -> ir.Value:
    """Which of `candidates`, which are not below 0, it takes from `before` on to reach `goal`, the
    largest first. [R, V], [R, 1], [R, 1] -> [R, V]
    """
    is_one = nodes("GreaterOrEqual", candidates, 0.0)
    counts = nodes("ReduceSum", nodes("Cast", is_one, to=INT), [-1])
    most = nodes("Max", nodes("ReduceMax", counts, [0, 1], keepdims=0), 1)
    values = nodes("TopK", candidates, nodes("Reshape", most, [1]), num_outputs=2)
    places = nodes.others(values)[0]
    wide = nodes("Cast", nodes("Max", values, 0.0), to=DOUBLE)
    aheads = nodes("Add", nodes("CumSum", wide, np.array(1), exclusive=1), before)
    wanted = nodes("And", nodes("Less", aheads, goal), nodes("GreaterOrEqual", values, 0.0))
    return nodes("ScatterElements", nodes("Less", candidates, -1.0), places, wanted, axis=1)


def _totals(nodes: Nodes, rows: ir.Value) -> ir.Value:
    """The sum of each row, in double. [R, V] -> [R, 1]"""
    return nodes("ReduceSum", nodes("Cast", rows, to=DOUBLE), [-1])


def draw(nodes: Nodes, row: ir.Value, uniform: ir.Value) -> ir.Value:
    """The first token up to which weights sum to more than this share. [1, V], [1] -> [1]"""
    sums = nodes("CumSum", nodes("Cast", row, to=DOUBLE), np.array(1))
    last = nodes("Slice", sums, [-1], [END], [1])
    goal = nodes("Mul", last, uniform)
    above = nodes("Cast", nodes("Greater", sums, goal), to=FLOAT)
    first, highest = (nodes("ArgMax", x, axis=1, keepdims=0) for x in (above, sums))
    is_above = nodes("Reshape", nodes("Greater", last, goal), [1])
    return nodes("Where", is_above, first, highest)


def judge(
    nodes: Nodes,
    drafted: ir.Value,
    draft_weights: ir.Value,
    target_weights: ir.Value,
    limit: ir.Value,
    tests: ir.Value,
    last: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """How many drafted tokens are accepted [1], and the token after them [1].

    Leviathan et al. 2023, algorithm 1, of the first `limit` [1] tokens alone.

    drafted [K], draft_weights [K, V], target_weights [K + 1, V], tests [K] and last [1] in double
    """
    totals, draft_totals = _totals(nodes, target_weights), _totals(nodes, draft_weights)
    tokens = nodes("Unsqueeze", drafted, [1])
    judged, judged_totals = (nodes("Slice", x, [0], [-1], [0]) for x in (target_weights, totals))
    t = _share(nodes, judged, judged_totals, tokens)
    d = _share(nodes, draft_weights, draft_totals, tokens)
    passed = nodes("Less", nodes("Mul", tests, d), t)
    numbers = nodes("CumSum", nodes("Add", nodes("Mul", drafted, 0), 1), np.array(0))
    ends = nodes("Or", nodes("Not", passed), nodes("Greater", numbers, limit))
    ends = nodes("Concat", nodes("Cast", ends, to=INT), [1], axis=0)
    accepted = nodes("ArgMax", ends, axis=0, keepdims=1)
    is_cut = nodes("Less", accepted, limit)
    at = nodes("Where", is_cut, accepted, 0)
    row, total = (nodes("Gather", x, accepted) for x in (target_weights, totals))
    draft_row, draft_total = (nodes("Gather", x, at) for x in (draft_weights, draft_totals))
    scale = nodes("Cast", nodes("Div", total, draft_total), to=FLOAT)
    scale = nodes("Where", is_cut, scale, 0.0)
    residual = nodes("Max", nodes("Sub", row, nodes("Mul", scale, draft_row)), 0.0)
    is_left = nodes("Greater", nodes("ReduceMax", residual, [-1]), 0.0)
    return accepted, draw(nodes, nodes("Where", is_left, residual, row), last)


def _share(nodes: Nodes, rows: ir.Value, totals: ir.Value, tokens: ir.Value) -> ir.Value:
    """The probability of a token of each row. [K, V], [K, 1], [K, 1] -> [K]"""
    weight = nodes("Cast", nodes("GatherElements", rows, tokens, axis=1), to=DOUBLE)
    return nodes("Reshape", nodes("Div", weight, totals), [-1])
