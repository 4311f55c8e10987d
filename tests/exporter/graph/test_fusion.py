"""Fused operators in the graph variant `gqa`: fewer nodes for the same function."""

import shutil
from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from architectures import ARCHITECTURES
from cases import exhaustive, slow
from checkpoints import make_model
from comparing import CONTEXT, computed, measure, model_of, traced
from specedge.errors import ParityError
from specedge.exporter.graph import graphs, rewrites
from specedge.exporter.graph.fusion import fuse
from specedge.exporter.graph.nodes import GqaInput
from specedge.exporter.verification.runner import FillNoise, PassAction, ReadRows, Runner


def ops_of(graph):
    return Counter(node.op_type for node in graph)


@pytest.fixture(scope="module")
def llama(traced_model):
    return traced_model("llama", "gqa")


@pytest.fixture(scope="module")
def references(llama):
    return computed(*llama)


def load(runner, name):
    return ir.load(runner.folder / name).graph


def test_residual_norms_and_rotary_embedding_are_fused_in_every_file(llama):
    _, runner = llama
    for file in runner.files.values():
        ops = ops_of(load(runner, file.file_name("gqa")))
        assert ops["RotaryEmbedding"] == 0
        # With logits also the last norm. A prefill stops after the last layer's cache is written.
        assert ops["SkipSimplifiedLayerNormalization"] == (4 if file.logits else 2)
        assert ops["SimplifiedLayerNormalization"] == 1  # of the embedding
    assert ops_of(load(runner, "source-gqa.onnx"))["RotaryEmbedding"] == 4


def test_standard_graph_variant_has_only_standard_operators(traced_model):
    _, runner = traced_model("llama", "onnx")
    assert {node.domain for node in load(runner, "decoder.onnx")} == {""}


def test_fused_graphs_match_model_at_every_pass_length(llama, references):
    found = measure(*llama, references=references)
    assert found.structure_error < 1e-12
    assert {1, 2, 3, 5} <= {*found.invariant_lengths}


def test_fused_graphs_match_unfused_graph(llama):
    _, fused = llama
    source = Runner(fused.folder, [graphs.GraphFile("source", None)], fused.geometry, "gqa")
    actions = [FillNoise(0, CONTEXT), PassAction("", np.arange(30), 0), ReadRows(0, 30)]
    results = []
    for runner, name in ((fused, "decoder"), (source, "source")):
        actions[1] = PassAction(name, np.arange(30), 0)
        *_, logits, rows = runner.run(actions)
        results.append([logits, *rows])
    for ours, theirs in zip(*results, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("gpt2", {"SkipLayerNormalization": 5, "FastGelu": 2}),
        slow("phi", {"SkipLayerNormalization": 2, "FastGelu": 2}),
        slow("gpt_neox", {"SkipLayerNormalization": 2, "BiasGelu": 2}),
        slow("llama", {"SkipSimplifiedLayerNormalization": 4, "QuickGelu": 2}),
    ],
)
def test_fusions_for_gpus_match_unfused_graph(name, fused, tmp_path):
    config = ARCHITECTURES[name][1]()
    config.num_hidden_layers = 2
    whole = traced(make_model(config), tmp_path, "gqa")
    model = ir.load(tmp_path / "source-gqa.onnx")
    rewrites.fuse_sigmoids(model)
    fuse(model, is_for_gpu=True)
    operators = ops_of(model.graph)
    assert {name: operators[name] for name in fused} == fused
    ir.save(model, tmp_path / "fused-gqa.onnx")
    results = []
    for file in ("source", "fused"):
        runner = Runner(tmp_path, [graphs.GraphFile(file, None)], whole.geometry, "gqa")
        actions = [FillNoise(0, CONTEXT), PassAction(file, np.arange(30), 0, 3), ReadRows(0, 30)]
        *_, logits, rows = runner.run(actions)
        results.append([logits, *rows])
    for ours, theirs in zip(*results, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


def wrong_table(graph):
    """Cosines a position late."""
    nodes = [node for node in graph if "do_rotary" in node.attributes]
    value = GqaInput.COS_CACHE.of(nodes[0])
    table = ir.tensor(np.roll(value.const_value.numpy(), 1, axis=0))
    value.const_value = table


def wrong_norm(graph):
    for node in graph:
        if node.op_type == "SkipSimplifiedLayerNormalization":
            epsilon = node.attributes["epsilon"].as_float()
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 10 * epsilon)


def no_rotation(graph):
    for node in graph:
        node.attributes.pop("do_rotary", None)


@pytest.mark.parametrize("fault", [wrong_table, wrong_norm, no_rotation])
def test_fault_in_fused_operator_is_parity_error(fault, llama, references, tmp_path):
    model, runner = llama
    folder = shutil.copytree(runner.folder, tmp_path / "model")
    runner = Runner(folder, list(runner.files.values()), runner.geometry, "gqa")
    for file in runner.files.values():
        path = runner.folder / file.file_name("gqa")
        changed = ir.load(path)
        fault(changed.graph)
        ir.save(changed, path)
    with pytest.raises(ParityError):
        measure(model, runner, references=references)


@pytest.mark.parametrize(
    ("kind", "options", "rotated", "norms"),
    [
        # Rotary embedding inside takes multiples of 16.
        slow("mistral", {"head_size": 8}, 4, 4),
        exhaustive("qwen2", {}, 0, 4),
        ("gpt2", {}, 0, 0),
    ],
)
def test_nodes_that_do_not_match_are_unchanged(kind, options, rotated, norms, tmp_path):
    ops = ops_of(load(traced(model_of(kind, **options), tmp_path, "gqa"), "decoder-gqa.onnx"))
    assert ops["RotaryEmbedding"] == rotated
    assert ops["SkipSimplifiedLayerNormalization"] == norms


@pytest.mark.parametrize(
    ("name", "hidden_size", "rotated"),
    [("phi", 128, 0), slow("phi", 64, 4), slow("stablelm", 256, 0), slow("gemma3_text", 64, 0)],
)
def test_partly_rotated_and_normalized_heads_are_rotated_inside_attention(
    name, hidden_size, rotated, tmp_path
):
    config = ARCHITECTURES[name][1]()
    config.hidden_size = hidden_size  # attention rotates multiples of 16 channels
    model = make_model(config)
    runner = traced(model, tmp_path, "gqa")
    assert ops_of(load(runner, "decoder-gqa.onnx"))["RotaryEmbedding"] == rotated
    assert measure(model, runner).structure_error < 1e-12
