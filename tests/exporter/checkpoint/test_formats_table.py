"""Every format of weights through export, parity and 200 greedy tokens: a table.

`pytest --exhaustive -m slow` of this file runs them all and writes docs/architectures.md's table.
"""

import pytest
import torch
from formats import adapted, make, pickle_weights, quantise_fp8, quantise_mxfp4
from transformers import AutoModelForCausalLM

import ggufs
from architectures import CONTEXT
from end_to_end import DOCUMENT, MEASURED, exported_and_run
from tables import Table


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
    return found, model, {}


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
    "shards of float16": ("llama", sharded),
    "pytorch_model.bin": ("llama", pickled),
    "mxfp4": ("gpt_oss, its experts in blocks", mxfp4),
    "fp8 in blocks": ("qwen3, scales of 128 x 128 numbers", fp8(128)),
    "fp8": ("qwen3, a scale a matrix", fp8(None)),
    "GGUF F16": ("qwen2", gguf(ggufs.Kind.F16)),
    "GGUF Q8_0": ("qwen2", gguf(ggufs.Kind.Q8_0)),
    "LoRA": ("llama from bfloat16, merged in float32", lora),
}
TABLE = Table(DOCUMENT, "formats", ("format", *MEASURED), tuple(FORMATS))


def test_the_table_has_every_format_and_its_text():
    assert TABLE.written() == list(TABLE.names)
    for name in TABLE.names:
        assert any("equal (" in row for row in TABLE.rows_of(name)), name


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_exact_from_end_to_end(name, tmp_path):
    special, made = FORMATS[name]
    target, model, options = made(tmp_path)
    exported_and_run(TABLE, name, special, "self:1", target, tmp_path, model, **options)


@pytest.fixture(scope="session", autouse=True)
def _write_table():
    yield
    TABLE.write()
