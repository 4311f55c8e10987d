"""Bundles of GGUF files with unmodified quantized weights."""

import numpy as np
import onnx
import pytest
import torch

import specedge
from checkpoints import make_config, make_model
from ggufs import Kind, write
from quantized import PROMPTS, check_greedy
from specedge.bundle import Bundle
from specedge.errors import ExportError
from specedge.exporter import Progress, bundle_export, export
from specedge.exporter.quantization.quantizer import quantize
from specedge.exporter.request import ExportRequest
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

OPTIONS = {"ops": "gqa", "compute": "fp32"}


class KeptBundle:
    def __init__(self, folder):
        self.path, self.progress = folder / "model.gguf", Progress()
        self.numbers = write(self.path, Kind.Q4_1, folder, "llama", context=96)
        self.bundle = export(
            "self:1", self.path, folder / "bundle", progress=self.progress, **OPTIONS
        )
        self.pipeline = specedge.load(self.bundle.folder)

    def logits(self, ops, tokens):
        model = OrtModel(self.bundle, self.bundle.target, Device(), ops)
        logits = model.forward(tokens)
        return np.stack([logits[i].array() for i in range(len(tokens))])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return KeptBundle(tmp_path_factory.mktemp("keep"))


def test_weights_of_gguf_file_are_kept_by_default(made):
    bundle = Bundle.read(made.bundle.folder)
    assert [model.weights_dtype for model in bundle.models.values()] == ["keep", "keep"]
    report = bundle.target.quantization["gqa"]
    assert report.types["Q4_1"].file_bits == 5
    assert report.types["Q4_1"].bundle_bits == 6.125  # with zero points of 4 bits
    assert report.num_left == 0
    graph = onnx.load(bundle.path(bundle.target.graph("decoder", "gqa").file)).graph
    ops = [node.op_type for node in graph.node]
    assert ops.count("MatMulNBits") == 4 * 2 + 1
    assert "GatherBlockQuantized" in ops


def test_float_activations_match_dequantized_model(made):
    model = make_model(make_config("llama", kv_heads=2, scale=0.1, context=96))
    model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in made.numbers.items()})
    tokens = list(range(3, 40))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    actual = made.logits("gqa-fp32", tokens)
    assert np.abs(actual - expected[:, : actual.shape[1]]).max() <= 2e-5 * np.abs(expected).max()


def test_greedy_text_equals_plain_decoding(made):
    for prompt in PROMPTS:
        check_greedy(made.pipeline, prompt, 24, 3)


def test_passes_of_two_or_more_tokens_are_batch_invariant(made):
    for model in made.bundle.models.values():
        lost = {1, 2, 3, 5, 9, 18, 36, 64} - {*model.parity["gqa"].invariant_lengths}
        assert lost <= {1}


@pytest.mark.slow
def test_weights_of_large_models_are_not_written_in_float(made, in_parts, tmp_path, monkeypatch):
    sizes = []

    def measured(models, folder, *args):
        weights = (folder / "weights.bin").stat()
        sizes.append((weights.st_size, 512 * weights.st_blocks))
        return quantize(models, folder, *args)

    monkeypatch.setattr(bundle_export, "quantize", measured)
    bundle = export("self:1", made.path, tmp_path / "bundle", **OPTIONS)
    ((size, stored),) = sizes
    assert stored < size / 8
    assert bundle.files["target/weights.bin"] == made.bundle.files["target/weights.bin"]


def test_keeping_weights_that_are_not_quantized_is_refused(pairs, tmp_path):
    target = pairs.checkpoint("gpt2")[1]
    with pytest.raises(ExportError, match="no quantized weights to keep; omit --precision"):
        export(None, target, tmp_path / "bundle", precision="keep")
    with pytest.raises(ValueError, match="does not support the block formats of a checkpoint"):
        ExportRequest(None, "a.gguf", precision="keep", compute="qdq")


@pytest.mark.slow
def test_gguf_file_can_be_quantized_again(made, tmp_path):
    options = {"max_length": 40, "ops": "onnx", "rounding": "nearest"}
    bundle = export(None, made.path, tmp_path / "bundle", precision="int8", **options)
    assert bundle.target.weights_dtype == "int8"
