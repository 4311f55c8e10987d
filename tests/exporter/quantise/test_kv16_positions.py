"""Caches in float16 where scores have a bias by position."""

import numpy as np
import pytest

from architectures import ARCHITECTURES
from checkpoints import make_model, make_tokenizer, save
from specedge.exporter import export
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

CONTEXT, CHUNK = 1024, 62


def logits(bundle, ops, tokens):
    model = OrtModel(bundle, bundle.target, Device(), ops)
    chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]
    return np.concatenate([model.forward(chunk).array().copy() for chunk in chunks])


def export_alibi(folder, **options):
    """A pair of a model whose scores have a bias by position, with caches in float16, too."""
    config = ARCHITECTURES["bloom"][1]()
    config.max_position_embeddings = CONTEXT
    model = save(make_model(config), make_tokenizer(folder / "tokenizer"), folder / "model")
    return export(
        "self:1", model, folder / "bundle", ops="onnx", cache="fp16", max_length=CONTEXT, **options
    )


@pytest.mark.slow
def test_far_positions_of_alibi_are_told_apart_as_near_ones_are(tmp_path):
    bundle = export_alibi(tmp_path)
    tokens = np.random.default_rng(0).integers(1, 500, 16 * CHUNK).tolist()
    wanted, found = (logits(bundle, ops, tokens) for ops in ("onnx", "onnx-kv16"))
    errors = np.abs(found - wanted).max(1) / np.abs(wanted).max()
    near, far = errors[: 4 * CHUNK].max(), errors[-4 * CHUNK :].max()
    assert far < 1.5 * near
