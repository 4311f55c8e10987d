"""Quantised weights: mxfp4 and fp8 are dequantized, others refused by name."""

import shutil

import numpy as np
import pytest
import torch
from formats import (
    edit,
    load,
    make,
    quantise_fp8,
    quantise_mxfp4,
    refusal,
    refusal_of_config,
    same,
    stored_numbers,
)
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import packed
from checkpoints import VOCAB_SIZE, make_tokenizer
from mtp_checkpoints import NUM_LAYERS, make_mtp_checkpoint
from specedge.errors import CheckpointError
from specedge.exporter import export
from specedge.exporter.checkpoint import checkpoints, loader, placeholders, quantized_formats
from specedge.exporter.checkpoint.lazy_tensors import materialize
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

BLOCK = 128
MTP_MATRICES = ("eh_proj", "self_attn.q_b_proj", "mlp.experts.0.gate_proj")


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch):
    """Matrices of small models get placeholders, too."""
    monkeypatch.setattr(placeholders, "SMALLEST", 1)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "eetq"}, "EETQ"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "fbgemm_fp8"}, "FBGEMM"),
        ({"quant_method": "of-tomorrow"}, "of-tomorrow"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "fp8"),
        ({}, "unknown"),
        ("gptq", "unknown"),
    ],
)
def test_unsupported_quantization_methods_are_refused_by_name(config, name, tmp_path):
    folder, message = refusal_of_config(tmp_path, config)
    assert name in message
    assert "the original checkpoint" in message
    (folder / "README.md").write_text("---\nbase_model: some/original\n---\n", "utf-8")
    assert "specify the original checkpoint some/original" in refusal(folder)


def test_mxfp4_dequantization_matches_transformers():
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)  # each pair of numbers
    scales = torch.arange(1, 253, dtype=torch.uint8)
    blocks = codes.repeat(2, 1, 1)[:, None].expand(2, 252, 16, 16).contiguous()
    scales = scales[None, :, None].expand(2, 252, 16).contiguous()
    found = quantized_formats.dequantize_mxfp4("experts", blocks, scales)
    wanted = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert found.dtype == torch.bfloat16
    assert torch.equal(materialize(found), wanted)
    bits = materialize(found).float()
    assert torch.equal(bits.bfloat16().float(), bits)
    assert bits[0, 126, :4].tolist() == [0.0, 0.0, 0.5, 0.0]  # low bits first, times 2^0
    assert bits[1, 127, -2:].tolist() == [-12.0, -12.0]


def test_mxfp4_matrices_of_all_experts_can_be_kept(tmp_path):
    folder, model = make(tmp_path, "gpt_oss")
    quantise_mxfp4(folder, model)
    checkpoint = checkpoints.find("target", str(folder), None)
    assert checkpoint.is_quantized
    tensors = loader.quantized_tensors(checkpoint)
    assert len(tensors) == 2 * model.config.num_hidden_layers
    for tensor in tensors:
        expected = model.get_parameter(tensor.name).transpose(1, 2).detach().numpy()
        expected = expected.reshape(tensor.shape)
        blocks = tensor.unpack(np.arange(tensor.shape[0]))
        values = (blocks.integers.astype(np.float32) - 128) * blocks.scales[..., None]
        assert np.array_equal(values.reshape(tensor.shape), expected)
        assert np.array_equal(tensor.dequantize(slice(3, 9)), expected[3:9])


@pytest.mark.slow(exhaustive=True)
def test_mxfp4_gpt_oss_is_dequantized_and_exported(tmp_path):
    folder, model = make(tmp_path, "gpt_oss")
    quantise_mxfp4(folder, model)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert loaded.dtype == "bfloat16"
    assert "stored in mxfp4; the target" in notes
    bundle = export(None, folder, tmp_path / "bundle", max_length=64, precision="fp32")
    assert bundle.target.weights_dtype == "bfloat16"
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert (
        size <= bundle.files["target/weights.bin"].size < 1.1 * size
    )  # both graph variants' in one


def test_mxfp4_blocks_without_their_scales_are_refused(tmp_path):
    folder, model = make(tmp_path, "gpt_oss")
    quantise_mxfp4(folder, model)
    state = load_file(folder / "model.safetensors")
    key = next(key for key in state if key.endswith("_scales"))
    save_file({k: t for k, t in state.items() if k != key}, folder / "model.safetensors")
    assert "scales do not fit" in refusal(folder)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("block", [BLOCK, None])
def test_fp8_weights_are_dequantized_with_scales(block, exact, tmp_path):
    folder, model = make(tmp_path, "qwen3", hidden_size=192, intermediate_size=160)
    wide = quantise_fp8(folder, model, block, exact)
    with torch.no_grad():
        for key, matrix in wide.items():
            model.get_parameter(key).copy_(matrix)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert loaded.dtype == ("bfloat16" if exact else "float32")
    assert "stored in fp8 and dequantized" in notes


@pytest.mark.slow(exhaustive=True)
def test_fp8_experts_are_dequantized_and_exported(tmp_path):
    folder, model = make(tmp_path, "deepseek_v3", hidden_size=160, moe_intermediate_size=40)
    wide = quantise_fp8(folder, model, BLOCK, exact=True)
    loaded, _ = load(folder)
    found = stored_numbers(loaded)
    inner = model.config.moe_intermediate_size
    for key, matrix in wide.items():
        place, _, rest = key.partition(".experts.")
        if rest:
            expert, name, _ = rest.split(".")
            joined = "down_proj" if name == "down_proj" else "gate_up_proj"
            part = slice(inner) if name == "gate_proj" else slice(-inner, None)
            rows = part if joined == "gate_up_proj" else slice(None)
            assert torch.equal(found[f"{place}.experts.{joined}"][int(expert)][rows], matrix)
        else:
            assert torch.equal(found[key], matrix)
    bundle = export(folder, folder, tmp_path / "bundle", max_length=64, ops="onnx")
    assert bundle.target.weights_dtype == "bfloat16"
    assert bundle.target.num_experts == model.config.n_routed_experts


class HeadBundle:
    """Bundle of a checkpoint with its MTP layer, and its logits of a text."""

    def __init__(self, checkpoint, folder):
        self.bundle = export("mtp", checkpoint, folder, max_length=32, ops="onnx")
        models = [OrtModel(self.bundle, model, Device()) for model in self.bundle.models.values()]
        target, draft = models
        tokens = [*range(20, 32)]
        self.target_logits = target.forward(tokens).array().copy()
        states = target.hidden[:-1].copy()
        self.draft_logits = draft.forward(tokens[1:], None, states).array().copy()


@pytest.mark.slow
def test_an_fp8_checkpoint_and_its_mtp_layer_equal_the_dequantized_ones(tmp_path):
    folder = make_mtp_checkpoint(tmp_path / "fp8", "deepseek_v3", vocab_size=VOCAB_SIZE)
    make_tokenizer(folder)
    path = folder / "model.safetensors"
    state = {key: (tensor / 100).bfloat16() for key, tensor in load_file(path).items()}
    state |= {key: 100 * tensor for key, tensor in state.items() if tensor.ndim == 1}
    save_file(state, path, {"format": "pt"})
    plain = shutil.copytree(folder, tmp_path / "plain")
    wide = quantise_fp8(folder, None, block=16, exact=True)
    assert {f"model.layers.{NUM_LAYERS}.{name}.weight" for name in MTP_MATRICES} <= wide.keys()
    dequantized = {key: matrix.bfloat16() for key, matrix in wide.items()}
    save_file(state | dequantized, plain / "model.safetensors", {"format": "pt"})
    fp8, expected = (HeadBundle(x, tmp_path / f"{x.name}-bundle") for x in (folder, plain))
    assert fp8.bundle.draft.weights_dtype == expected.bundle.draft.weights_dtype
    assert fp8.bundle.draft.hidden == expected.bundle.draft.hidden
    np.testing.assert_array_equal(fp8.target_logits, expected.target_logits)
    np.testing.assert_array_equal(fp8.draft_logits, expected.draft_logits)
    assert len(np.unique(fp8.draft_logits)) > VOCAB_SIZE


def test_fp8_weights_without_scales_are_rejected(tmp_path):
    folder, model = make(tmp_path, "qwen3")
    quantise_fp8(folder, model, BLOCK, exact=True)
    state = load_file(folder / "model.safetensors")
    key = next(key for key in state if key.endswith("_scale_inv"))
    save_file({k: t for k, t in state.items() if k != key}, folder / "model.safetensors")
    message = refusal(folder)
    assert f"lacks {key}; download it again" in message


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("shape", [(7, 9), (64, 1), (1, 1, 1), (3, 1, 1)])
def test_fp8_scales_of_unknown_layout_are_rejected(shape, tmp_path):
    folder, model = make(tmp_path, "qwen3")
    quantise_fp8(folder, model, BLOCK, exact=True)
    state = load_file(folder / "model.safetensors")
    key = next(key for key in state if key.endswith("_scale_inv"))
    save_file(state | {key: torch.ones(shape)}, folder / "model.safetensors")
    if shape == (1, 1, 1):  # one for all, however it is written
        load(folder)
        return
    message = refusal(folder)
    assert f"{key} is {list(shape)}, an unknown layout of scales" in message
    assert "the original checkpoint" in message


def test_fp8_scales_with_wrong_number_of_experts_are_rejected():
    state = {"w": torch.ones(4, 8, 8).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(2, 1, 1)}
    raw = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    with pytest.raises(CheckpointError, match=r"w_scale_inv is \[2, 1, 1\], an unknown layout"):
        quantized_formats.read_format(raw).dequantize("target m", state, ())


def test_quantization_config_of_text_part_applies(tmp_path):
    config = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    raw = {"text_config": {"quantization_config": config}}
    quantized_formats.check("target m", raw, None)
    state = {"w": torch.ones(8, 8).to(torch.float8_e4m3fn), "w_scale_inv": torch.full((1, 1), 2.0)}
    found = quantized_formats.read_format(raw).dequantize("target m", state, ())
    assert torch.equal(materialize(found["w"]).float(), torch.full((8, 8), 2.0))


@pytest.mark.parametrize(("method", "growth"), [("fp8", 4), ("mxfp4", 64 / 17)])
def test_dequantized_size_of_each_format(method, growth):
    raw = {"quantization_config": {"quant_method": method}}
    assert quantized_formats.read_format(raw).growth == growth


def quantize_nf4(folder, model, is_nested):
    """Store matrices as bitsandbytes does, and give the model what that stands for."""
    state = load_file(folder / "model.safetensors")
    for key in [key for key in state if key.endswith("_proj.weight")]:
        parts, matrix = packed.four_bit(state.pop(key), is_nested)
        state |= {f"{key}.{part}".removesuffix("."): tensor for part, tensor in parts.items()}
        with torch.no_grad():
            model.get_parameter(key).copy_(matrix)
    save_file(state, folder / "model.safetensors")
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    edit(folder / "config.json", quantization_config=config)


@pytest.mark.parametrize("is_nested", [False, True])
def test_nf4_is_dequantized(is_nested, tmp_path):
    folder, model = make(tmp_path, "llama")
    quantize_nf4(folder, model, is_nested)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert "stored in bitsandbytes and dequantized" in notes


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("", lambda t: t[:-1]),
        (".absmax", lambda t: t[:-1]),
        (".quant_map", lambda t: t[:-1]),
        (".nested_absmax", lambda t: t[:-1]),
        (".nested_quant_map", lambda t: t[:-1]),
        (".quant_state.bitsandbytes__nf4", lambda t: t[:-1]),
        (".absmax", None),
        (".nested_quant_map", None),
    ],
)
def test_inconsistent_nf4_tensors_are_rejected(part, change, tmp_path):
    folder, model = make(tmp_path, "llama")
    quantize_nf4(folder, model, is_nested=True)
    state = load_file(folder / "model.safetensors")
    key = next(key for key in state if key.endswith(f"up_proj.weight{part}"))
    tensor = state.pop(key)
    state |= {} if change is None else {key: change(tensor).contiguous()}
    save_file(state, folder / "model.safetensors")
    assert "up_proj.weight do not fit each other" in refusal(folder)
