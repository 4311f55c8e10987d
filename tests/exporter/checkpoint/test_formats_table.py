"""Checkpoint formats through export, verification and 200 greedy tokens."""

import pytest
import torch
from formats import adapted, make, pickle_weights, quantise_fp8, quantise_mxfp4
from transformers import AutoModelForCausalLM

import ggufs
from architectures import CONTEXT
from end_to_end import check_pair


def sharded(folder):
    found, model = make(folder, "llama")
    (found / "model.safetensors").unlink()
    model.half().save_pretrained(found, max_shard_size="50KB")
    whole = AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32)
    return found, whole.eval(), {}  # the other's rotary frequencies are rounded, too


def pickled(folder):
    found, model = make(folder, "llama")
    pickle_weights(found)
    return found, model, {}


def mxfp4(folder):
    found, model = make(folder, "gpt_oss")
    quantise_mxfp4(found, model)
    return found, model, {"precision": "fp32"}


def fp8(block):
    def made(folder):
        found, model = make(folder, "qwen3", hidden_size=192, intermediate_size=160)
        with torch.no_grad():
            for key, matrix in quantise_fp8(found, model, block, exact=bool(block)).items():
                model.get_parameter(key).copy_(matrix)
        return found, model, {}

    return made


def gguf(kind):
    def made(folder):
        path = folder / "model.gguf"
        ggufs.write(path, kind, folder, context=CONTEXT)
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=path.name, dtype=torch.float32
        )
        return path, loaded.eval(), {}

    return made


def lora(folder):
    base, _ = make(folder, "llama")
    adapter, model = adapted(base, folder / "adapter", target_modules=["q_proj", "down_proj"])
    return base, model, {"adapter": adapter}


FORMATS = {
    "shards of float16": sharded,
    "pytorch_model.bin": pickled,
    "mxfp4": mxfp4,
    "fp8 in blocks": fp8(128),
    "fp8": fp8(None),
    "GGUF F16": gguf(ggufs.Kind.F16),
    "GGUF Q8_0": gguf(ggufs.Kind.Q8_0),
    "LoRA": lora,
}


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("name", FORMATS)
def test_format_is_exact_from_end_to_end(name, tmp_path):
    target, model, options = FORMATS[name](tmp_path)
    check_pair("self:1", target, tmp_path, model, **options)
