"""Bundles of mixture-of-experts GGUF files with unmodified quantized weights."""

import numpy as np
import onnx
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import MixtralConfig, Qwen3MoeConfig

import ggufs
from checkpoints import make_model
from specedge.exporter import Progress, export
from specedge.exporter.checkpoint import checkpoints, loader
from specedge.exporter.checkpoint.lazy_tensors import materialize
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

TOKENS = list(range(3, 40))


def mixed(name):
    """Types of a file in Q8_0 whose first layer's experts have 4 bits."""
    return Kind.Q4_0 if name.startswith("blk.0.ffn") else Kind.Q8_0


def q4_k_m(name):
    """Types of a file in Q4_K_M, in which a part of the layers has more bits."""
    return Kind.Q6_K if name.startswith(("output", "blk.0.ffn_down")) else Kind.Q4_K


def q2_k(name):
    """Types of a file in Q2_K; values have more bits than queries and keys of the same input."""
    if name.startswith("output"):
        return Kind.Q6_K
    return Kind.Q4_K if "attn_v" in name else Kind.Q3_K if "ffn_down" in name else Kind.Q2_K


class KeptBundle:
    def __init__(self, folder, arch, kinds):
        path, self.progress = folder / "model.gguf", Progress()
        numbers = ggufs.write_mixture(path, folder, kinds, arch)
        options = {"compute": "fp32", "progress": self.progress}
        self.bundle = export("self:1", path, folder / "bundle", **{"ops": "all"} | options)
        config_class = MixtralConfig if arch == "llama" else Qwen3MoeConfig
        model = make_model(config_class(**ggufs.MIXTURE))
        model.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in numbers.items()})
        with torch.no_grad():
            self.expected = model(torch.tensor([TOKENS])).logits[0].numpy()

    def errors(self, ops):
        """Return the relative errors of a graph variant's logits, by token."""
        logits = OrtModel(self.bundle, self.bundle.target, Device(), ops).forward(TOKENS)
        actual = np.stack([logits[i].array() for i in range(len(TOKENS))])
        expected = self.expected[:, : actual.shape[1]]
        return np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)

    def op_types(self, ops):
        file = self.bundle.target.graph("decoder", ops).file
        return [node.op_type for node in onnx.load(self.bundle.path(file)).graph.node]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", ["qwen3moe", pytest.param("llama", marks=pytest.mark.slow(exhaustive=True))]
)
def test_experts_of_gguf_file_are_kept(arch, tmp_path):
    made = KeptBundle(tmp_path, arch, mixed)
    report = made.bundle.target.quantization["gqa"]
    assert {name: size.bundle_bits for name, size in report.types.items()} == {"Q4_0": 5, "Q8_0": 9}
    assert all(line.endswith("it is a router") for line in report.exceptions)
    assert made.op_types("gqa").count("QMoE") == 2
    assert made.op_types("onnx").count("MatMulNBits") > 2 * 2
    assert made.errors("gqa-fp32").max() <= 2e-5
    assert np.median(made.errors("gqa")) <= 0.05  # a router may select other experts
    for model in made.bundle.models.values():
        lost = {1, 2, 3, 5, 9, 18, 36, 64} - {*model.parity["gqa"].invariant_lengths}
        assert lost <= {1}


@pytest.mark.parametrize("arch", ["qwen3moe", "llama"])
def test_experts_of_gguf_file_are_one_tensor_of_each_layer(arch, tmp_path):
    path = tmp_path / "model.gguf"
    numbers = ggufs.write_mixture(path, tmp_path, q4_k_m, arch)
    checkpoint = checkpoints.find("target", str(path), None)
    assert checkpoint.is_quantized
    tensors = {tensor.name: tensor for tensor in loader.quantized_tensors(checkpoint)}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up = np.split(numbers[f"{prefix}.gate_up_proj"], 2, 1)
        matrices = {"gate": gate, "up": up, "down": numbers[f"{prefix}.down_proj"]}
        for name, matrix in matrices.items():
            tensor = tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
            assert tensor.shape == (8 * 256, 256)
            assert np.array_equal(tensor.dequantize(slice(None)), matrix.reshape(tensor.shape))


@pytest.mark.parametrize("arch", ["qwen3moe", "llama"])
def test_fused_gate_and_up_experts_are_read(arch, tmp_path):
    path = tmp_path / "model.gguf"
    numbers = ggufs.write_mixture(path, tmp_path, mixed, arch, is_fused=True)
    checkpoint = checkpoints.find("target", str(path), None)
    loaded = loader.load(checkpoint, Progress())
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        stored = loaded.sources.stored_matrix(loaded.model.get_parameter(name))
        assert np.array_equal(materialize(stored).numpy(), numbers[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "most_bits"),
    [
        (q4_k_m, {"Q4_K": 10.5, "Q6_K": 10}),
        (q2_k, {"Q2_K": 10.5, "Q3_K": 10, "Q4_K": 6, "Q6_K": 10}),
    ],
)
def test_offsets_of_experts_are_rounded_and_reported(kinds, most_bits, tmp_path):
    made = KeptBundle(tmp_path, "llama", kinds)
    report = made.bundle.target.quantization["gqa"]
    assert report.types.keys() == most_bits.keys()
    assert all(size.bundle_bits <= most_bits[name] for name, size in report.types.items())
    assert sum("offsets are rounded" in line for line in report.exceptions) == 2
    assert any("QMoE has no offsets" in note for note in made.progress.notes)
    divergence = made.bundle.target.quantization["gqa-fp32"].divergence
    assert divergence < 0.03 * report.divergence  # of int8 activations
    assert np.median(made.errors("gqa-fp32")) <= 0.01
    assert np.median(made.errors("gqa")) <= 0.05
