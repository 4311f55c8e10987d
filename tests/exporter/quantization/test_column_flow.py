"""No size goes through attention where something else would see it."""

import numpy as np
import onnx_ir as ir
import pytest

from specedge.exporter.graph.nodes import add_constant, insert_node
from specedge.exporter.quantization import column_flow, smoothing
from specedge.exporter.quantization.matrices import matrix_groups

ATTENTION = {"onnx": "Attention", "gqa": "GroupQueryAttention"}
WIDTH = 32  # of v: 2 heads of 16


@pytest.fixture(scope="module")
def written(traced_model):
    """Graphs of each graph variant of a Llama with 4 heads in 2 groups."""
    return {ops: traced_model("llama", ops, joins_products=False)[1] for ops in ATTENTION}


@pytest.fixture(params=ATTENTION)
def graph(request, written):
    graph = ir.load(written[request.param].path("decoder")).graph
    assert through(graph) is not None
    return graph


def through(graph):
    """The route of the first output projection, whose group is the second."""
    return smoothing.smoothing_path(matrix_groups(graph)[1])


def first(graph, *types):
    return next(node for node in graph if node.op_type in types)


def attention(graph):
    return first(graph, *ATTENTION.values())


def written_to(graph):
    """The node and input by which v comes into its cache."""
    node = attention(graph)
    return (node, 2) if node.op_type == ATTENTION["gqa"] else (node.inputs[2].producer(), 1)


def put(node, index, op_type, *more):
    """A node before an input of another."""
    value = node.inputs[index]
    found = insert_node(node, op_type, [value, *more], f"{value.name}.{op_type}", value)
    node.replace_input_with(index, found)


def read(graph, value):
    """Let the caller read something that is made of a value."""
    node = ir.node("Abs", [value])
    node.outputs[0].name = "read"
    graph.append(node)
    graph.outputs.append(node.outputs[0])


def test_no_path_if_product_has_two_consumers(graph):
    read(graph, column_flow.producing_product(matrix_groups(graph)[1].value).outputs[0])
    assert through(graph) is None


def test_no_path_if_product_is_a_graph_output(graph):
    graph.outputs.append(column_flow.producing_product(matrix_groups(graph)[1].value).outputs[0])
    assert through(graph) is None


def test_no_path_if_attention_output_has_two_consumers(graph):
    read(graph, attention(graph).outputs[0])
    assert through(graph) is None


def test_no_path_if_another_layer_reads_the_cache(graph):
    (cache,) = (value for value in graph.outputs if value.name == "present.0.value")
    read(graph, cache)
    assert through(graph) is None


def test_no_path_if_past_cache_has_another_consumer(graph):
    (cache,) = (value for value in graph.inputs if value.name == "past_key_values.0.value")
    read(graph, cache)
    assert through(graph) is None


def test_no_path_if_cache_is_not_a_graph_output(graph):
    graph.outputs[:] = [value for value in graph.outputs if value.name != "present.0.value"]
    assert through(graph) is None


def test_no_path_if_keys_and_values_are_shared(graph):
    node = attention(graph)
    node.replace_input_with(1, node.inputs[2])
    assert through(graph) is None


@pytest.mark.parametrize("op_type", ["Relu", "Identity"])
def test_no_path_through_unknown_operators(graph, op_type):
    put(*written_to(graph), op_type)
    assert through(graph) is None
    second = matrix_groups(graph)[5]
    assert smoothing.smoothing_path(second) is not None
    put(second.matrices[0].node, 0, op_type)
    assert smoothing.smoothing_path(second) is None


def test_no_path_through_norm_of_values(graph):
    value = written_to(graph)[0].inputs[written_to(graph)[1]]
    weight = add_constant(graph, np.ones(value.shape[-1], np.float32), "weight")
    put(*written_to(graph), "RMSNormalization", weight)
    assert through(graph) is None


def test_no_path_if_heads_are_split_across_rows(written):
    graph = ir.load(written["onnx"].path("decoder")).graph
    turned = written_to(graph)[0].inputs[1].producer()
    dims = add_constant(graph, np.array([1, 2, -1, 16]), "dims")
    turned.inputs[0].producer().replace_input_with(1, dims)
    turned.outputs[0].replace_all_uses_with(turned.inputs[0])
    assert through(graph) is None


@pytest.mark.parametrize("ops", ATTENTION)
def test_bias_is_scaled_only_before_head_split(written, ops):
    graph = ir.load(written[ops].path("decoder")).graph
    product = column_flow.producing_product(matrix_groups(graph)[1].value)
    bias = add_constant(graph, np.ones((1, 1, WIDTH), np.float32), "bias")
    for user, index in list(product.outputs[0].uses()):
        put(user, index, "Add", bias)
    assert [part.node.op_type for part in through(graph).parts] == ["MatMul", "Add"]
    size = written_to(graph)[0].inputs[written_to(graph)[1]].shape[-1]
    put(*written_to(graph), "Add", add_constant(graph, np.ones(size, np.float32), "late"))
    assert through(graph) is None
