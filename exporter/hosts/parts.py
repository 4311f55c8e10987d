"""A model's graph as a part of a larger one, as often as it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx_ir as ir

from .nodes import Nodes

Rewrite = Callable[[ir.Node], ir.Value | None]  # what takes the place of a node's output


class Part:
    """A graph file. Its copies share its weights, by paths from the folder of the larger graph, and
    what they are cast to, which ONNX Runtime computes once, when it loads the graph.

    Without VNNI ONNX Runtime makes bytes unsigned on the CPU, node by node, under one name: there
    each copy has bytes of its own, unless it `shares_bytes`.
    """

    def __init__(self, root: Path, file: str, shares_bytes: bool = False) -> None:
        self._model = ir.load(root / file)
        self._root, self._file = root, Path(file)
        self._shares_bytes = shares_bytes
        self._constants: dict[str, ir.Value] = {}

    def copy(
        self,
        nodes: Nodes,
        prefix: str,
        inputs: Mapping[str, ir.Value],
        rewrite: Rewrite | None = None,
    ) -> dict[str, ir.Value]:
        """Put its nodes in, but those that `rewrite` replaces; the outputs by name."""
        graph = self._model.clone().graph
        for name, value in list(graph.initializers.items()):
            own = value.dtype == ir.DataType.INT8 and not self._shares_bytes
            key = f"{prefix if own else self._file.with_suffix('')}.{name}"
            if key not in self._constants:
                self._constants[key] = nodes.stored(self._placed(value), key)
            value.replace_all_uses_with(self._constants[key])
        for value in graph.inputs:
            value.replace_all_uses_with(inputs[str(value.name)])
        outputs = {str(value.name): value for value in graph.outputs}
        graph.outputs.clear()
        own_nodes = list(graph)
        graph.remove(own_nodes)
        for node in own_nodes:
            if self._is_known(node):
                continue
            made = rewrite(node) if rewrite is not None else None
            if made is None:
                nodes.put(node, prefix)
                continue
            (gone,) = node.outputs
            gone.replace_all_uses_with(made)
            outputs |= {name: made for name, value in outputs.items() if value is gone}
        return outputs

    def _is_known(self, node: ir.Node) -> bool:
        """Whether an earlier copy has cast these weights; this one's nodes read that."""
        if node.op_type != "Cast" or not (value := node.inputs[0]) or not value.is_initializer():
            return False
        key = f"{value.name} {node.attributes['to'].as_int()}"
        if key in self._constants:
            node.outputs[0].replace_all_uses_with(self._constants[key])
            return True
        self._constants[key] = node.outputs[0]
        return False

    def _placed(self, value: ir.Value) -> ir.TensorProtocol:
        """A tensor as the larger graph's folder sees it."""
        tensor = value.const_value
        assert tensor is not None
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor
        return ir.ExternalTensor(
            (self._file.parent / tensor.location).as_posix(),
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=str(value.name),
            base_dir=self._root,
        )
