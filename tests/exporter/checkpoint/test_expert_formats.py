"""Bundles of MXFP4 and GPTQ mixture-of-experts models with unmodified expert weights."""

import numpy as np
import pytest
import torch
from formats import load, make, quantise_mxfp4, stored_numbers

from packed import Scheme, quantize_checkpoint
from specedge.exporter import export
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

TOKENS = list(range(3, 40))


def export_and_compare(folder, model, tmp_path):
    """Export a checkpoint; return the bundle, and its error with float activations."""
    options = {"ops": "gqa", "compute": "fp32", "max_length": 64}
    bundle = export(None, folder, tmp_path / "bundle", **{"ops": "all"} | options)
    logits = OrtModel(bundle, bundle.target, Device(), "gqa-fp32").forward(TOKENS)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    actual = np.stack([logits[i].array() for i in range(len(TOKENS))])
    expected = expected[:, : actual.shape[1]]
    return bundle, np.abs(actual - expected).max() / np.abs(expected).max()


@pytest.mark.slow
def test_mxfp4_experts_are_kept(tmp_path):
    folder, model = make(tmp_path, "gpt_oss")
    quantise_mxfp4(folder, model)
    bundle, error = export_and_compare(folder, model, tmp_path)
    report = bundle.target.quantization["gqa"]
    assert report.types["mxfp4"].bundle_bits == 9
    assert error <= 2e-5


@pytest.mark.slow(exhaustive=True)
def test_gptq_experts_are_kept(tmp_path):
    folder, _ = make(tmp_path, "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    quantize_checkpoint(folder, Scheme(), lambda key: ".experts." in key)
    model = make(tmp_path / "float", "qwen3_moe", hidden_size=64, moe_intermediate_size=64)[1]
    model.load_state_dict(stored_numbers(load(folder)[0]))
    bundle, error = export_and_compare(folder, model, tmp_path)
    (size,) = bundle.target.quantization["gqa"].types.values()
    assert size.bundle_bits == 5.125  # with zero points of 4 bits
    assert error <= 2e-5
