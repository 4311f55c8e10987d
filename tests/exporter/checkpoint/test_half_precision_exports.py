"""Conversion of weights to half precision at load: `--precision fp16`, `bf16`."""

import numpy as np
import pytest
import torch

import specedge
from cases import exhaustive
from checkpoints import make_config, make_model, make_tokenizer, save
from specedge.errors import CheckpointError
from specedge.exporter import Progress, export


def saved(folder, change=lambda model: model):
    model = change(make_model(make_config("llama", kv_heads=2, context=96, layers=7)))
    return model, save(model, make_tokenizer(folder / "tokenizer"), folder / "model")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp16", "float16"), exhaustive("bf16", "bfloat16")],
)
def test_bundle_equals_model_in_half_precision(tmp_path, name, dtype):
    model, folder = saved(tmp_path)
    progress = Progress()
    bundle = export(None, folder, tmp_path / "b", precision=name, ops="onnx", progress=progress)
    for made in bundle.models.values():
        assert made.weights_dtype == dtype
        assert bundle.files[made.weights].size < 2.2 * made.num_parameters
    assert f"target: its matrices are converted to {dtype}" in progress.notes
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(parameter.to(getattr(torch, dtype)).float())
        tokens = [1, 2, 3, 4, 5]
        wanted = model.float()(torch.tensor([tokens])).logits[0].numpy()
    found = specedge.load(bundle.folder).target.forward(tokens).array()
    assert np.abs(found - wanted[:, : found.shape[1]]).max() < 1e-4


def test_overflow_of_half_precision_is_refused(tmp_path):
    def change(model):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
        return model

    _, folder = saved(tmp_path, change)
    with pytest.raises(
        CheckpointError, match=r"1e\+06 exceeds the range of torch.float16; choose another"
    ):
        export(folder, folder, tmp_path / "b", precision="fp16", ops="onnx")
    assert not (tmp_path / "b").exists()
