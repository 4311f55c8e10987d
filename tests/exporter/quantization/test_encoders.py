"""Quantization of encoders, and of the products that make constant states."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

from cases import exhaustive, slow
from encoder_decoders import make_encoder_decoder
from specedge.errors import ExportError
from specedge.exporter import export
from specedge.exporter.progress import Progress
from specedge.exporter.quantization.float_model import FloatModel
from specedge.exporter.quantization.matrices import matrix_groups
from specedge.exporter.quantization.quantizer import MAX_DIVERGENCE, quantize
from specedge.exporter.quantization.texts import CalibrationTexts
from specedge.exporter.quantization.weights_writer import WeightsWriter
from specedge.exporter.verification.source_states import SourceGraphs

FAMILIES = ["bart", *map(slow, ("t5", "flan_t5", "whisper")), *map(exhaustive, ("umt5", "t5gemma"))]
MAX_ERROR = {"int8": 0.1, "int8-block": 0.1, "int4": 0.5}  # relative to the largest value
GRAPHS = {"decoder", "step", "catchup", "verify", "prefill", "encoder", "open"}


@pytest.fixture(scope="module", params=FAMILIES)
def in_float(request, tmp_path_factory):
    """A float bundle; smaller matrices make random layers less chaotic."""
    folder = tmp_path_factory.mktemp(request.param)
    file = make_encoder_decoder(request.param, folder / "target") / "model.safetensors"
    weights = {name: x if x.ndim < 2 else 0.4 * x for name, x in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    return export(None, folder / "target", folder / "bundle", precision="fp32", ops="onnx")


@pytest.fixture
def quantized(in_float, tmp_path):
    """Function that quantizes the target; returns its folder and its entry."""
    random = np.random.default_rng(0)
    texts = CalibrationTexts("noise", *([random.integers(0, 500, 60) for _ in "123"] for _ in "12"))

    def target(precision, suffixes=()):
        folder = shutil.copytree(in_float.folder / "target", tmp_path / "target")
        graphs = tuple(g for g in in_float.target.graphs if g.name in GRAPHS)
        models = {"target": replace(in_float.target, graphs=graphs)}
        (entry,), file = quantize(
            models, folder, precision, texts, None, Progress(), suffixes, "gptq", 5.0, [], {}
        )  # fmt: skip
        return folder, entry, file.size

    return target


def states(folder, model, suffix=""):
    """Hidden states and constant states of a random source."""
    paths = (folder / f"{name}{suffix}.onnx" for name in ("encoder", "open"))
    names = [f"present.{state.name}" for state in model.constants]
    graphs = SourceGraphs(*paths, names, packed=True)
    shape, random = model.encoder.source_shape, np.random.default_rng(1)
    if shape is None:
        source = random.integers(0, 200, 23)
    else:
        source = random.standard_normal(shape, np.float32)
    return [graphs.hidden(source), *graphs.states(source).constants]


def check(folder, in_float, precision, suffix=""):
    model = in_float.target
    for name in ("encoder", "open"):
        graph = ir.load(folder / f"{name}{suffix}.onnx").graph
        assert {node.op_type for node in graph} & {"MatMulInteger", "MatMulNBits"}
        assert matrix_groups(graph) == []
    pairs = zip(
        states(folder, model, suffix), states(in_float.folder / "target", model), strict=True
    )
    for actual, expected in pairs:
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        assert 0 < error < MAX_ERROR[precision]


@pytest.mark.parametrize("precision", MAX_ERROR)
def test_encoder_and_constant_states_are_quantized(in_float, quantized, precision):
    folder, _, size = quantized(precision)
    check(folder, in_float, precision)
    assert size < in_float.files["target/weights.bin"].size * 0.4


def test_graph_variants_share_the_integers_of_the_encoder(in_float, quantized):
    folder, entry, size = quantized("int8", ("kv16", "fp16"))
    assert len(entry.quantization) > 1
    for ops, report in entry.quantization.items():
        assert report.num_left == 0
        check(folder, in_float, "int8", "" if ops == "onnx" else f"-{ops}")
    assert size < in_float.files["target/weights.bin"].size * 0.4


def test_target_with_a_damaged_encoder_is_refused(quantized, monkeypatch):
    write = FloatModel.write_others

    def damaged(self, folder, ops, change):
        def damage(graph_model):
            change(graph_model)
            graph, output = graph_model.graph, graph_model.graph.outputs[0]
            if output.name == "hidden":
                output.name = "whole"
                node = ir.node("Neg", [output])
                node.outputs[0].name, node.outputs[0].dtype = "hidden", output.dtype
                node.outputs[0].shape = output.shape
                graph.append(node)
                graph.outputs[0] = node.outputs[0]

        write(self, folder, ops, damage)

    folder, entry, _ = quantized("int8")
    (report,) = entry.quantization.values()
    monkeypatch.setitem(MAX_DIVERGENCE, "int8", 2 * report.divergence)
    shutil.rmtree(folder)
    monkeypatch.setattr(FloatModel, "write_others", damaged)
    with pytest.raises(ExportError, match="KL divergence"):
        quantized("int8")


def test_weights_of_two_files_at_the_same_offset_are_both_stored(tmp_path):
    with WeightsWriter(tmp_path) as store:
        values = {name: np.full(3, i, np.float32) for i, name in enumerate("ab")}
        tensors = [
            store.reading(tmp_path / name).array(("table", 64), lambda x=x: x, "table")
            for name, x in values.items()
        ]
        again = store.reading(tmp_path / "a").array(("table", 64), lambda: values["b"], "table")
    assert [tensor.numpy().tolist() for tensor in tensors] == [[0] * 3, [1] * 3]
    assert again is tensors[0]
