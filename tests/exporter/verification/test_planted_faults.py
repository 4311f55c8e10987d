"""Faults that the default verification of a deep model finds.

Layers of equal form after the first ones are compared with PyTorch in float32 only. Faults of an
exporter are in all layers, and in the graph of the first ones; others are in one middle layer.
"""

import functools

import numpy as np
import onnx_ir as ir
import pytest

import realistic
from architectures import ARCHITECTURES
from cases import exhaustive, slow
from checkpoints import make_model
from comparing import CONTEXT, DeepModel
from faults import FAULTS, attention_nodes, insert_before, set_attribute, swapped_heads
from specedge.errors import ParityError
from specedge.exporter import model_export
from specedge.exporter.graph.nodes import add_constant, insert_node

LAYERS, MIDDLE = 12, 7
OPS = ("onnx", "gqa")
FAMILY_OF = {
    "no bias of queries": "qwen2", "no bias of keys": "qwen2", "no bias of values": "qwen2",
    "two layers' matrices swapped": "qwen2", "feed-forward matrix off by 0.1%": "qwen2",
}  # fmt: skip


def nodes_after(graph, layer):
    """The nodes from a layer's attention on."""
    nodes = list(graph)
    return nodes[nodes.index(attention_nodes(graph)[layer]) :]


def operand_after(graph, layer, op_type):
    """The first node of a type after a layer's attention, with the name of its constant."""
    node = next(n for n in nodes_after(graph, layer) if n.op_type == op_type)
    assert node.inputs[1].is_initializer()
    return node.inputs[1]


def exchange(graph, op_type):
    first, second = (operand_after(graph, i, op_type) for i in (MIDDLE, MIDDLE + 1))
    first.const_value, second.const_value = second.const_value, first.const_value


def scaled_norm(graph, factor=1.001):
    value = operand_after(graph, MIDDLE, "RMSNormalization")
    array = factor * value.const_value.numpy()
    value.const_value = ir.tensor(array.astype(np.float32), name=value.name)


def scaled_attention(graph):
    set_attribute(attention_nodes(graph)[MIDDLE], "scale", lambda scale: 1.001 * scale)


def wrong_rope_base(graph):
    """The next layer's queries read the table of another base, as wide as their own."""
    node = next(n for n in nodes_after(graph, MIDDLE) if n.op_type == "RotaryEmbedding")
    gather = node.inputs[1].producer()
    angles = np.arccos(np.clip(gather.inputs[0].const_value.numpy(), -1, 1))
    table = add_constant(graph, np.cos(1.01 * angles).astype(np.float32), "wrong.table")
    copy = insert_node(gather, "Gather", [table, gather.inputs[1]], "wrong.rows", node.inputs[1])
    node.replace_input_with(1, copy)


def wrong_window(graph):
    node = attention_nodes(graph)[MIDDLE]
    if "local_window_size" in node.attributes:
        set_attribute(node, "local_window_size", lambda size: size + 1)
    else:
        masks = [n.inputs[3] for n in attention_nodes(graph)]
        node.replace_input_with(3, next(mask for mask in masks if mask is not masks[MIDDLE]))


def wrong_cache(graph):
    """A layer attends to the previous layer's keys."""
    before, node = attention_nodes(graph)[MIDDLE - 1 : MIDDLE + 1]
    index = 3 if node.op_type == "GroupQueryAttention" else 1
    node.replace_input_with(index, before.inputs[index])


def late_position(graph):
    """The last rows of a rotary table, which only the last positions read."""
    tables = [v for name, v in graph.initializers.items() if "rotary_emb.cos" in name]
    for value in tables:
        value.const_value = ir.tensor(_wrong_at_end(value), name=value.name)


def late_position_of_one_layer(graph):
    """A layer reads another table, which differs in its last row."""
    node = next(n for n in nodes_after(graph, MIDDLE) if n.op_type == "RotaryEmbedding")
    gather = node.inputs[1].producer()
    table = add_constant(graph, _wrong_at_end(gather.inputs[0]), "wrong.table")
    copy = insert_node(gather, "Gather", [table, gather.inputs[1]], "wrong.rows", node.inputs[1])
    node.replace_input_with(1, copy)


def _wrong_at_end(value):
    array = value.const_value.numpy().copy()
    array[CONTEXT - 1] *= 1.001
    return array


def scaled_residual(graph):
    """A middle layer's attention output is off by 0.1%."""
    nodes = [n for n in nodes_after(graph, MIDDLE) if n.op_type == "Add"]
    insert_before(graph, nodes[0], 0, "Mul", np.array([1.001], np.float32))


IN_ONE_LAYER = {
    "weights of two layers exchanged": functools.partial(exchange, op_type="MatMul"),
    "norms of two layers exchanged": functools.partial(exchange, op_type="RMSNormalization"),
    "norm off by 0.1%": scaled_norm,
    "attention scale off by 0.1%": scaled_attention,
    "residual off by 0.1%": scaled_residual,
    "last position of one layer": late_position_of_one_layer,
    "wrong RoPE base": wrong_rope_base,
    "wrong window": wrong_window,
    "wrong source of keys": wrong_cache,
    "swapped heads": functools.partial(swapped_heads, layer=MIDDLE),
}
IN_ALL_LAYERS = {**FAULTS, "last position of a rotary table": late_position}
SINGLE = {"scale of one layer off by 0.1%", "epsilon of one norm tenfold",
          "feed-forward matrix off by 0.1%", "two layers' matrices swapped"}  # fmt: skip


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    @functools.cache
    def make(family):
        model = realistic.make_model(family, context=CONTEXT, layers=LAYERS)
        return DeepModel(model, tmp_path_factory.mktemp(family))

    return make


def check_found(deep_model, folder, ops, change, change_first=None):
    with pytest.raises(ParityError) as caught:
        deep_model.verify(folder, ops, change, change_first)
    assert deep_model.is_changed(ops, change)
    return str(caught.value)


@pytest.mark.parametrize("ops", ["gqa", slow("onnx")])
def test_deep_model_without_faults_passes(ops, deep, tmp_path):
    gemma = deep("gemma2")
    assert gemma.part.layers.kinds == (0, 1) * (LAYERS // 2)
    assert gemma.part.layers.num_representative < MIDDLE
    report = gemma.verify(tmp_path, ops, lambda graph: None)
    assert report.structure_error < 1e-10
    assert report.error_ratio < 16


@pytest.mark.slow
def test_full_verification_compares_all_layers_in_float64(deep, tmp_path):
    """A difference of a few roundings in one middle layer, which float32 hides."""
    gemma = deep("gemma2")
    change = functools.partial(scaled_norm, factor=1 + 5e-7)
    gemma.verify(tmp_path, "gqa", change)
    references = model_export.compute_references(gemma.part, True, in_full=True)
    gemma.verify(tmp_path, "gqa", lambda graph: None, references=references)
    with pytest.raises(ParityError, match="both in float64"):
        gemma.verify(tmp_path, "gqa", change, references=references)


@pytest.mark.parametrize("num_dense", [1, slow(2), slow(3)])
def test_layers_after_others_of_another_kind_are_verified(num_dense, tmp_path):
    """Mixtures of experts with dense first layers."""
    config = ARCHITECTURES["deepseek_v3"][1]()
    config.num_hidden_layers, config.first_k_dense_replace = 9, num_dense
    deep_model = DeepModel(make_model(config), tmp_path)
    assert deep_model.part.layers.kinds == (0,) * num_dense + (num_dense,) * (9 - num_dense)
    assert deep_model.part.layers.num_representative < 9
    deep_model.verify(tmp_path, "onnx", lambda graph: None)


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("weights of two layers exchanged", "gqa"),
        ("wrong window", "gqa"),
        *(slow(name, ops) for name in IN_ONE_LAYER for ops in OPS),
    ],
)
def test_fault_in_one_middle_layer_is_found(name, ops, deep, tmp_path):
    print(f"{name} ({ops}):", check_found(deep("gemma2"), tmp_path, ops, IN_ONE_LAYER[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ops"),
    [
        case(name, ops)
        for name in IN_ALL_LAYERS
        for case, ops in ((slow, "onnx"), (exhaustive, "gqa"))
    ],
)
def test_fault_in_all_layers_is_found(name, ops, deep, tmp_path):
    change = IN_ALL_LAYERS[name]
    first = None if name in SINGLE else change
    deep_model = deep(FAMILY_OF.get(name, "gemma2"))
    print(f"{name} ({ops}):", check_found(deep_model, tmp_path, ops, change, first))
