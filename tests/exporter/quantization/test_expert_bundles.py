"""Bundles of mixtures in int4: for engines, for hosts, and for an ONNX Runtime that is too old."""

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph

from architectures import ARCHITECTURES
from checkpoints import make_model, make_tokenizer, save
from specedge.errors import BundleError
from specedge.exporter import embed, export
from specedge.runtime.backend import sessions
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.self_test import exact_device
from specedge.runtime.backend.sessions import Device

INTEGERS = {TensorProto.INT4, TensorProto.INT8, TensorProto.UINT8}
TOKENS = [5, 6, 7, 8, 300, 12]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    model = make_model(ARCHITECTURES["mixtral"][1]())
    target = save(model, make_tokenizer(folder / "tokenizer"), folder / "target")
    # With the integers of GPTQ a router's near-tie turns one token's choice between graph variants.
    return export(
        "self:1", target, folder / "bundle", precision="int4", compute="qdq", rounding="nearest"
    )


def graphs(bundle, ops):
    """Every graph of a graph variant, without its weights."""
    for graph in (graph for model in bundle.models.values() for graph in model.graphs):
        if graph.ops == ops:
            yield onnx.load(bundle.path(graph.file), load_external_data=False).graph


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ops", "readers"),
    [
        ("gqa", {"QMoE", "MatMulNBits", "Gather"}),
        ("onnx", {"MatMulNBits", "Gather", "Transpose"}),  # computed once, as a session opens
        ("onnx-qdq", {"DequantizeLinear"}),
    ],
)
def test_expert_weights_are_consumed_by_expected_operators(bundle, ops, readers):
    found: Counter[str] = Counter()
    for graph in graphs(bundle, ops):
        stored = {t.name for t in graph.initializer if t.data_type in INTEGERS}
        found.update(node.op_type for node in graph.node if stored & {*node.input})
        assert ops != "onnx-qdq" or not any(node.domain for node in graph.node)
    assert found.keys() - {"MatMulInteger", "MatMulIntegerToFloat", "QuantizeLinear"} == readers
    assert found.keys() <= readers or ops != "onnx-qdq"


@pytest.mark.slow
def test_qdq_experts_match_cpu_experts_with_quantized_inputs(bundle, monkeypatch):
    monkeypatch.setattr(sessions, "FLOAT_PRODUCTS", (sessions.FLOAT_PRODUCTS[0], "4"))
    device = exact_device(bundle.models.values(), Device())
    for model in bundle.models.values():
        plain, qdq = (OrtModel(bundle, model, device, ops) for ops in ("onnx", "onnx-qdq"))
        wanted, found = (one.forward(TOKENS).array() for one in (plain, qdq))
        off = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert off < 0.06, off


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fused", "split"])
def test_hosts_state_minimum_onnxruntime_with_batch_invariant_experts(bundle, tmp_path, layout):
    made = embed(bundle.folder, output=tmp_path / "hosted", layout=layout)
    assert made.hosts.oldest_onnxruntime == "1.31"


def test_unsupported_onnx_runtime_for_experts_is_one_line_error(monkeypatch, tmp_path):
    def refuse(self, ort, path):
        raise InvalidGraph("Error Unrecognized attribute: accuracy_level for operator QMoE")

    monkeypatch.setattr(Device, "_open", refuse)
    with pytest.raises(BundleError) as caught:
        Device().open(tmp_path / "decoder.onnx")
    said = str(caught.value)
    assert "its 4-bit experts need ONNX Runtime 1.31 or later, but " in said
    assert said.endswith("is installed; upgrade it, or use --ops onnx if the bundle has it")
    assert "\n" not in said
