"""Graphs that old versions of ONNX Runtime load."""

import shutil

import numpy as np
import onnx_ir as ir
import pytest

from architectures import ARCHITECTURES
from checkpoints import make_model
from comparing import CONTEXT, traced
from specedge.exporter.graph.opset import OLD_OPSET, lower_opset
from specedge.exporter.verification.runner import FillNoise, PassAction, ReadRows, Runner


def outputs(runner):
    actions = [FillNoise(0, CONTEXT), PassAction("decoder", np.arange(30), 0), ReadRows(0, 30)]
    *_, logits, rows = runner.run(actions)
    return [logits, *rows]


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "qwen3"])
def test_lowered_graphs_give_bitwise_equal_outputs(kind, tmp_path_factory):
    """Rotary embedding is a node of its own before fusion; gpt_neox's is partial."""
    model = make_model(ARCHITECTURES[kind][1]())
    model.set_attn_implementation("eager")
    source = traced(model, tmp_path_factory.mktemp("new"), "gqa", CONTEXT)
    files = [f.source for f in source.files.values() if f.length is None]
    new = Runner(source.folder, files, source.geometry, "gqa")
    folder = shutil.copytree(source.folder, tmp_path_factory.mktemp("old") / "model")
    lowered = ir.load(folder / files[0].file_name("gqa"))
    assert lowered.graph.opset_imports[""] > OLD_OPSET
    lower_opset(lowered)
    assert lowered.graph.opset_imports[""] == OLD_OPSET
    ir.save(lowered, folder / files[0].file_name("gqa"))
    old = Runner(folder, files, source.geometry, "gqa")
    for ours, theirs in zip(outputs(old), outputs(new), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_only_graphs_with_new_operators_have_a_new_opset(traced_model):
    for ops, is_old in (("gqa", True), ("onnx", False)):
        _, runner = traced_model("llama", ops)
        for file in runner.files.values():
            graph = ir.load(runner.folder / file.file_name(ops)).graph
            assert (graph.opset_imports[""] == OLD_OPSET) == is_old
            assert is_old or not {node.op_type for node in graph} & {"SimplifiedLayerNormalization"}


def test_graphs_that_contain_lowered_ones_are_lowered(traced_model):
    """Multi-step draft graphs are built at a new opset from decoders at the old one."""
    _, runner = traced_model("llama", "gqa")
    model = ir.load(runner.folder / "decoder-gqa.onnx")
    model.graph.opset_imports[""] = OLD_OPSET + 4
    lower_opset(model)
    assert model.graph.opset_imports[""] == OLD_OPSET
