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
    geometry,
    graphs,
    one_model,
    parity,
    parts,
    playing,
    reference,
    tracing,
)
from specedge.exporter.checkpoints import Loaded
from specedge.exporter.playing import Fill, Pass, Player, Rows
from specedge.exporter.sources import Sources
from specedge.exporter.swaps import swapped

CONTEXT = 96


def traced(model, folder, ops="onnx", context=CONTEXT):
    loaded = Loaded(model, "float32", Sources())
    part = one_model.measured("target", loaded, context, 4, 512, folder, Progress())
    one_model.write(part, ops)
    return Player(folder, part.lengths, part.shape, ops)


def measure(model, player):
    references = reference.references(model, Sources(), player.geometry, 512)
    found = parity.measure("target", references, player)
    assert found.differing == []
    return found.parity


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
    assert [note for note in notes if "last bits" in note or "no onnx" in note] == []


def test_caches_are_updated_in_place(pairs):
    model = pairs.bundle("llama").target
    folder = pairs.bundle("llama").folder / "target"
    shape = geometry.Geometry(
        model.context_length, model.cache.capacity, model.padded_vocab_size, model.cache.layers
    )
    player = Player(folder, graphs.lengths(4, model.context_length), shape)
    zeros = [np.zeros(dims[1:], np.float32) for dims in shape.cache_shapes()]
    actions = [Fill(zeros.__getitem__), Pass("decoder", np.arange(7), 3), Rows(0, shape.capacity)]
    rows = player.play(actions)[2][0]
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
    sharp = reference.sharpened(model, Sources(), 512)
    tokens = np.arange(16)
    assert reference.spread(reference.reference(model, tokens)) < 1
    assert reference.spread(reference.reference(sharp, tokens)) >= 2


def test_a_matrix_of_zeros_is_left_as_it_is():
    model = model_of("llama", scale=0.02)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    sharp = reference.sharpened(model, Sources(), 512)
    assert np.isfinite(reference.reference(sharp, np.arange(16)).logits).all()


def test_an_untrained_pair_is_exported_and_compared_with_larger_weights_too(tmp_path):
    draft, target = make_pair(tmp_path, "llama", scale=0.02, context=64)
    progress = Progress()
    bundle = export(draft, target, tmp_path / "bundle", progress=progress)
    assert [note for note in progress.notes if "compared with larger weights" in note]
    assert bundle.target.parity["onnx"].logits_std >= 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "draft", "target", "tokenizer"]


def test_late_positions_of_a_long_context_are_compared(tmp_path):
    model = make_model(make_config("llama", kv_heads=2, context=1400, layers=1))
    player = traced(model, tmp_path, context=1400)
    assert reference.positions_played(player.geometry, 1) == [(0, 256), (1352, 1400)]
    found = measure(model, player)
    assert found.num_positions == 304


@pytest.fixture
def in_parts(monkeypatch):
    """Small models are played as large ones are."""
    monkeypatch.setattr(playing, "WHOLE_BYTES", 0)
    monkeypatch.setattr(parts, "PART_BYTES", 100_000)


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_in_parts_is_found_as_near_as_a_whole_one(kind, ops, tmp_path, in_parts):
    model = model_of(kind)
    player = traced(model, tmp_path, ops)
    assert player.num_stages > 3
    found = measure(model, player)
    assert 0 < found.logits_error <= 5e-6
    assert 0 < found.cache_error <= 5e-6
    assert found.row_independent_lengths == (1, 2, 3, 5, 9, 64)
    assert not (tmp_path / parts.SCRATCH).exists()


def test_parts_in_half_precision_compute_what_the_whole_computes(pairs, in_parts, monkeypatch):
    bundle = pairs.bundle("bfloat16")
    model = bundle.target
    shape = geometry.Geometry(
        model.context_length, model.cache.capacity, model.padded_vocab_size, model.cache.layers
    )
    folder, lengths = bundle.folder / "target", graphs.lengths(4, model.context_length)
    split = Player(folder, lengths, shape)
    monkeypatch.setattr(playing, "WHOLE_BYTES", 1 << 40)
    whole = Player(folder, lengths, shape)
    zeros = [np.zeros(dims[1:], np.float32) for dims in shape.cache_shapes()]
    actions = [Fill(zeros.__getitem__), Rows(0, 9)]
    for name in ("decoder", "verify", "step"):
        tokens = np.arange(5 if name != "step" else 1)
        actions.append(Pass(name, tokens, 2, packed=True))
    actions.append(Rows(0, 9))
    found, wanted = split.play(actions), whole.play(actions)
    assert split.num_stages > 3
    for a, b in zip(found[2:5], wanted[2:5], strict=True):
        assert np.array_equal(a, b)
    assert all(map(np.array_equal, found[5], wanted[5]))


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize("fault", [wrong_scale, position_off_by_one, stale_row])
def test_a_planted_fault_in_a_model_in_parts_is_found(
    fault, ops, gemma, tmp_path, in_parts, monkeypatch
):
    test_a_planted_fault_is_a_parity_error(fault, ops, gemma, tmp_path, monkeypatch)


def test_a_file_with_other_bits_is_found_in_parts_too(tmp_path, in_parts):
    model = model_of("llama")
    player = traced(model, tmp_path)
    step = ir.load(tmp_path / "step.onnx")
    node = next(n for n in step.graph if n.op_type == "Attention")
    scale = node.attributes["scale"].as_float()
    node.attributes["scale"] = ir.AttrFloat32("scale", scale * (1 + 1e-6))
    ir.save(step, tmp_path / "step.onnx")
    player = Player(tmp_path, list(player.lengths.values()), player.geometry)
    references = reference.references(model, Sources(), player.geometry, 512)
    assert parity.measure("target", references, player).differing == ["step"]


def test_of_large_models_the_start_and_the_end_are_compared():
    shape = geometry.Geometry(1024, 1032, 512, ())
    assert reference.positions_played(shape, 50_000_000) == [(0, 1024)]
    assert reference.positions_played(shape, 1_500_000_000) == [(0, 76), (992, 1024)]


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
    assert shape.padded_vocab_size == 512
    zeros = [np.zeros(dims[1:], np.float32) for dims in shape.cache_shapes()]
    actions = [Fill(zeros.__getitem__), Pass("decoder", np.arange(20), 0)]
    found, wanted = (p.play(actions)[1] for p in (player, other))
    assert np.array_equal(found, wanted)


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
