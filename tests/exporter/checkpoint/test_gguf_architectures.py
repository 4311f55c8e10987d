"""GGUF architectures with a table of our own, by headers that llama.cpp's converter wrote."""

import json
import math
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from formats import stored_numbers
from gguf import GGUFValueType
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoints import make_model
from ggufs import interleave_halves
from specedge.errors import CheckpointError
from specedge.exporter import Progress
from specedge.exporter.checkpoint import checkpoints, gguf_architectures, loader

# Made with llama.cpp's convert_hf_to_gguf.py from random models of these configs; llama.cpp's
# logits of the converted files were those of the loaded models.
FILES = json.loads(Path(__file__).with_name("gguf_architectures.json").read_text("utf-8"))
INTERLEAVED = {"arcee", "granite", "granitemoe", "llama", "olmo", "smollm3"}
OTHER_NAMES = {
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "self_attn.sinks": "attn_sinks.weight",
}
TYPES = {
    bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}  # fmt: skip


def converted(architecture, name, array, config):
    """Yield the values that llama.cpp's converter writes for a tensor, with their names."""
    layer = re.search(r"\.(\d+)\.(.*)", name)
    if match := re.search(r"\.experts\.(gate_up|down)_proj(_bias)?", name):
        suffix = "bias" if match[2] else "weight"
        if architecture == "gpt-oss" and suffix == "weight":
            array = array.swapaxes(1, 2)
        parts = {"down": array}
        if match[1] == "gate_up":
            rows = array.shape[1] // 2
            ranges = (slice(0, rows), slice(rows, None))
            if architecture == "gpt-oss":
                ranges = (slice(0, None, 2), slice(1, None, 2))
            parts = {"gate": array[:, ranges[0]], "up": array[:, ranges[1]]}
        for part, values in parts.items():
            yield f"blk.{layer[1]}.ffn_{part}_exps.{suffix}", np.ascontiguousarray(values)
    elif layer and layer[2] in OTHER_NAMES:
        yield f"blk.{layer[1]}.{OTHER_NAMES[layer[2]]}", array
    elif architecture in INTERLEAVED and (match := re.search(r"\.([qk])_proj\.", name)):
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        yield name, interleave_halves(array, heads)
    elif architecture == "gptneox" and "query_key_value" in name:
        heads = array.reshape(config.num_attention_heads, 3, -1, *array.shape[1:])
        yield name, np.ascontiguousarray(heads.swapaxes(0, 1).reshape(array.shape))
    elif architecture == "gpt2" and re.search(r"\.c_\w+\.weight", name):
        yield name, np.ascontiguousarray(array.T)
    else:
        yield name, array + 1 if architecture == "gemma" and "norm" in name else array


def write_file(path, file, model, is_fused=False, **extra_tensors):
    """Write a model as a GGUF file with a recorded header, with fused projections if asked to."""
    architecture = file["architecture"]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in file["header"].items():
        element = value[0] if isinstance(value, list) else value
        types = [TYPES[type(element)]]
        types = [GGUFValueType.ARRAY, *types] if isinstance(value, list) else types
        writer.add_key_value(f"{architecture}.{key}", value, *types)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(model.config.vocab_size)])
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, file["header"]["block_count"])
    tensors = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        for name, array in converted(architecture, key, tensor.numpy(), model.config):
            tensors[names.get_name(name, (".weight", ".bias")) or name] = array
    for name in [name for name in tensors if is_fused and ".attn_q." in name]:
        parts = [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    for name, array in {**tensors, **extra_tensors}.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("family", FILES)
def test_file_of_an_architecture_is_read_as_its_original(family, tmp_path):
    file, path = FILES[family], tmp_path / "model.gguf"
    model = make_model(CONFIG_MAPPING[file["model_type"]](pad_token_id=None, **file["config"]))
    for name, buffer in model.named_buffers():
        if name.endswith("_bias"):
            buffer.normal_(0, 0.1)
    write_file(path, file, model)
    progress = Progress()
    loaded = loader.load(checkpoints.find("target", str(path), None), progress)
    assert not progress.notes
    state = stored_numbers(loaded)
    assert state.keys() == dict(model.named_parameters()).keys()
    state |= dict(loaded.model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.allclose(state[name], tensor, rtol=0, atol=1e-6), name
    tokens = torch.arange(32)[None]
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        assert torch.allclose(loaded.model(tokens).logits, model(tokens).logits, atol=1e-4)


@pytest.mark.parametrize("family", ["glm", "phi", "granite"])
def test_fused_projections_are_split(family, tmp_path):
    file, path = FILES[family], tmp_path / "model.gguf"
    model = make_model(CONFIG_MAPPING[file["model_type"]](pad_token_id=None, **file["config"]))
    write_file(path, file, model, is_fused=True)
    loaded = loader.load(checkpoints.find("target", str(path), None), Progress())
    state = stored_numbers(loaded)
    for name, tensor in model.named_parameters():
        assert torch.equal(state[name], tensor), name


YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 64,
}  # fmt: skip


@pytest.mark.parametrize("field", ["attn_factor", "yarn_attn_factor"])
def test_attention_factor_of_olmo_3_is_the_published_one(field, tmp_path):
    """Converters write the complete factor; older ones to a field that llama.cpp multiplies."""
    factor = 0.1 * math.log(8) + 1
    file, unscaled = FILES["olmo3"], {"rope_type": "default", "rope_theta": 500_000.0}
    yarn = {
        "rope_type": "yarn", "factor": 8.0, "rope_theta": 500_000.0, "attention_factor": factor,
        "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    ropes = {"full_attention": yarn, "sliding_attention": unscaled}
    header = {**file["header"], **YARN, f"rope.scaling.{field}": factor}
    assert reads_scaled(tmp_path, {**file, "header": header}, ropes)


def test_llama_3_scaling_of_exaone_4_is_read(tmp_path):
    file, rope = FILES["exaone4"], {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 16.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    config = CONFIG_MAPPING["exaone4"](**{**file["config"], "rope_parameters": rope})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = 10_000.0 ** -(torch.arange(8) / 8) / scaled
    assert reads_scaled(tmp_path, file, rope, **{"rope_freqs.weight": divisors.numpy()})


def reads_scaled(tmp_path, file, rope, **extra_tensors):
    """Return True if a file is read as a model with rotary parameters, which change its logits."""
    options = {**file["config"], "pad_token_id": None}
    model = make_model(CONFIG_MAPPING[file["model_type"]](**{**options, "rope_parameters": rope}))
    unscaled = make_model(CONFIG_MAPPING[file["model_type"]](**options))
    write_file(tmp_path / "model.gguf", file, model, **extra_tensors)
    loaded = loader.load(checkpoints.find("target", str(tmp_path / "model.gguf"), None), Progress())
    tokens = torch.arange(250)[None] % 64
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        logits = loaded.model(tokens).logits
        assert not torch.allclose(logits, unscaled(tokens).logits, atol=1e-3)
        return torch.allclose(logits, model(tokens).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3_moe", {"expert_weights_scale": 2.0}, "its expert_weights_scale of 2.0"),
        ("llama", {"attention.scale": 0.5}, "its attention.scale of 0.5"),
        ("granite", {"rope.scaling.finetuned": False}, "without rotary embedding"),
        ("llama", {"rope.dimension_count": 8}, "8 of 32 dimensions is not supported"),
    ],
)
def test_header_fields_that_the_model_type_does_not_support_are_rejected(family, fields, message):
    file = FILES[family]
    header = {f"{file['architecture']}.{k}": v for k, v in (file["header"] | fields).items()}
    with pytest.raises(ValueError, match=message):
        gguf_architectures.build_config(
            file["architecture"], header, {"token_embd.weight": (64, 64)}
        )


def test_layer_weights_that_the_model_type_lacks_are_rejected_by_name(tmp_path):
    file, path = FILES["granitemoe"], tmp_path / "model.gguf"
    model = make_model(CONFIG_MAPPING[file["model_type"]](pad_token_id=None, **file["config"]))
    shared = {"blk.1.ffn_up_shexp.weight": np.zeros((64, 64), np.float32)}
    write_file(path, file, model, **shared)
    message = "its model type, granitemoe, has no blk.1.ffn_up_shexp.weight"
    with pytest.raises(CheckpointError, match=message):
        loader.load(checkpoints.find("target", str(path), None), Progress())


def test_header_fields_override_the_options_of_an_architecture():
    header = {f"qwen3moe.{key}": value for key, value in FILES["qwen3_moe"]["header"].items()}
    config = gguf_architectures.build_config(
        "qwen3moe", header | {"qwen3moe.expert_weights_norm": False},
        {"token_embd.weight": (64, 64)},
    )  # fmt: skip
    assert config.norm_topk_prob is False


@pytest.mark.parametrize("size", [0, 99, "16"])
def test_impossible_rotary_size_is_rejected_in_one_line(size):
    file = FILES["glm4"]
    fields = {f"glm4.{key}": value for key, value in file["header"].items()}
    with pytest.raises(ValueError, match=f"a rotary size of {size} for heads of 16"):
        gguf_architectures.build_config(
            "glm4", fields | {"glm4.rope.dimension_count": size}, {"token_embd.weight": (64, 64)}
        )
