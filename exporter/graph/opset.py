"""Old opsets, so that old versions of ONNX Runtime, such as a Jetson's, load a graph."""

from __future__ import annotations

from pathlib import Path

import onnx.defs
import onnx_ir as ir
import onnx_ir.passes.common as passes

from .nodes import MICROSOFT_DOMAIN, insert_node, producer

OLD_OPSET = 20  # CUDA kernels of ONNX Runtime 1.23 do not support opset 21
SIMPLIFIED_NORM = "SimplifiedLayerNormalization"  # ONNX Runtime has it in ONNX's own domain


def save_graph(model: ir.Model, path: Path) -> None:
    """Write a graph in the oldest opset that its operators allow."""
    lower_opset(model)
    ir.save(model, path)


def lower_opset(model: ir.Model) -> None:
    """Express a graph in an old opset, in place; graphs with other new operators are unchanged.

    RMSNormalization and RotaryEmbedding become operators that ONNX Runtime had before ONNX, with
    the same kernels. Others, such as Attention, have no such operator.
    """
    graph = model.graph
    if graph.opset_imports[""] <= OLD_OPSET or not all(map(_is_expressible, graph)):
        return
    for node in list(graph):
        if node.domain:
            continue
        if node.op_type == "RMSNormalization":
            node.op_type = SIMPLIFIED_NORM
        elif node.op_type == "RotaryEmbedding":
            _look_up_inside(graph, node)
        elif node.op_type != SIMPLIFIED_NORM:
            for name in _new_attributes(node):
                del node.attributes[name]
    passes.RemoveUnusedNodesPass()(model)
    graph.opset_imports[""] = OLD_OPSET


def _is_expressible(node: ir.Node) -> bool:
    if node.domain or node.op_type in ("RMSNormalization", SIMPLIFIED_NORM):
        return True
    if node.op_type == "RotaryEmbedding":
        return _lookups(node) is not None
    try:
        return not any(node.attributes[name].value for name in _new_attributes(node))
    except onnx.defs.SchemaError:
        return False


def _new_attributes(node: ir.Node) -> list[str]:
    """Return the attributes that the operator does not have in the old opset.

    Raises:
        onnx.defs.SchemaError: The old opset does not have the operator.
    """
    schema = onnx.defs.get_schema(node.op_type, OLD_OPSET, "")
    return [name for name in node.attributes if name not in schema.attributes]


def _lookups(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """Return the nodes that look up the tables of rotary embedding by the same positions."""
    cos, sin = (producer(value, "Gather") for value in node.inputs[1:3])
    if cos is None or sin is None or cos.inputs[1] is not sin.inputs[1]:
        return None
    return cos, sin


def _look_up_inside(graph: ir.Graph, node: ir.Node) -> None:
    """Replace rotary embedding by ONNX Runtime's, which looks up the tables itself."""
    lookups, output = _lookups(node), node.outputs[0]
    assert lookups is not None
    rotated = insert_node(
        node, "RotaryEmbedding",
        [node.inputs[0], lookups[0].inputs[1], *(lookup.inputs[0] for lookup in lookups)],
        f"{output.name}.rotated", output, MICROSOFT_DOMAIN,
        **{name: attribute.as_int() for name, attribute in node.attributes.items()},
    )  # fmt: skip
    output.replace_all_uses_with(rotated, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    graph.opset_imports[MICROSOFT_DOMAIN] = 1
