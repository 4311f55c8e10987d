"""Rewriting of float graphs to graphs that dequantize weights and multiply in float.

For devices without kernels for integer products. Integers and scales are shared with the other
graphs.

In TensorRT only DequantizeLinear may read integers, so it precedes lookups and transpositions.
Block-wise weights are stored a second time, as signed integers in the matrix's layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import torch

from ..graph.external_data import view_tensor
from ..graph.nodes import (
    MICROSOFT_DOMAIN,
    insert_node,
    operand,
    producer,
    replace_output,
    static_shape,
)
from . import expert_rewriter, rounding
from .block_sources import BlockSource
from .experts import ExpertLayer
from .integer_rewriter import IntegerRewriter, num_columns
from .matrices import Matrix, StoredTensor
from .schemes import Scheme

_SMALLEST_BLOCK, _LARGEST_BLOCK = 32, 128  # rows that share a scale in MatMulNBits


class DequantizeRewriter(IntegerRewriter):
    """Rewriter of the products and embeddings of one graph; activations stay float.

    Products are MatMulNBits: before version 1.30 ONNX Runtime does not fuse DequantizeLinear and
    MatMul, and dequantizes all weights in every pass. ONNX Runtime folds the conversion of the
    stored integers to MatMulNBits's layout when it loads a graph. The largest blocks have the
    fewest scales.
    """

    has_float_inputs = True
    has_block_products: ClassVar = True

    def _quantize_input(self, before: ir.Node, value: ir.Value) -> tuple[ir.Value, ...]:
        return (value,)

    def _multiply(
        self,
        before: ir.Node,
        quantized_input: tuple[ir.Value, ...],
        weights: tuple[ir.Value, ir.Value],
        name: str,
        like: ir.Value,
        width: int,
    ) -> ir.Value:
        (x,), (values, scales) = quantized_input, weights
        turned = producer(values, "Transpose")
        columns = values if turned is None else operand(turned, 0)
        if len(static_shape(columns)) > 2 or not self.has_block_products:
            wide = self._dequantize_weights(before, values, scales, name)
            return self.node(before, "MatMul", [x, wide], f"{name}.whole", like, width)
        size = static_shape(columns)[0 if turned is None else 1]
        block_size = max(math.gcd(size, _LARGEST_BLOCK), _SMALLEST_BLOCK)
        num_blocks = -(-size // block_size)
        if turned is None:
            columns = insert_node(before, "Transpose", [columns], f"{name}.turned", perm=[1, 0])
        inputs = [
            x,
            self._unsigned_blocks(before, columns, (width, num_blocks, block_size), size, name),
            self._block_scales(before, scales, num_blocks, name),
        ]
        return self.node(
            before, "MatMulNBits", inputs, f"{name}.whole", like, width,
            domain=MICROSOFT_DOMAIN, K=size, N=width, bits=8, block_size=block_size,
        )  # fmt: skip

    def _unsigned_blocks(
        self,
        before: ir.Node,
        columns: ir.Value,
        shape: tuple[int, int, int],
        size: int,
        name: str,
    ) -> ir.Value:
        """Convert signed to unsigned integers in blocks. [N, K] -> [N, blocks, b]"""
        _, num_blocks, block_size = shape
        zero = self.constant("sign", np.array(128, np.uint8))
        bytes_ = insert_node(before, "Cast", [columns], f"{name}.bytes", to=ir.DataType.UINT8)
        value = insert_node(before, "BitwiseXor", [bytes_, zero], f"{name}.unsigned")
        if padding := num_blocks * block_size - size:
            ends = self.constant(f"padding.{padding}", np.array([0, 0, 0, padding], np.int64))
            value = insert_node(before, "Pad", [value, ends, zero], f"{name}.padded")
        dims = self.constant(f"blocks.{shape}", np.array(shape, np.int64))
        value = insert_node(before, "Reshape", [value, dims], f"{name}.blocks")
        value.shape, value.dtype = ir.Shape(shape), ir.DataType.UINT8
        return value

    def _block_scales(
        self, before: ir.Node, scales: ir.Value, num_blocks: int, name: str
    ) -> ir.Value:
        """Repeat the scale of each column for its blocks. [1, N] -> [N, K / b]"""
        stored = scales.const_value
        assert isinstance(stored, ir.ExternalTensor)
        columns = ir.Shape([stored.size, 1])
        column = self.external(view_tensor(stored, columns, f"{stored.name}.columns"))
        dims = self.constant(f"scales.{num_blocks}", np.array([1, num_blocks], np.int64))
        return self.node(before, "Expand", [column, dims], f"{name}.scales", column, num_blocks)

    def _dequantize_weights(
        self, before: ir.Node, values: ir.Value, scales: ir.Value, name: str
    ) -> ir.Value:
        """Insert the dequantization of per-channel weights. [..., K, N]"""
        stored = scales.const_value
        assert isinstance(stored, ir.ExternalTensor)
        if len(stored.shape) == 2:  # one scale per column, which ONNX Runtime fuses
            columns = ir.Shape([stored.size])
            scales = self.external(view_tensor(stored, columns, f"{stored.name}.columns"))
            sizes: dict[str, Any] = {"axis": 1}
        else:
            sizes = {"axis": len(stored.shape) - 2, "block_size": static_shape(values)[-2]}
        return self._insert_dequantize(before, values, scales, f"{name}.wide", **sizes)

    def _insert_dequantize(
        self, before: ir.Node, values: ir.Value, scales: ir.Value, name: str, **sizes: Any
    ) -> ir.Value:
        inputs = [values, scales]
        if values.dtype != ir.DataType.INT4:
            # Without zero points, or with shared ones, ONNX Runtime fails with
            # `session.x64quantprecision`.
            shape = tuple(static_shape(scales))
            zeros = self.store.array(("zeros", shape), lambda: np.zeros(shape, np.int8), "zeros")
            zero = f"{name.removesuffix('.wide')}.zero"
            inputs.append(self.external(view_tensor(zeros, zeros.shape, zero)))
        return self.node(before, "DequantizeLinear", inputs, name, values, **sizes)


class QdqRewriter(DequantizeRewriter):
    """Rewriter of the products and embeddings of one graph for TensorRT.

    The lookup and the product of a tied table have separate initializers over the same bytes: with
    a shared one ONNX Runtime fails with `session.x64quantprecision`. TensorRT-RTX merges both.
    """

    has_block_products = False

    def _insert_block_lookup(self, node: ir.Node, stored: StoredTensor) -> ir.Value:
        """Insert a lookup in a table with one scale per row, stored in addition to blocks."""
        return self._insert_lookup(node, *self._stored_table(stored))

    def _insert_lookup(
        self, node: ir.Node, stored_values: ir.ExternalTensor, stored_scales: ir.ExternalTensor
    ) -> ir.Value:
        """Insert a lookup in a dequantized table."""
        output, ids = node.outputs[0], operand(node, 1)
        name = f"{stored_values.name}.rows"
        table = self.external(view_tensor(stored_values, stored_values.shape, name))
        wide = self._dequantize_table(node, table, stored_scales)
        return self.node(node, "Gather", [wide, ids], f"{output.name}.whole", output)

    def _dequantize_weights(
        self, before: ir.Node, values: ir.Value, scales: ir.Value, name: str
    ) -> ir.Value:
        turned = producer(values, "Transpose")
        if turned is None:
            return super()._dequantize_weights(before, values, scales, name)
        stored = scales.const_value
        assert isinstance(stored, ir.ExternalTensor)
        wide = self._dequantize_table(before, operand(turned, 0), stored)
        return self.node(before, "Transpose", [wide], f"{name}.wide", values, perm=[1, 0])

    def _dequantize_table(
        self, before: ir.Node, table: ir.Value, scales: ir.ExternalTensor
    ) -> ir.Value:
        """Dequantize a whole table, [V, H], one scale per row."""
        flat = view_tensor(scales, ir.Shape([scales.size]), f"{table.name}.wide.scales")
        return self._insert_dequantize(
            before, table, self.external(flat), f"{table.name}.wide", axis=0
        )

    def _insert_block_product(
        self, before: ir.Node, x: ir.Value, sources: Mapping[Matrix, BlockSource]
    ) -> None:
        """Insert the product of x with matrices, joined along N, in blocks."""
        matrices, bits = [*sources], next(iter(sources.values())).layout.bits
        like, width = matrices[0].node.outputs[0], sum(map(num_columns, matrices))
        _, blocks = self._store_blocks(sources)
        shape = int(matrices[0].stored.shape[0]), width
        name = f"{like.name}.int{bits}"
        stored = self.store.signed_blocks(blocks, bits, shape)
        whole = self._insert_signed_product(before, x, stored, name, like)
        self._replace_outputs(before, matrices, whole, name)

    def experts(self, mixture: ExpertLayer, choice: Scheme) -> None:
        """Replace the two products of all experts of a layer."""
        if not choice.num_parts:
            return
        stacks = expert_rewriter.store_experts(self, mixture.experts, choice)
        arrangements = (_stack_experts, _concatenate_experts)
        for node, stack, arrange in zip(mixture.nodes, stacks, arrangements, strict=True):
            x, output = operand(node, 0), node.outputs[0]
            number, width, groups, _ = stack.values.shape.numpy()
            size, along = groups * rounding.BLOCK_SIZE, arrange is _concatenate_experts
            shape = (number * size, width) if along else (size, number * width)
            blocks = stack.values, stack.scales
            signed = self.store.signed_blocks(blocks, choice.bits, shape, arrange)
            name = f"{output.name}.int{choice.bits}"
            replace_output(output, self._insert_signed_product(node, x, signed, name, output))

    def _insert_signed_product(
        self,
        before: ir.Node,
        x: ir.Value,
        stored: tuple[ir.ExternalTensor, ir.ExternalTensor],
        name: str,
        like: ir.Value,
    ) -> ir.Value:
        """Insert a product of x and signed blocks, [K, N]."""
        (values, scales), width = map(self.external, stored), int(stored[0].shape.numpy()[-1])
        sizes: dict[str, Any] = {"axis": 0, "block_size": rounding.BLOCK_SIZE}
        wide = self._insert_dequantize(before, values, scales, f"{name}.wide", **sizes)
        return self.node(before, "MatMul", [x, wide], f"{name}.whole", like, width)


def _stack_experts(blocks: torch.Tensor) -> torch.Tensor:
    """Stack the columns of all experts. [E, N, G, ...] -> [E * N, G, ...]"""
    return blocks.flatten(0, 1)


def _concatenate_experts(blocks: torch.Tensor) -> torch.Tensor:
    """Concatenate experts along K. [E, N, G, ...] -> [N, E * G, ...]"""
    return blocks.transpose(0, 1).flatten(1, 2)
