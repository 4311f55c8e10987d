"""The comparison with PyTorch notices faults that are planted into a graph."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

from comparing import CONTEXT, measure, model_of, traced
from specedge.errors import ParityError
from specedge.exporter import (
    geometry,
    tracing,
)
from specedge.exporter.swaps import swapped


def attention_nodes(graph):
    return [n for n in graph if n.op_type in ("Attention", "GroupQueryAttention")]


def set_attribute(node, name, change):
    attribute = node.attributes[name]
    kind = ir.AttrFloat32 if attribute.type == ir.AttributeType.FLOAT else ir.AttrInt64
    node.attributes[name] = kind(name, change(attribute.value))


def constant(graph, name, array):
    tensor = ir.tensor(array, name=name)
    kind = ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, shape=tensor.shape, type=kind, const_value=tensor)
    graph.register_initializer(value)
    return value


def insert_before(graph, node, index, op_type, array, **attributes):
    """Put an operator with a constant between a node and one of its inputs."""
    name = f"{node.name}.fault"
    new = ir.node(op_type, [node.inputs[index], constant(graph, name, array)], attributes)
    new.outputs[0].name = f"{name}.output"
    new.outputs[0].type, new.outputs[0].shape = node.inputs[index].type, node.inputs[index].shape
    graph.insert_before(node, new)
    node.replace_input_with(index, new.outputs[0])


def add_before(graph, node, index, amount):
    dtype = node.inputs[index].dtype.numpy()
    insert_before(graph, node, index, "Add", np.full([1], amount, dtype))


def wrong_scale(graph):
    for node in attention_nodes(graph):
        set_attribute(node, "scale", lambda scale: 1.001 * scale)


def missing_softcap(graph):
    for node in attention_nodes(graph):
        del node.attributes["softcap"]


def window_off_by_one(graph):
    """The mask's one window constant, or the node's own."""
    for node in attention_nodes(graph):
        if node.op_type == "GroupQueryAttention":
            set_attribute(node, "local_window_size", lambda window: window + 1)
    for node in [n for n in graph if n.op_type == "Greater"]:
        add_before(graph, node, 0, 1)


def position_off_by_one(graph):
    add_before(graph, next(node for node in graph if node.op_type == "Clip"), 0, 1)


def swapped_heads(graph):
    """The first layer's two key heads change places."""
    node = next(n for n in graph if n.op_type in ("TensorScatter", "GroupQueryAttention"))
    if node.op_type == "TensorScatter":
        insert_before(graph, node, 1, "Gather", np.array([1, 0]), axis=1)
    else:
        insert_before(graph, node, 1, "Gather", np.roll(np.arange(32), 16), axis=2)


def stale_row(graph):
    """Each query sees one row too many: stale, until it is overwritten."""
    for node in [n for n in graph if n.op_type == "LessOrEqual"]:
        add_before(graph, node, 1, 1)
    for node in attention_nodes(graph):
        if node.op_type == "GroupQueryAttention":
            add_before(graph, node, 5, 1)


def traced_gemma(**config):
    """A model with softcap and a window in every other layer, and its graph in both op sets."""
    options = {"sliding_window": 24, "attn_logit_softcapping": 3.0, "head_dim": 16}
    model = model_of("gemma2", **options, **config)
    shape = geometry.measure(model, CONTEXT, 4)
    layers = tracing.observe(model, shape)
    assert [layer.window for layer in layers[:2]] == [24, None]
    with swapped(model, CONTEXT):
        return model, {o: tracing.trace(model, shape, o, layers) for o in ("onnx", "gqa")}


@pytest.fixture(scope="module")
def gemma():
    return traced_gemma()


@pytest.fixture(scope="module")
def deep_gemma():
    return traced_gemma(layers=6)


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize(
    "fault",
    [
        wrong_scale,
        missing_softcap,
        window_off_by_one,
        position_off_by_one,
        swapped_heads,
        stale_row,
    ],
)
def test_a_planted_fault_is_a_parity_error(fault, ops, gemma, tmp_path, monkeypatch):
    model, graphs_ = gemma
    result = graphs_[ops].clone()
    before = str(result.graph)
    fault(result.graph)
    assert str(result.graph) != before
    monkeypatch.setattr(tracing, "trace", lambda *args: result)
    player = traced(model, tmp_path, ops)
    with pytest.raises(ParityError, match=r"^target: (logits|present\.\d\.\w+) at position \d+"):
        measure(model, player)


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
def test_the_model_of_the_planted_faults_passes_without_one(ops, gemma, tmp_path, monkeypatch):
    model, graphs_ = gemma
    monkeypatch.setattr(tracing, "trace", lambda *args: graphs_[ops].clone())
    found = measure(model, traced(model, tmp_path, ops))
    assert found.row_independent_lengths == (1, 2, 3, 5, 9, 64)


def test_a_fault_at_the_last_position_alone_is_found(tmp_path):
    model = model_of("gpt2")
    player = traced(model, tmp_path)
    with torch.no_grad():
        model.transformer.wpe.weight[CONTEXT - 1, 0] += 0.01
    with pytest.raises(ParityError, match=f"position {CONTEXT - 1} "):
        measure(model, player)


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize("fault", [wrong_scale, position_off_by_one, stale_row])
def test_a_planted_fault_in_a_model_in_parts_is_found(
    fault, ops, gemma, tmp_path, in_parts, monkeypatch
):
    test_a_planted_fault_is_a_parity_error(fault, ops, gemma, tmp_path, monkeypatch)


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize("fault", [window_off_by_one, stale_row])
def test_a_planted_fault_is_found_where_like_layers_are_played_once(
    fault, ops, deep_gemma, tmp_path, in_parts, monkeypatch
):
    test_a_planted_fault_is_a_parity_error(fault, ops, deep_gemma, tmp_path, monkeypatch)


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
def test_a_fault_of_one_layer_among_like_ones_is_found(
    ops, deep_gemma, tmp_path, in_parts, monkeypatch
):
    model, graphs_ = deep_gemma
    result = graphs_[ops].clone()
    node = attention_nodes(result.graph)[3]
    set_attribute(node, "scale", lambda scale: 1.001 * scale)
    monkeypatch.setattr(tracing, "trace", lambda *args: result)
    with pytest.raises(ParityError, match=r"logits|present"):
        measure(model, traced(model, tmp_path, ops))
