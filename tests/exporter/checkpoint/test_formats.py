"""Weights in each format that people publish give the numbers that the format stands for."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from architectures import ARCHITECTURES
from checkpoints import make_config, make_model, make_tokenizer, save
from specedge.errors import CheckpointError
from specedge.exporter import Progress, export
from specedge.exporter.checkpoint import checkpoints, lazy_weights, quantised
from specedge.exporter.checkpoint.lazy_tensors import numbers

TOKENS = torch.arange(12)[None]
BLOCK = 128


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch):
    """Matrices of small models get stand-ins, too."""
    monkeypatch.setattr(lazy_weights, "SMALLEST", 1)


def load(folder):
    progress = Progress()
    loaded = checkpoints.load(checkpoints.find("target", str(folder), None), progress)
    return loaded, " ".join(progress.notes)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def make(folder, name, **changes):
    """A checkpoint of one of the tried families, and its model in float32."""
    config = ARCHITECTURES[name][1]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = make_model(config)
    tokenizer = make_tokenizer(folder / "tokenizer")
    made = save(model.to(torch.bfloat16), tokenizer, folder / "checkpoint")
    return made, AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()


def stored_numbers(loaded):
    """Every parameter with what is behind its stand-in, in float32."""
    found = {}
    for name, parameter in loaded.model.named_parameters():
        behind = loaded.sources.behind(parameter)
        found[name] = (parameter if behind is None else numbers(behind)).float()
    return found


def same(loaded, wanted):
    """Whether a model holds, and computes with, exactly the numbers of another."""
    found, expected = stored_numbers(loaded), dict(wanted.named_parameters())
    assert found.keys() == expected.keys()
    with torch.no_grad(), loaded.sources.reading(loaded.model, at_once=True):
        logits = loaded.model(TOKENS).logits
        near = torch.allclose(logits, wanted(TOKENS).logits, rtol=1e-5, atol=1e-5)
    return near and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen3_moe", "gpt_oss"])
def test_a_models_matrices_are_its_checkpoints_also_where_transformers_joins_them(name, tmp_path):
    folder, model = make(tmp_path, name)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert notes == ""
    assert loaded.dtype == "bfloat16"
    for parameter in loaded.model.parameters():
        assert (parameter.ndim < 2) == (loaded.sources.behind(parameter) is None)


def pickle_weights(folder, **options):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin", **options)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_read_by_the_weights_only_loader(zipped, tmp_path):
    folder, model = make(tmp_path, "llama")
    pickle_weights(folder, _use_new_zipfile_serialization=zipped)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert "weights-only loader" in notes


def test_pickled_weights_in_shards_are_read(tmp_path):
    folder, model = make(tmp_path, "llama")
    state = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    places = {}
    for i, part in enumerate((state[::2], state[1::2]), 1):
        name = f"pytorch_model-0000{i}-of-00002.bin"
        torch.save(dict(part), folder / name)
        places |= {key: name for key, _ in part}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert "weights-only loader" in notes


class Planted:
    """What runs code when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_code_in_pickled_weights_never_runs(tmp_path):
    folder, _ = make(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Planted(tmp_path / "ran")}, folder / "pytorch_model.bin")
    assert "holds more than tensors" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", {"a": [1, 2]}])
def test_pickled_weights_that_are_damaged_or_of_another_layout_are_refused(content, tmp_path):
    folder, _ = make(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, folder / "pytorch_model.bin")
    assert "pytorch_model.bin cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
        ({"quant_method": "awq", "bits": 4}, "AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
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
def test_other_quantised_checkpoints_are_refused_by_name_from_the_config(config, name, tmp_path):
    folder, _ = make(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"unread")
    edit(folder / "config.json", quantization_config=config)
    message = refusal(folder)
    assert name in message
    assert "give the checkpoint it was made from" in message
    (folder / "README.md").write_text("---\nbase_model: some/original\n---\n", "utf-8")
    assert "give some/original, which it was made from" in refusal(folder)


def test_a_config_beside_that_of_the_model_tells_gptq(tmp_path):
    folder, _ = make(tmp_path, "llama")
    (folder / "quantize_config.json").write_text("{}", "utf-8")
    assert "GPTQ" in refusal(folder)


def test_every_mxfp4_number_is_what_transformers_makes_of_it():
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)  # each pair of numbers
    scales = torch.arange(1, 253, dtype=torch.uint8)
    blocks = codes.repeat(2, 1, 1)[:, None].expand(2, 252, 16, 16).contiguous()
    scales = scales[None, :, None].expand(2, 252, 16).contiguous()
    found = quantised.mxfp4(blocks, scales)
    wanted = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert found.dtype == torch.bfloat16
    assert torch.equal(numbers(found), wanted)
    bits = numbers(found).float()
    assert torch.equal(bits.bfloat16().float(), bits)
    assert bits[0, 126, :4].tolist() == [0.0, 0.0, 0.5, 0.0]  # low bits first, times 2^0
    assert bits[1, 127, -2:].tolist() == [-12.0, -12.0]


def quantise_mxfp4(folder, model):
    """Give gpt-oss's experts random four-bit numbers, in its own layout, and the model what
    transformers makes of them."""
    torch.manual_seed(1)
    state = load_file(folder / "model.safetensors")
    for key in [k for k in state if k.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = state.pop(key).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 125, (experts, rows, columns // 32), dtype=torch.uint8)
        state |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        with torch.no_grad():
            model.get_parameter(key).copy_(convert_moe_packed_tensors(blocks, scales))
    save_file(state, folder / "model.safetensors")
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    edit(
        folder / "config.json",
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": skipped},
    )


def test_gpt_oss_in_mxfp4_is_widened_and_exported(tmp_path):
    folder, model = make(tmp_path, "gpt_oss")
    quantise_mxfp4(folder, model)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert loaded.dtype == "bfloat16"
    assert "stored in mxfp4 and widened" in notes
    assert "the target is this quantised model" in notes
    progress = Progress()
    bundle = export(folder, folder, tmp_path / "bundle", max_length=64, progress=progress)
    assert bundle.target.weights_dtype == "bfloat16"
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert size <= bundle.files["target/weights.bin"].size < 1.1 * size  # both op sets' in one
    assert any("draft is this quantised model" in note for note in progress.notes)


def test_mxfp4_blocks_without_their_scales_are_refused(tmp_path):
    folder, model = make(tmp_path, "gpt_oss")
    quantise_mxfp4(folder, model)
    state = load_file(folder / "model.safetensors")
    key = next(key for key in state if key.endswith("_scales"))
    save_file({k: t for k, t in state.items() if k != key}, folder / "model.safetensors")
    assert "scales do not fit" in refusal(folder)


def quantise_fp8(folder, model, block, exact):
    """Store matrices as DeepSeek-V3 does, and give the model what that stands for."""
    torch.manual_seed(1)
    state = load_file(folder / "model.safetensors")
    merged = {}
    for key in [k for k in state if k.endswith("proj.weight")]:
        rows, columns = state[key].shape
        size = block or max(rows, columns)
        shape = (-(-rows // size), -(-columns // size))
        scales = torch.rand(shape) + 0.5
        scales = 2.0 ** torch.randint(-4, 4, shape) if exact else scales
        small = (state[key].float() * 100).to(torch.float8_e4m3fn)
        wide = torch.empty(rows, columns)
        for i in range(rows):
            for j in range(columns):
                wide[i, j] = float(small[i, j].float()) * float(scales[i // size, j // size])
        state |= {key: small, f"{key}_scale_inv": scales if block else scales.reshape(())}
        merged[key] = wide
    save_file(state, folder / "model.safetensors")
    quantised_as = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    size = {"weight_block_size": [block, block]} if block else {}
    edit(folder / "config.json", quantization_config=quantised_as | size)
    return merged


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("block", [BLOCK, None])
def test_fp8_numbers_are_widened_to_their_products_with_the_scales(block, exact, tmp_path):
    folder, model = make(tmp_path, "qwen3", hidden_size=192, intermediate_size=160)
    wide = quantise_fp8(folder, model, block, exact)
    with torch.no_grad():
        for key, matrix in wide.items():
            model.get_parameter(key).copy_(matrix)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert loaded.dtype == ("bfloat16" if exact else "float32")
    assert "stored in fp8 and widened" in notes


def test_fp8_experts_are_widened_and_exported(tmp_path):
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
    bundle = export(folder, folder, tmp_path / "bundle", max_length=64)
    assert bundle.target.weights_dtype == "bfloat16"
    assert bundle.target.num_experts == model.config.n_routed_experts


def test_fp8_numbers_without_their_scales_are_refused(tmp_path):
    folder, model = make(tmp_path, "qwen3")
    quantise_fp8(folder, model, BLOCK, exact=True)
    state = load_file(folder / "model.safetensors")
    key = next(key for key in state if key.endswith("_scale_inv"))
    save_file(state | {key: torch.ones(7, 9)}, folder / "model.safetensors")
    assert "scales do not fit" in refusal(folder)
    save_file({k: t for k, t in state.items() if k != key}, folder / "model.safetensors")
    assert "scales do not fit" in refusal(folder)


def test_numbers_of_a_type_that_is_not_known_are_refused(tmp_path):
    folder, _ = make(tmp_path, "llama")
    state = load_file(folder / "model.safetensors")
    save_file({k: t.to(torch.int8) for k, t in state.items()}, folder / "model.safetensors")
    assert "stores int8 weights" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shards_in_half_precision_give_their_own_bits(dtype, tmp_path):
    model = make_model(make_config("llama")).to(dtype)
    folder = save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "checkpoint")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded, _ = load(folder)
    assert same(loaded, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    assert loaded.dtype == str(dtype).removeprefix("torch.")
