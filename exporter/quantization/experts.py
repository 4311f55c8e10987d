"""Experts of a graph in both forms, and weights that belong to no group of matrices.

A MoE node reads the stacked matrices of all experts; without it all experts are one wide MLP of two
products. Both forms read the same bytes, and so the same block-wise integers. T rows, hidden size
H, E experts of intermediate size I, G blocks along H or I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
import torch

from ..graph.external_data import LazyWeights
from ..graph.nodes import operand
from ..tracing.experts import Swiglu
from .matrices import (
    NORMS,
    PRODUCT_INPUTS,
    StoredTensor,
    find_lazy,
    split_gemms,
    stored_tensor,
    underlying_tensor,
)

NUM_SAMPLED_EXPERTS = 4  # experts per layer used to measure errors
_FIRST, _BIAS, _LAST = 2, 3, 4  # inputs of a MoE node
_BOUNDARY_OPS = {*NORMS, *PRODUCT_INPUTS, "Attention", "GroupQueryAttention", "TensorScatter"}


@dataclass(frozen=True)
class ExpertWeights:
    """Stored matrices of experts, [E, 2 * I, H] and [E, H, I], and the bias [E, 2 * I]."""

    first: StoredTensor
    bias: StoredTensor | None
    last: StoredTensor
    activation: Swiglu

    @property
    def key(self) -> tuple[int, ...]:
        """Offsets of the weights, equal in all graph variants."""
        return self.first.offset, self.last.offset

    @property
    def names(self) -> list[ir.ExternalTensor]:
        return [self.first.tensor, self.last.tensor]

    def inner(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return the input of an expert's last matrix. [n, H] -> [n, I]"""
        gate_up = x @ self.first.data()[expert].float().T
        if self.bias is not None:
            gate_up = gate_up + self.bias.data()[expert].float()
        return self.activation(gate_up[:, ::2], gate_up[:, 1::2])


@dataclass(frozen=True)
class ExpertLayer:
    """Experts in a graph: input rows x, and one MoE node or two products."""

    experts: ExpertWeights
    x: ir.Value
    nodes: tuple[ir.Node, ...]

    @property
    def is_sparse(self) -> bool:
        return len(self.nodes) == 1


@dataclass(frozen=True)
class ExcludedWeights:
    """Weights that belong to no group: offsets of routers, and experts."""

    routers: frozenset[int] = frozenset()
    experts: tuple[ExpertWeights, ...] = ()
    offsets: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        of_experts = {offset for experts in self.experts for offset in experts.key}
        object.__setattr__(self, "offsets", self.routers | of_experts)


NO_EXCLUSIONS = ExcludedWeights()


def find_excluded(graphs: Iterable[ir.Graph], num_experts: int) -> ExcludedWeights:
    """Return the weights of routers and experts, with `num_experts` experts per layer."""
    routers, layers = set(), dict[tuple[int, ...], ExpertWeights]()
    for node in (node for graph in graphs for node in graph if num_experts):
        if node.op_type == "MoE":
            if (experts := _expert_weights(node)) is not None:
                layers[experts.key] = experts
        elif node.op_type in ("MatMul", "Gemm"):
            stored = stored_tensor(node.inputs[1])
            if stored is not None and num_experts in stored.tensor.shape[-2:] and _is_router(node):
                routers.add(stored.offset)
    return ExcludedWeights(frozenset(routers), tuple(layers.values()))


def load_graph(
    path: Path, lazy: LazyWeights, excluded: ExcludedWeights = NO_EXCLUSIONS
) -> ir.Model:
    """Load a float model with its lazy weights, and Gemm nodes split into MatMul and Add."""
    model = ir.load(path)
    find_lazy(model.graph, lazy)
    split_gemms(model.graph, excluded.offsets)
    return model


def expert_layers(graph: ir.Graph, excluded: ExcludedWeights) -> list[ExpertLayer]:
    """Return the expert layers of a graph."""
    fused, products = dict[int | None, ir.Node](), dict[int | None, ir.Node]()
    for node in graph:
        if node.op_type == "MoE":
            fused[_offset(node.inputs[_FIRST])] = node
        elif node.op_type in ("MatMul", "Gemm"):
            products[_offset(node.inputs[1])] = node
    layers = []
    for experts in excluded.experts:
        first, last = experts.key
        if first in fused:
            layers.append(ExpertLayer(experts, operand(fused[first], 0), (fused[first],)))
        elif products.keys() >= {first, last}:
            nodes = products[first], products[last]
            layers.append(ExpertLayer(experts, operand(nodes[0], 0), nodes))
    return layers


def _is_router(node: ir.Node) -> bool:
    """Return True if a product's result or input is connected to the selection of experts."""
    ahead = _op_types_between(
        node, lambda n: [user for output in n.outputs for user, _ in output.uses()]
    )
    back = _op_types_between(node, lambda n: [x.producer() for x in n.inputs[:1] if x is not None])
    return "TopK" in ahead | back


def _op_types_between(
    node: ir.Node, step: Callable[[ir.Node], Iterable[ir.Node | None]]
) -> set[str]:
    """Return the types of nodes reached from a node, up to products, norms and attention."""
    visited: set[ir.Node] = set()
    pending = [*step(node)]
    while pending:
        current = pending.pop()
        if current is not None and current not in visited and current.op_type not in _BOUNDARY_OPS:
            visited.add(current)
            pending += step(current)
    return {current.op_type for current in visited}


def _expert_weights(node: ir.Node) -> ExpertWeights | None:
    """Return the experts of a MoE node; None if it does not read the stored layout."""
    first, last = stored_tensor(node.inputs[_FIRST]), stored_tensor(node.inputs[_LAST])
    if first is None or last is None:
        return None
    numbers = {
        name: node.attributes[name].as_float()
        for name in _ACTIVATION_ATTRIBUTES & {*node.attributes}
    }
    activation = Swiglu(
        numbers["activation_alpha"], numbers["activation_beta"], numbers.get("swiglu_limit")
    )
    return ExpertWeights(first, stored_tensor(node.inputs[_BIAS]), last, activation)


_ACTIVATION_ATTRIBUTES = {"activation_alpha", "activation_beta", "swiglu_limit"}


def _offset(value: ir.Value | None) -> int | None:
    tensor = underlying_tensor(value)
    return None if tensor is None else tensor.offset
