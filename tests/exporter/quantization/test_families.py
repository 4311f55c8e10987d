"""Greedy int8 text of every model family equals plain decoding in every graph variant."""

import math
from collections import Counter

import onnx
import pytest

import specedge
from architectures import ARCHITECTURES
from checkpoints import make_model, make_tokenizer, save
from fakes import Recalling
from specedge.exporter import export

SLOW = "mixtral"  # experts in a fused node
NAMES = [
    pytest.param(
        name, marks=pytest.mark.slow if name == SLOW else pytest.mark.slow(exhaustive=True)
    )
    for name in ARCHITECTURES
]


def in_float32(bundle, ops):
    """The share of a target's numbers that a graph reads as floats, scales left out."""
    path = bundle.path(bundle.target.graph("decoder", ops).file)
    sizes = Counter()
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        if not tensor.name.endswith((".scales", ".scales.flat")):
            sizes[tensor.data_type == onnx.TensorProto.FLOAT] += math.prod(tensor.dims)
    return sizes[True] / sizes.total()


@pytest.mark.parametrize("name", NAMES)
def test_int8_text_equals_target_only_text(name, tmp_path):
    model = make_model(ARCHITECTURES[name][1]())
    target = save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "target")
    bundle = export("self:1", target, tmp_path / "bundle", precision="int8")
    for ops, report in bundle.target.quantization.items():
        assert {1, 2, 3, 5, 9, 18, 36, 64} <= {*bundle.target.parity[ops].invariant_lengths}
        assert report.perplexity == pytest.approx(report.original_perplexity, rel=0.05)
        assert report.divergence < 0.2
        if bundle.target.num_experts:
            assert not [line for line in report.exceptions if "experts_" in line]
            assert in_float32(bundle, ops) < 0.1
    assert bundle.shares_weights
    pipeline = specedge.load(bundle.folder)
    request = {"prompt": "def parse(", "max_new_tokens": 32, "ignore_eos": True, "logprobs": 1}
    plain = pipeline.generate(**request, num_draft_tokens=0)
    for drafter in ("model", Recalling(plain.tokens)):
        found = pipeline.generate(**request, num_draft_tokens=4, drafter=drafter)
        assert found.tokens == plain.tokens
        assert found.logprobs == plain.logprobs
    assert found.stats.num_accepted > 8
