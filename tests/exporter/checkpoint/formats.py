"""Small checkpoints in each format, with their expected weights."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from architectures import ARCHITECTURES
from checkpoints import make_model, make_tokenizer, save
from specedge.errors import CheckpointError
from specedge.exporter import Progress
from specedge.exporter.checkpoint import checkpoints, loader
from specedge.exporter.checkpoint.lazy_tensors import materialize

TOKENS = torch.arange(12)[None]


def load(folder):
    progress = Progress()
    loaded = loader.load(checkpoints.find("target", str(folder), None), progress)
    return loaded, " ".join(progress.notes)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refusal_of_config(tmp_path, quantization_config):
    """Return the folder of a checkpoint with this config, and the message that rejects it."""
    folder, _ = make(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"unread")
    edit(folder / "config.json", quantization_config=quantization_config)
    return folder, refusal(folder)


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
    """Return every parameter in float32, with placeholders resolved."""
    found = {}
    for name, parameter in loaded.model.named_parameters():
        behind = loaded.sources.stored_matrix(parameter)
        found[name] = (parameter if behind is None else materialize(behind)).float()
    return found


def same(loaded, wanted):
    """Return True if a model has, and computes with, exactly the weights of another."""
    found, expected = stored_numbers(loaded), dict(wanted.named_parameters())
    assert found.keys() == expected.keys()
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        logits = loaded.model(TOKENS).logits
        near = torch.allclose(logits, wanted(TOKENS).logits, rtol=1e-5, atol=1e-5)
    return near and all(torch.equal(found[name], expected[name]) for name in found)


def pickle_weights(folder, **options):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin", **options)


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
        blocks = torch.arange(rows)[:, None] // size, torch.arange(columns) // size
        wide = small.float() * scales[blocks]
        state |= {key: small, f"{key}_scale_inv": scales if block else scales.reshape(())}
        merged[key] = wide
    save_file(state, folder / "model.safetensors")
    quantised_as = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    size = {"weight_block_size": [block, block]} if block else {}
    edit(folder / "config.json", quantization_config=quantised_as | size)
    return merged


def adapted(base, folder, **options):
    """An adapter in a folder, with random weights, and the model that peft merges with it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **options))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                noise = 0.1 * torch.randn_like(parameter)
                parameter.copy_(parameter + noise if "lora_" not in name else noise)
    wrapped.save_pretrained(folder)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    return folder, peft.PeftModel.from_pretrained(whole, folder).merge_and_unload().eval()
