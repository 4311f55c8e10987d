"""Draft steps that write no cache: attention over an old buffer and the rows that are new.

A buffer that is an input and an output of a graph is written in place once; a second time copies
all of it. So K draft steps leave it as it was, and the rows that they add are scattered into it at
the end. H query heads, G key-value heads of size D, S rows of a buffer, M new ones, T queries.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import onnx_ir as ir

from specedge.errors import ExportError

from .nodes import END, LEAST, Nodes


class NewRows:
    """The rows that draft steps add to buffers, at places `first` [1] and on."""

    def __init__(self, nodes: Nodes, first: ir.Value, capacity: int) -> None:
        self._nodes, self._first, self._capacity = nodes, first, capacity
        self._rows: dict[ir.Value, ir.Value] = {}  # by buffer [1, G, S, D]: [1, G, M, D]
        self._places: ir.Value | None = None  # [M]
        columns = np.arange(capacity)[None, None, None]
        self._is_old = nodes("Less", columns, first)
        self._buffers: dict[ir.Value, ir.Value] = {}

    def step(self, places: ir.Value) -> None:
        """The next pass adds rows at these places. [T]"""
        before = self._places
        self._places = places if before is None else self._nodes("Concat", before, places, axis=0)
        self._masks: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._buffers.clear()

    def rewrite(self, node: ir.Node) -> bool:
        """Keep the rows of a node that writes a buffer, and attend over both in one that reads."""
        if node.op_type == "TensorScatter":
            buffer, rows = node.inputs[:2]
            assert buffer is not None
            assert rows is not None
            before = self._rows.get(buffer)
            joined = rows if before is None else self._nodes("Concat", before, rows, axis=2)
            self._rows[buffer] = joined
            self._buffers[node.outputs[0]] = buffer
            return True
        if node.op_type == "Attention" and node.inputs[1] in self._buffers:
            node.outputs[0].replace_all_uses_with(self._attend(node))
            return True
        if not self._buffers.keys().isdisjoint(node.inputs):
            raise ExportError(f"the draft's cache is read by a {node.op_type} node")
        return False

    def commit(self) -> dict[ir.Value, ir.Value]:
        """The buffers with all new rows, by what they were."""
        return {
            buffer: self._nodes("TensorScatter", buffer, rows, self._first, axis=2)
            for buffer, rows in self._rows.items()
        }

    def _attend(self, node: ir.Node) -> ir.Value:
        """[1, H, T, D] queries over S + M rows -> [1, H, T, D]"""
        nodes = self._nodes
        query, key, value, mask = cast("tuple[ir.Value, ...]", node.inputs)
        old_keys, old_values = self._buffers[key], self._buffers[value]
        heads, (groups, size) = _size(query, 1), (_size(old_values, 1), _size(old_values, 3))
        share = heads // groups
        grouped = [1, groups, share, -1]
        scaled = nodes("Mul", query, node.attributes["scale"].as_float())
        flat = nodes("Reshape", scaled, [1, groups, -1, _size(query, 3)])
        apart = nodes("Reshape", scaled, [*grouped, _size(query, 3)])
        old = nodes("MatMul", flat, nodes("Transpose", old_keys, perm=[0, 1, 3, 2]))
        old = nodes("Reshape", old, [*grouped, self._capacity])
        rows = nodes("Transpose", self._rows[old_keys], perm=[0, 1, 3, 2])
        new = nodes("MatMul", apart, nodes("Unsqueeze", rows, [2]))
        softcap = node.attributes.get("softcap")
        old_mask, new_mask = self._masked(mask, [1, groups, share, -1, self._capacity])
        scores = [
            _hidden(nodes, self._capped(part, softcap), hiding)
            for part, hiding in ((old, old_mask), (new, new_mask))
        ]
        probs = nodes("Softmax", nodes("Concat", *scores, axis=-1), axis=-1)
        old = nodes("Slice", probs, [0], [self._capacity], [4])
        old = nodes("Reshape", old, [1, groups, -1, self._capacity])
        old = nodes("Reshape", nodes("MatMul", old, old_values), [1, heads, -1, size])
        new = nodes("Slice", probs, [self._capacity], [END], [4])
        new = nodes("MatMul", new, nodes("Unsqueeze", self._rows[old_values], [2]))
        return nodes("Add", old, nodes("Reshape", new, [1, heads, -1, size]))

    def _capped(self, scores: ir.Value, softcap: ir.Attr | None) -> ir.Value:
        if softcap is None or not softcap.as_float():
            return scores
        cap = softcap.as_float()
        return self._nodes("Mul", self._nodes("Tanh", self._nodes("Div", scores, cap)), cap)

    def _masked(self, mask: ir.Value, shape: list[int]) -> tuple[ir.Value, ir.Value]:
        """What a mask over places [1, 1 or H, T, S] says of old rows, and of new ones."""
        if mask not in self._masks:
            nodes, apart = self._nodes, mask
            if _size(mask, 1) > 1:
                apart = nodes("Reshape", mask, shape)
            new = nodes("Gather", apart, self._places, axis=-1)
            is_bool = mask.dtype == ir.DataType.BOOL
            combine: tuple[Any, ...] = (
                ("And", apart, self._is_old) if is_bool else ("Where", self._is_old, apart, LEAST)
            )
            old = nodes(*combine)
            old.dtype = new.dtype = mask.dtype
            self._masks[mask] = old, new
        return self._masks[mask]


def _hidden(nodes: Nodes, scores: ir.Value, mask: ir.Value) -> ir.Value:
    if mask.dtype == ir.DataType.BOOL:
        return nodes("Where", mask, scores, LEAST)
    return nodes("Add", scores, mask)


def _size(value: ir.Value, axis: int) -> int:
    size = value.shape[axis] if value.shape is not None else None
    assert isinstance(size, int)
    return size
