"""The exported graphs compute what the PyTorch models do, and the check would notice if not."""

import sys

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from checkpoints import make_config, make_model, make_pair
from specedge.errors import ExportError, ParityError
from specedge.exporter import (
    Progress,
    export,
    exporting,
    geometry,
    graphs,
    parity,
    playing,
    tracing,
)
from specedge.exporter.playing import Player
from specedge.exporter.swaps import swapped
from specedge.exporter.weights import Weights

CONTEXT = 96


def traced(model, folder, ops="onnx", context=CONTEXT):
    shape = geometry.measure(model, context, 4)
    lengths = graphs.lengths(4, context)
    layers = tracing.observe(model, shape)
    part = exporting.Part("target", model, shape, lengths, layers, 512, "float32", folder)
    exporting.write_graphs(part, ops, Weights(folder, "float32"))
    return Player(folder, lengths, shape, ops)


def measure(model, player):
    return parity.measure("target", model, player, 512, lambda amount: None)


def model_of(kind="llama", **options):
    model = make_model(make_config(kind, kv_heads=2, context=CONTEXT, **options))
    model.set_attn_implementation("eager")
    return model


def test_logits_and_caches_equal_the_pytorch_models(exported):
    for model in exported.models.values():
        for found in model.parity.values():
            assert 0 < found.logits_error <= 5e-6
            assert 0 < found.cache_error <= 5e-6
            assert found.logits_std >= 2
            assert found.num_positions == model.context_length


def test_rows_do_not_depend_on_how_many_share_a_pass(exported):
    for model in exported.models.values():
        for found in model.parity.values():
            assert found.row_independent_lengths == (1, 2, 3, 5, 9, 64)


def test_every_file_gives_the_same_bits_and_nothing_is_noted(pairs, exported):
    notes = [note for notes in pairs.notes.values() for note in notes]
    assert [note for note in notes if "no multiple of 8" not in note] == []


def test_caches_are_updated_in_place(pairs):
    model = pairs.bundle("llama").target
    folder = pairs.bundle("llama").folder / "target"
    shape = geometry.Geometry(
        model.context_length, model.cache.capacity, model.padded_vocab_size, model.cache.layers
    )
    player = Player(folder, graphs.lengths(4, model.context_length), shape)
    player.run("decoder", np.arange(7), 3)
    rows = player.caches[0][0]
    assert np.abs(rows[:, 3:10]).min(axis=2).max() > 0
    assert not rows[:, :3].any()
    assert not rows[:, 10:].any()


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


@pytest.fixture(scope="module")
def gemma():
    """A model with softcap and a window in every other layer, and its graph in both op sets."""
    options = {"sliding_window": 24, "attn_logit_softcapping": 3.0, "head_dim": 16}
    model = model_of("gemma2", **options)
    shape = geometry.measure(model, CONTEXT, 4)
    layers = tracing.observe(model, shape)
    assert [layer.window for layer in layers] == [24, None]
    with swapped(model, CONTEXT):
        return model, {o: tracing.trace(model, shape, o, layers) for o in ("onnx", "gqa")}


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


def test_an_untrained_model_is_sharpened_until_its_logits_spread():
    model = model_of("llama", scale=0.02)
    sharp = parity.sharpened(model, 512)
    tokens = np.arange(16)
    past = parity._no_rows(model, tokens)
    assert parity.spread(parity.reference(model, tokens, past)) < 1
    assert parity.spread(parity.reference(sharp, tokens, past)) >= 2


def test_an_untrained_pair_is_exported_and_compared_with_larger_weights_too(tmp_path):
    draft, target = make_pair(tmp_path, "llama", scale=0.02, context=64)
    progress = Progress()
    bundle = export(draft, target, tmp_path / "bundle", progress=progress)
    assert [note for note in progress.notes if "as an untrained model's" in note]
    assert bundle.target.parity["onnx"].logits_std >= 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "draft", "target", "tokenizer"]


def test_late_positions_of_a_long_context_are_compared(tmp_path):
    model = make_model(make_config("llama", kv_heads=2, context=1400, layers=1))
    player = traced(model, tmp_path, context=1400)
    assert parity.positions_played(player.geometry, 1) == [(0, 256), (1352, 1400)]
    found = measure(model, player)
    assert found.num_positions == 304


def test_large_models_are_compared_with_one_session_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(playing, "SHARED_BYTES", 0)
    model = model_of("gpt2")
    player = traced(model, tmp_path)
    found = measure(model, player)
    assert len(player._sessions) == 1
    assert found.row_independent_lengths == (1, 2, 3, 5, 9, 64)


def test_what_attention_cannot_express_is_refused(tmp_path, monkeypatch):
    model = model_of()
    code = sys.modules[type(model).__module__]
    plain = code.LlamaAttention.forward

    def unusual(self, *args, **kwargs):
        return plain(self, *args, surprise=1.0, **kwargs)

    monkeypatch.setattr(code.LlamaAttention, "forward", unusual)
    with pytest.raises(ExportError, match="attention has surprise"):
        traced(model, tmp_path)


def test_weights_in_half_precision_give_the_bits_of_float32(pairs, tmp_path):
    bundle = pairs.bundle("bfloat16")
    model = tracing_source(pairs)
    player = traced(model, tmp_path)
    shape = player.geometry
    context = bundle.context_length
    other = Player(
        bundle.folder / "target", graphs.lengths(4, context), geometry.measure(model, context, 4)
    )
    tokens = np.arange(20)
    assert shape.padded_vocab_size == 512
    assert np.array_equal(player.run("decoder", tokens, 0), other.run("decoder", tokens, 0))


def tracing_source(pairs):
    from transformers import AutoModelForCausalLM

    folder = pairs.checkpoint("bfloat16")[1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation("eager")
    return model.eval()


def test_onnx_runtime_folds_the_casts_of_the_weights(pairs, tmp_path):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    playing.open_session(pairs.bundle("bfloat16").folder / "target/decoder.onnx", options)
    names = [node.op_type for node in ir.load(options.optimized_model_filepath).graph]
    assert names.count("Cast") == 0
