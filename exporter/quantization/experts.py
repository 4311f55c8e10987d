"""The experts of a mixture, in the two forms that graphs have them in, and what no group holds.

A MoE node has an expert's matrices as they are stored, E of them in a block; elsewhere all experts
are one wide MLP of two products. Both forms read the same bytes, so what one has in blocks of
integers the other has, too. T rows of H values, E experts of I inner values, G of H or I in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
import torch

from ..tracing.experts import Swiglu
from .matrices import NORMS, PRODUCTS, Stored, behind, stored_in, unfold

_FIRST, _BIAS, _LAST = 2, 3, 4  # inputs of a MoE node
_WALLS = {*NORMS, *PRODUCTS, "Attention", "GroupQueryAttention", "TensorScatter"}


@dataclass(frozen=True)
class Experts:
    """The stored matrices of a layer's experts, [E, 2 * I, H] and [E, H, I], and what the first
    ones' products get, [E, 2 * I].
    """

    first: Stored
    bias: Stored | None
    last: Stored
    activation: Swiglu

    @property
    def key(self) -> tuple[int, ...]:
        """What they are known by in the graphs of every op set: where their weights lie."""
        return self.first.place, self.last.place

    @property
    def names(self) -> list[ir.ExternalTensor]:
        return [self.first.tensor, self.last.tensor]

    def inner(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """What an expert's last matrix is multiplied with. [n, H] -> [n, I]"""
        both = x @ self.first.numbers()[expert].float().T
        if self.bias is not None:
            both = both + self.bias.numbers()[expert].float()
        return self.activation(both[:, ::2], both[:, 1::2])


@dataclass(frozen=True)
class Mixture:
    """Experts in a graph: their rows x, and one MoE node or two products."""

    experts: Experts
    x: ir.Value
    nodes: tuple[ir.Node, ...]

    @property
    def is_sparse(self) -> bool:
        return len(self.nodes) == 1


@dataclass(frozen=True)
class Apart:
    """What is in no group of a model: places of what routers have, and experts."""

    routers: frozenset[int] = frozenset()
    experts: tuple[Experts, ...] = ()
    places: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        of_experts = {place for experts in self.experts for place in experts.key}
        object.__setattr__(self, "places", self.routers | of_experts)


NOTHING = Apart()


def apart(graphs: Iterable[ir.Graph], num_experts: int) -> Apart:
    """What is in no group of a model whose layers choose among so many experts, 0 for none."""
    routers, found = set(), dict[tuple[int, ...], Experts]()
    for node in (node for graph in graphs for node in graph if num_experts):
        if node.op_type == "MoE":
            if (experts := _experts(node)) is not None:
                found[experts.key] = experts
        elif node.op_type in ("MatMul", "Gemm"):
            stored = stored_in(node.inputs[1])
            if stored is not None and num_experts in stored.tensor.shape[-2:] and _routes(node):
                routers.add(stored.place)
    return Apart(frozenset(routers), tuple(found.values()))


def opened(path: Path, known: Apart = NOTHING) -> ir.Model:
    """A float model's file, its products in the form that groups are made of."""
    model = ir.load(path)
    unfold(model.graph, known.places)
    return model


def mixtures(graph: ir.Graph, known: Apart) -> list[Mixture]:
    """Where a graph has the experts of a model."""
    return [found for experts in known.experts if (found := _mixture(graph, experts)) is not None]


def _routes(node: ir.Node) -> bool:
    """Whether a product's result chooses experts, or its input says which were chosen."""
    ahead = _between(node, lambda n: [user for output in n.outputs for user, _ in output.uses()])
    back = _between(node, lambda n: [x.producer() for x in n.inputs[:1] if x is not None])
    return "TopK" in ahead | back


def _between(node: ir.Node, step: Callable[[ir.Node], Iterable[ir.Node | None]]) -> set[str]:
    """The types of nodes on the way from one, up to products, norms and attention."""
    found: set[ir.Node] = set()
    waiting = [*step(node)]
    while waiting:
        one = waiting.pop()
        if one is not None and one not in found and one.op_type not in _WALLS:
            found.add(one)
            waiting += step(one)
    return {one.op_type for one in found}


def _experts(node: ir.Node) -> Experts | None:
    """A MoE node's, if they are stored as it reads them."""
    first, last = stored_in(node.inputs[_FIRST]), stored_in(node.inputs[_LAST])
    if first is None or last is None:
        return None
    numbers = {name: node.attributes[name].as_float() for name in _NUMBERS & {*node.attributes}}
    activation = Swiglu(
        numbers["activation_alpha"], numbers["activation_beta"], numbers.get("swiglu_limit")
    )
    return Experts(first, stored_in(node.inputs[_BIAS]), last, activation)


_NUMBERS = {"activation_alpha", "activation_beta", "swiglu_limit"}


def _mixture(graph: ir.Graph, experts: Experts) -> Mixture | None:
    found = {}
    for node in graph:
        if node.op_type == "MoE" and _place(node.inputs[_FIRST]) == experts.first.place:
            assert node.inputs[0] is not None
            return Mixture(experts, node.inputs[0], (node,))
        if node.op_type in ("MatMul", "Gemm"):
            found[_place(node.inputs[1])] = node
    nodes = [found.get(place) for place in experts.key]
    if None in nodes:
        return None
    first, last = (node for node in nodes if node is not None)
    assert first.inputs[0] is not None
    return Mixture(experts, first.inputs[0], (first, last))


def _place(value: ir.Value | None) -> int | None:
    tensor = behind(value)
    return None if tensor is None else tensor.offset
