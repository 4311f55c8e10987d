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
INTERLEAVED = {"arcee", "granite", "granitemoe", "llama", "mistral3", "olmo", "smollm3"}
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


def converted(file, name, array, config):
    """Yield the values that llama.cpp's converter writes for a tensor, with their names."""
    architecture = file["architecture"]
    layer = re.search(r"\.(\d+)\.(.*)", name)
    if match := re.search(r"\.experts\.(gate_up|down)_proj(_bias)?", name):
        suffix = "bias" if match[2] else "weight"
        if architecture in ("gpt-oss", "llama4") and suffix == "weight":
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
    elif layer and layer[2] == "shared_mlp.input_linear.weight":
        for part, values in zip(("gate", "up"), np.split(array, 2), strict=True):
            yield f"blk.{layer[1]}.ffn_{part}_shexp.weight", values
    elif "kv_b_proj" in name and "attention.key_length_mla" in file["header"]:
        size = config.qk_nope_head_dim
        heads = array.reshape(config.num_attention_heads, -1, array.shape[1])
        keys = np.ascontiguousarray(heads[:, :size].swapaxes(1, 2))
        yield f"blk.{layer[1]}.attn_k_b.weight", keys
        yield f"blk.{layer[1]}.attn_v_b.weight", np.ascontiguousarray(heads[:, size:])
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


QUICK = {  # each maps names, joins parts or permutes rows in another way
    *("gpt_oss", "llama4", "deepseek_v2", "deepseek_v3", "phimoe", "granitemoeshared", "glm4"),
    *("cohere2", "gpt_neox", "mpt_clip", "qwen3_moe", "mixtral", "olmo2", "minicpm3", "gemma"),
}


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
        for name, array in converted(file, key, tensor.numpy(), model.config):
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


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FILES]
)
def test_gguf_of_each_architecture_equals_original_model(family, tmp_path):
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
    tokens = torch.arange(100)[None] % 64
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


@pytest.mark.parametrize(("family", "high"), [("exaone4", 4.0), ("llama4", 1.0)])
def test_llama_3_scaling_is_read(family, high, tmp_path):
    file = FILES[family]
    theta = file["header"]["rope.freq_base"]
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": 16.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": high, "original_max_position_embeddings": 8192}
    config = CONFIG_MAPPING[file["model_type"]](**{**file["config"], "rope_parameters": rope})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = theta ** -(torch.arange(8) / 8) / scaled
    assert reads_scaled(tmp_path, file, rope, **{"rope_freqs.weight": divisors.numpy()})


def test_attention_factor_of_phi_3_5_moe_is_the_published_one(tmp_path):
    """Files have the smaller factor of Phi-3."""
    factors = {"long": [2.0 + i / 4 for i in range(8)], "short": [1.0 + i / 8 for i in range(8)]}
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
        "long_mscale": 1.243163121016122, "short_mscale": 1.243163121016122,
        **{f"{name}_factor": values for name, values in factors.items()},
    }  # fmt: skip
    file = FILES["phimoe"]
    scaling = {"original_context_length": 64, "attn_factor": 1.1547005}
    header = file["header"] | {f"rope.scaling.{name}": value for name, value in scaling.items()}
    tensors = {f"rope_factors_{n}.weight": np.float32(values) for n, values in factors.items()}
    assert reads_scaled(tmp_path, {**file, "header": header}, rope, **tensors)


def test_older_files_of_deepseek_are_read(tmp_path):
    """Their projections of latent keys and values are not split, and sizes are those of heads."""
    file, path = FILES["deepseek_v3"], tmp_path / "model.gguf"
    model = make_model(CONFIG_MAPPING[file["model_type"]](pad_token_id=None, **file["config"]))
    sizes = {"attention.key_length": 24, "attention.value_length": 24, "attention.head_count_kv": 4}
    header = {key: value for key, value in file["header"].items() if not key.endswith("_mla")}
    write_file(path, {**file, "header": header | sizes}, model)
    loaded = loader.load(checkpoints.find("target", str(path), None), Progress())
    state = stored_numbers(loaded)
    for name, tensor in model.named_parameters():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    ("num_experts", "family", "groups"),
    [
        (64, "deepseek_v2", ("greedy", 1, 1)),
        (160, "deepseek_v2", ("group_limited_greedy", 8, 3)),
        (256, "deepseek_v3", (None, 8, 4)),
        (384, "deepseek_v3", (None, 1, 1)),
    ],
)
def test_expert_groups_that_older_files_lack_are_the_published_ones(num_experts, family, groups):
    fields = {"expert_group_count": None, "expert_group_used_count": None}
    config = build_config(family, {"expert_count": num_experts, **fields})
    assert (getattr(config, "topk_method", None), config.n_group, config.topk_group) == groups


def test_glm_flash_without_gating_function_has_sigmoid_gates():
    config = build_config("deepseek_v3", {"expert_gating_func": None}, vocab_size=154_880)
    assert config.model_type == "deepseek_v3"


def test_llama_4_with_128_experts_has_no_qk_norm():
    assert build_config("llama4", {}).use_qk_norm
    assert not build_config("llama4", {"expert_count": 128}).use_qk_norm


def build_config(family, fields, vocab_size=64):
    """Return the config of a recorded header with changed fields; None removes a field."""
    architecture, header = FILES[family]["architecture"], FILES[family]["header"] | fields
    header = {f"{architecture}.{k}": v for k, v in header.items() if v is not None}
    shapes = {"token_embd.weight": (vocab_size, 64)}
    return gguf_architectures.build_config(architecture, header, shapes)


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
        ("deepseek_v2", {"expert_weights_norm": True}, "its expert_weights_norm"),
        ("deepseek_v3", {"attention.temperature_scale": 0.1}, "its attention.temperature_scale"),
        ("ministral3", {"rope.scaling.type": "linear"}, "its attention.temperature_scale"),
        ("llama4", {"attention.sliding_window": 0}, "without chunked attention"),
        ("llama4", {"expert_count": 0}, "without chunked attention or experts"),
    ],
)
def test_header_fields_that_the_model_type_does_not_support_are_rejected(family, fields, message):
    with pytest.raises(ValueError, match=message):
        build_config(family, fields)


def test_layer_weights_that_the_model_type_lacks_are_rejected_by_name(tmp_path):
    file, path = FILES["granitemoe"], tmp_path / "model.gguf"
    model = make_model(CONFIG_MAPPING[file["model_type"]](pad_token_id=None, **file["config"]))
    shared = {"blk.1.ffn_up_shexp.weight": np.zeros((64, 64), np.float32)}
    write_file(path, file, model, **shared)
    message = "its model type, granitemoe, has no blk.1.ffn_up_shexp.weight"
    with pytest.raises(CheckpointError, match=message):
        loader.load(checkpoints.find("target", str(path), None), Progress())


@pytest.mark.parametrize("shape", [(3, 96, 64), (96, 64), (64,)])
def test_inconsistent_experts_are_rejected_by_name(shape, tmp_path):
    file, path = FILES["granitemoe"], tmp_path / "model.gguf"
    model = make_model(CONFIG_MAPPING[file["model_type"]](pad_token_id=None, **file["config"]))
    write_file(path, file, model, **{"blk.1.ffn_up_exps.weight": np.zeros(shape, np.float32)})
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up_exps.weight.*download it again"):
        loader.load(checkpoints.find("target", str(path), None), Progress())


def test_header_fields_override_the_options_of_an_architecture():
    config = build_config("qwen3_moe", {"expert_weights_norm": False})
    assert config.norm_topk_prob is False


@pytest.mark.parametrize("size", [0, 99, "16"])
def test_impossible_rotary_size_is_rejected_in_one_line(size):
    with pytest.raises(ValueError, match=f"a rotary size of {size} for heads of 16"):
        build_config("glm4", {"rope.dimension_count": size})
