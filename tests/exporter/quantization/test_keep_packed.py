"""Bundles of GPTQ, AWQ and compressed-tensors checkpoints with unmodified weights."""

import numpy as np
import onnx
import pytest
import torch

import specedge
from packed import Scheme, make_packed
from quantized import PROMPTS, check_greedy
from specedge.exporter import Progress, export
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

SCHEMES = {
    "gptq, act-order": (Scheme(reordered=True), "GPTQ int4, groups of 32", 5.125),
    "gptq, symmetric": (
        Scheme(symmetric=True, group_size=128), "GPTQ int4, groups of 128", 5,
    ),
    "awq": (Scheme("awq", group_size=64), "AWQ int4, groups of 64", 5.125),
    "autoround": (Scheme("auto_round", group_size=128), "AutoRound int4, groups of 128", 5.125),
    "compressed-tensors, int8": (
        Scheme("int-quantized", bits=8, group_size=-1, symmetric=True, scale_type=torch.bfloat16),
        "compressed-tensors int8, per channel", 8.5,
    ),
    "compressed-tensors, 8 bits": (
        Scheme("pack-quantized", bits=8, group_size=32), "compressed-tensors int8, groups of 32",
        9.25,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("name", SCHEMES)
def test_bundle_equals_the_published_model(name, tmp_path):
    scheme, type_name, bits = SCHEMES[name]
    hidden = max(128, 2 * scheme.group_size)
    folder, model = make_packed(tmp_path, scheme, hidden=hidden, context=96)
    progress = Progress()
    options = {"ops": "gqa", "compute": "fp32", "precision": "keep"}
    bundle = export(
        "self:1", folder, tmp_path / "bundle", progress=progress, **{"ops": "all"} | options
    )
    assert [model.weights_dtype for model in bundle.models.values()] == ["keep", "keep"]
    report = bundle.target.quantization["gqa"]
    assert report.types[type_name].bundle_bits == bits
    assert f"in {type_name}: " in report.summary()
    graph = onnx.load(bundle.path(bundle.target.graph("decoder", "gqa").file)).graph
    ops = [node.op_type for node in graph.node]
    assert ops.count("MatMulNBits") == 2 * 4

    tokens = list(range(3, 40))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    written = OrtModel(bundle, bundle.target, Device(), "gqa-fp32")
    logits = written.forward(tokens)
    actual = np.stack([logits[i].array() for i in range(len(tokens))])
    assert np.abs(actual - expected[:, : actual.shape[1]]).max() <= 2e-5 * np.abs(expected).max()

    pipeline = specedge.load(bundle.folder)
    for prompt in PROMPTS:
        check_greedy(pipeline, prompt, 24, 3)
    for model_entry in bundle.models.values():
        lost = {1, 2, 3, 5, 9, 18, 36, 64} - {*model_entry.parity["gqa"].invariant_lengths}
        assert lost <= {1}


@pytest.mark.slow
def test_weights_are_kept_by_default(tmp_path):
    folder, _ = make_packed(tmp_path, Scheme(symmetric=True), layers=1)
    bundle = export(None, folder, tmp_path / "bundle", max_length=32, ops="onnx")
    assert bundle.target.weights_dtype == "keep"


@pytest.mark.slow
def test_packed_checkpoint_can_be_quantized_again(tmp_path):
    folder, _ = make_packed(tmp_path, Scheme("awq"))
    options = {"max_length": 40, "ops": "onnx", "rounding": "nearest", "precision": "int8"}
    bundle = export(None, folder, tmp_path / "bundle", **{"ops": "all"} | options)
    assert bundle.target.weights_dtype == "int8"
