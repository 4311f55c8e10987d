"""Distributions over tokens, sampling, and the accept rule, as ONNX nodes.

The arithmetic is that of `runtime/sampling` and of `runtime/decoding/verification.py`, as specified
in docs/bundle.md: float32, with double sums where they decide a sample. R rows, V vocabulary
entries, K draft tokens; C columns: V above temperature 0, and 1 at temperature 0, where nothing is
sampled. There is no If node: nodes of a disabled filter process the first column (`_columns_if`),
as TopK and sums of empty tensors fail in ONNX Runtime before 1.31. Only candidates for the
nucleus's last token are sorted, not whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from specedge.bundle.manifest import ModelEntry
from specedge.sampling_options import DecodingDefaults

from .banned_tokens import BannedTokens
from .nodes import DOUBLE, END, FLOAT, INT, GraphBuilder

_BUCKETS = 4096
_BLOCK = 512  # columns, as in `runtime/sampling/distribution.py`
_UNDERFLOW = 104.0  # exp(-104) is 0 in float32
_LIMITS = np.finfo(np.float32)
_INFINITY = np.array(np.inf, np.float32)


@dataclass(frozen=True)
class TokenWeights:
    """Most probable token of each row, [R, 1], and unnormalized probabilities, [R, C]."""

    argmax: ir.Value
    weights: ir.Value


def token_logits(nodes: GraphBuilder, logits: ir.Value, model: ModelEntry, rows: int) -> ir.Value:
    """Slice off padding columns. [1, R, padded] -> [R, V]"""
    logits = nodes("Reshape", logits, [rows, model.padded_vocab_size])
    if model.num_columns == model.padded_vocab_size:
        return logits
    return nodes("Slice", logits, [0], [model.num_columns], [1])


@dataclass(frozen=True)
class SamplingNodes:
    """Builder of sampling nodes, from options, [1] each, and the tokens in the history, [1, V]."""

    nodes: GraphBuilder
    vocab_size: int
    is_static: bool  # C is always V, so that no shape depends on a value
    temperature: ir.Value
    top_k: ir.Value
    top_p: ir.Value
    min_p: ir.Value
    penalty: ir.Value
    seen: ir.Value
    bans: BannedTokens | None = None

    @classmethod
    def with_inputs(
        cls, nodes: GraphBuilder, vocab_size: int, defaults: DecodingDefaults
    ) -> SamplingNodes:
        """Add the options and the history to the inputs of a graph."""
        return cls(
            nodes,
            vocab_size,
            False,
            nodes.input("temperature", FLOAT, [1]),
            nodes.input("top_k", INT, [1]),
            nodes.input("top_p", DOUBLE, [1]),
            nodes.input("min_p", FLOAT, [1]),
            nodes.input("repetition_penalty", FLOAT, [1]),
            nodes.input("seen", ir.DataType.BOOL, [1, vocab_size]),
            BannedTokens.with_inputs(nodes, vocab_size, defaults),
        )

    def is_sampled(self) -> ir.Value:
        """Return True above temperature 0. [1]"""
        return self.nodes("Greater", self.temperature, 0.0)

    def select_columns(self, weights: ir.Value) -> ir.Value:
        """Slice the columns that exist at this temperature. [R, V] -> [R, C]"""
        return self._columns_if(weights, self.is_sampled())

    def restore_columns(self, weights: ir.Value) -> ir.Value:
        """Pad to all columns; values are meaningless at temperature 0. [R, C] -> [R, V]"""
        missing = self.nodes("Where", self.is_sampled(), [0], [self.vocab_size - 1])
        return self.nodes("Pad", weights, self.nodes("Concat", [0, 0, 0], missing, axis=0))

    def append(self, token: ir.Value) -> SamplingNodes:
        """Add a token to the history. [1, 1]"""
        seen = self.nodes("ScatterElements", self.seen, token, np.ones((1, 1), bool), axis=1)
        bans = None if self.bans is None else self.bans.append(token)
        return replace(self, seen=seen, bans=bans)

    def banned(self, drafted: ir.Value | None = None) -> ir.Value | None:
        """Return the mask of tokens banned after the text, and after each of these draft tokens.

        None if no token is ever banned. [K, 1] -> [K + 1, V or 1, V]
        """
        return None if self.bans is None else self.bans.mask(drafted)

    def seen_before_each(self, tokens: ir.Value) -> ir.Value:
        """Return the history before each of these tokens, and after the last.

        Only the first column if no penalty applies. [K, 1] -> [K + 1, V or 1]
        """
        nodes, is_on = self.nodes, self._has_penalty()
        before = nodes("Cast", self._columns_if(self.seen, is_on), to=FLOAT)
        indices = nodes("Where", is_on, tokens, 0)
        zeros = nodes("Mul", nodes("Cast", indices, to=FLOAT), 0.0)
        rows = nodes("Add", nodes("Mul", before, 0.0), zeros)
        marked = nodes("ScatterElements", rows, indices, nodes("Add", zeros, 1.0), axis=1)
        seen = nodes("CumSum", nodes("Concat", before, marked, axis=0), np.array(0))
        return nodes("Greater", seen, 0.0)

    def token_weights(
        self,
        logits: ir.Value,
        seen: ir.Value,
        vocab_size: int,
        is_one: bool = False,
        banned: ir.Value | None = None,
    ) -> TokenWeights:
        """Return the greedy choice and the weights to sample from. [R, V], [R, V or 1]

        `is_one` is True if R is 1, which requires fewer nodes. Columns in the mask `banned`,
        [1 or R, V], are never chosen.
        """
        is_on = self._has_penalty()
        some, seen = (self._columns_if(x, is_on) for x in (logits, seen))
        changed = self.apply_penalty(some, seen)
        rest = self.nodes("Slice", logits, self._end_if(is_on), [END], [1])
        logits = self.nodes("Concat", changed, rest, axis=1)
        if banned is not None:  # at temperature 0, where weights are of one column, a number
            lowest = self.nodes("Where", self.is_sampled(), -np.inf, float(_LIMITS.min))
            logits = self.nodes("Where", banned, lowest, logits)
        argmax = self.nodes("ArgMax", logits, axis=1)
        return TokenWeights(argmax, self._weights(logits, vocab_size, is_one))

    def apply_penalty(self, logits: ir.Value, seen: ir.Value) -> ir.Value:
        """Apply the repetition penalty to the logits of seen tokens. 2 * [R, C]"""
        nodes, penalty = self.nodes, self.nodes("Max", self.penalty, float(_LIMITS.tiny))
        smaller, larger = nodes("Div", logits, penalty), nodes("Mul", logits, penalty)
        changed = nodes("Where", nodes("Less", logits, 0.0), larger, smaller)
        return nodes("Where", seen, nodes("Min", changed, float(_LIMITS.max)), logits)

    def _weights(self, logits: ir.Value, vocab_size: int, is_one: bool) -> ir.Value:
        """Return weights, 1 for the most probable token. [R, V] -> [R, C]"""
        nodes, is_drawn = self.nodes, self.is_sampled()
        logits = self._columns_if(logits, is_drawn)
        is_few = self.has_top_k(vocab_size)
        is_few = nodes("And", is_few, is_drawn)
        some = self._columns_if(logits, is_few)
        best = nodes("TopK", some, nodes("Where", is_few, self.top_k, 1), sorted=0, num_outputs=2)
        is_less = nodes("Less", some, nodes("ReduceMin", best, [1]))
        largest = nodes("Where", is_less, _INFINITY, nodes("ReduceMax", logits, [1]))
        heights = self.apply_temperature(logits, largest)
        is_cut = nodes("And", nodes("Less", self.top_p, np.ones(1)), is_drawn)
        drawn = nodes("Mul", nodes("Exp", heights), self._nucleus(heights, is_cut, is_one))
        return self.apply_min_p(drawn)

    def has_top_k(self, num_columns: int) -> ir.Value:
        """Return True if top-k removes columns. [1]"""
        is_on = self.nodes("Greater", self.top_k, 0)
        return self.nodes("And", is_on, self.nodes("Less", self.top_k, num_columns))

    def apply_temperature(self, logits: ir.Value, largest: ir.Value) -> ir.Value:
        """Return logarithms of weights, 0 for the most probable token."""
        divisor = self.nodes("Max", self.temperature, float(_LIMITS.tiny))
        divisor = self.nodes("Min", divisor, float(_LIMITS.max))
        return self.nodes("Div", self.nodes("Sub", logits, largest), divisor)

    def apply_min_p(self, weights: ir.Value) -> ir.Value:
        """Set weights below `min_p` to 0; the most probable token has weight 1."""
        return self.nodes("Where", self.nodes("Less", weights, self.min_p), 0.0, weights)

    def _nucleus(self, heights: ir.Value, is_on: ir.Value, is_one: bool) -> ir.Value:
        """Return the mask of the nucleus: the fewest tokens with this share, lower ids on ties.

        The mask is 1 or 0; a single column of 1 if top-p is off. [R, C] -> [R, C or 1]

        Weights are summed in buckets by their logarithms `heights`. Only in the bucket where the
        sums reach the share are tokens sorted, which are few unless the row is flat.
        """
        nodes = self.nodes
        lowest = nodes("Where", is_on, -_UNDERFLOW, 0.0)
        heights = nodes("Max", self._columns_if(heights, is_on), lowest)
        drawn = nodes("Exp", heights)
        wide = nodes("Cast", drawn, to=DOUBLE)
        indices = nodes("Cast", nodes("Mul", heights, (1 - _BUCKETS) / _UNDERFLOW), to=INT)
        empty = self._columns_if(nodes.constant(np.zeros((1, _BUCKETS))), is_on)
        if not is_one:
            empty = nodes("Mul", nodes("Slice", wide, [0], [1], [1]), empty)
        sums = nodes("ScatterElements", empty, indices, wide, axis=1, reduction="add")
        sums = nodes("CumSum", sums, np.array(1))
        goal = nodes("Mul", nodes("Slice", sums, [-1], [END], [1]), self.top_p)
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

    def choose_token(self, row: TokenWeights, uniform: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the most probable token at temperature 0, else sample, and the total weight.

        Samples by inversion: the first token whose cumulative weight exceeds a share. -> 2 * [1, 1]
        """
        drawn, total = self.find_position(row.weights, uniform, "LessOrEqual")
        return self.nodes("Where", self.is_sampled(), drawn, row.argmax), total

    def find_position(
        self, weights: ir.Value, share: ir.Value, comparison: str
    ) -> tuple[ir.Value, ir.Value]:
        """Return the first position whose cumulative weight reaches a share, and the total weight.

        Blocks are summed first, as by the runtime: CumSum takes quadratic time on CUDA, and ten
        times as long as ReduceSum on the CPU. `comparison` is the operator that compares a smaller
        cumulative weight with the share. [1, C], [1] -> 2 * [1, 1]
        """
        nodes, missing = self.nodes, -self.vocab_size % _BLOCK
        blocks = nodes("Cast", weights, to=DOUBLE)
        if not self.is_static:
            missing = nodes("Where", self.is_sampled(), [missing], [_BLOCK - 1])
            blocks = nodes("Pad", blocks, nodes("Concat", [0, 0, 0], missing, axis=0))
        elif missing:  # a GPU would copy the row otherwise
            blocks = nodes("Pad", blocks, [0, 0, 0, missing])
        blocks = nodes("Reshape", blocks, [-1, _BLOCK])
        totals = nodes("ReduceSum", blocks, [1])
        befores = nodes("CumSum", totals, np.array(0), exclusive=1)
        sums = nodes("Add", befores, totals)
        total = nodes("Slice", sums, [-1], [END], [0])
        goal = nodes("Mul", total, share)
        ones = nodes("Cast", nodes(comparison, sums, goal), to=FLOAT)
        block = nodes("Cast", nodes("ReduceSum", ones, [0], keepdims=0), to=INT)
        inside = nodes("CumSum", nodes("Gather", blocks, block), np.array(1))
        short = nodes(comparison, inside, nodes("Sub", goal, nodes("Gather", befores, block)))
        # If rounding moves the goal beyond the block, take the last position with a weight.
        less = nodes("Less", inside, nodes("Slice", inside, [-1], [END], [1]))
        ones = nodes("Cast", nodes("And", short, less), to=FLOAT)
        within = nodes("Cast", nodes("ReduceSum", ones, [1]), to=INT)
        return nodes("Add", nodes("Mul", block, _BLOCK), within), total

    def accept_tokens(
        self,
        drafted: ir.Value,
        draft_weights: ir.Value,
        target: TokenWeights,
        limit: ir.Value,
        tests: ir.Value,
        last: ir.Value,
    ) -> tuple[ir.Value, ir.Value]:
        """Return the number of accepted draft tokens [1], and the token after them [1, 1].

        Block verification (Sun et al. 2024, algorithm 2), as in the runtime's `verify`, of the
        first `limit` [1] draft tokens; at temperature 0 a draft token is accepted if it is the
        target's most probable token.

        drafted [K, 1], draft_weights [K, C], target of K + 1 rows, uniforms `tests` [K] and `last`
        [1]
        """
        nodes = self.nodes
        totals, draft_totals = self._row_sums(target.weights), self._row_sums(draft_weights)
        is_drawn = self.is_sampled()
        indices = nodes("Where", is_drawn, drafted, 0)
        weights, judged_totals, argmax = (
            nodes("Slice", x, [0], [-1], [0]) for x in (target.weights, totals, target.argmax)
        )
        t = self._probability(weights, judged_totals, indices)
        d = self._probability(draft_weights, draft_totals, indices)
        ones = nodes("Add", nodes("Mul", drafted, 0), 1)
        lengths = nodes("CumSum", ones, np.array(0))  # 1 to K
        ratios = self._joint_ratios(nodes("Log", nodes("Div", t, d)), lengths)
        before = nodes("Concat", np.ones((1, 1)), nodes("Slice", ratios, [0], [-1], [0]), axis=0)
        scales = nodes("Cast", nodes("Div", judged_totals, draft_totals), to=FLOAT)
        reduced = nodes("Mul", weights, nodes("Cast", before, to=FLOAT))
        residuals = nodes("Max", nodes("Sub", reduced, nodes("Mul", scales, draft_weights)), 0.0)
        masses = nodes("Div", self._row_sums(residuals), judged_totals)
        after = nodes("Concat", nodes("Slice", masses, [1], [END], [0]), np.zeros((1, 1)), axis=0)
        tests = nodes("Unsqueeze", tests, [1])
        odds = nodes("Sub", nodes("Add", after, np.ones(1)), ratios)
        passed = nodes("Less", nodes("Mul", tests, odds), after)
        passed = nodes("Or", passed, nodes("Equal", ratios, np.ones(1)))
        passed = nodes("And", passed, nodes("Less", lengths, limit))
        is_last = nodes("Equal", lengths, limit)
        passed = nodes("Or", passed, nodes("And", is_last, nodes("Less", tests, ratios)))
        accepted = nodes("ReduceMax", nodes("Where", passed, lengths, 0), [0], keepdims=0)
        failed = nodes("Cast", nodes("Not", nodes("Equal", drafted, argmax)), to=INT)
        agreed = nodes("ArgMax", nodes("Concat", failed, [[1]], axis=0), axis=0, keepdims=0)
        accepted = nodes("Where", is_drawn, accepted, nodes("Min", agreed, limit))
        is_cut = nodes("Less", accepted, limit)
        residual = nodes("Gather", residuals, nodes("Where", is_cut, accepted, 0))
        row, argmax = (nodes("Gather", x, accepted) for x in (target.weights, target.argmax))
        is_left = nodes("Greater", nodes("ReduceMax", residual, [1]), 0.0)
        is_left = nodes("And", is_left, is_cut)
        drawn_from = TokenWeights(argmax, nodes("Where", is_left, residual, row))
        return accepted, self.choose_token(drawn_from, last)[0]

    def _joint_ratios(self, logs: ir.Value, lengths: ir.Value) -> ir.Value:
        """Return p_i = min(1, p_(i-1) t(x_i) / d(x_i)) from the logarithms of t / d. [K, 1]

        A running minimum: log p_i is the sum of i logarithms less the largest earlier one above 0.
        """
        nodes = self.nodes
        sums = nodes("CumSum", logs, np.array(0))
        is_earlier = nodes("LessOrEqual", nodes("Transpose", lengths, perm=[1, 0]), lengths)
        earlier = nodes("Where", is_earlier, nodes("Transpose", sums, perm=[1, 0]), np.zeros(1))
        largest = nodes("Max", nodes("ReduceMax", earlier, [1]), np.zeros(1))
        return nodes("Exp", nodes("Sub", sums, largest))

    def _row_sums(self, rows: ir.Value) -> ir.Value:
        """Sum each row in double. [R, C] -> [R, 1]"""
        return self.nodes("ReduceSum", self.nodes("Cast", rows, to=DOUBLE), [1])

    def _probability(self, rows: ir.Value, totals: ir.Value, tokens: ir.Value) -> ir.Value:
        """Return the probability of a token of each row. [K, C], [K, 1], [K, 1] -> [K, 1]"""
        weight = self.nodes("GatherElements", rows, tokens, axis=1)
        return self.nodes("Div", self.nodes("Cast", weight, to=DOUBLE), totals)

    def _has_penalty(self) -> ir.Value:
        return self.nodes("Not", self.nodes("Equal", self.penalty, 1.0))

    def _columns_if(self, rows: ir.Value, condition: ir.Value) -> ir.Value:
        """Slice all columns if a condition [1] is true, else the first. -> [R, V or 1]"""
        return self.nodes("Slice", rows, [0], self._end_if(condition), [1])

    def _end_if(self, condition: ir.Value) -> ir.Value:
        return self.nodes("Where", condition, [END], [1])
