"""GGUF files, written with llama.cpp's own package, through transformers' own loader."""

import math
import os

import gguf
import numpy as np
import pytest
import torch
import transformers
from formats import stored_numbers
from gguf import GGMLQuantizationType as Kind

from checkpoints import make_config, make_model
from ggufs import write
from specedge.bundle import Bundle
from specedge.errors import CheckpointError
from specedge.exporter import Progress, export
from specedge.exporter.checkpoint import checkpoints, gguf_files, loader

ONES = np.ones(8, np.float32)
LEFT_OUT = "target: the model does not use 8 weights of its GGUF file, which are ignored"


def find(path):
    return checkpoints.find("target", str(path), None)


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        find(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.Q8_0, "float32"), (Kind.Q4_0, "float32"), (Kind.F16, "float16")]
)
def test_gguf_is_dequantized_exactly(kind, dtype, tmp_path):
    path = tmp_path / "model.gguf"
    numbers = write(path, kind, tmp_path)
    progress = Progress()
    loaded = loader.load(find(path), progress)
    assert loaded.dtype == dtype
    state = stored_numbers(loaded)
    assert state.keys() == numbers.keys()
    for name, array in numbers.items():
        assert np.array_equal(state[name].numpy(), array.astype(np.float32)), name
    said = f"stored in {kind.name}"
    assert any(said in note for note in progress.notes) == (dtype == "float32")


def test_names_of_tensors_are_built_once(tmp_path, monkeypatch):
    path, calls = tmp_path / "model.gguf", []
    write(path, Kind.Q8_0, tmp_path)
    build = gguf.get_tensor_name_map
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *x: calls.append(x) or build(*x))
    loader.load(find(path), Progress())
    assert len(calls) == 1


@pytest.mark.slow
def test_gguf_file_is_exported_by_its_path_or_its_folder(tmp_path):
    path = tmp_path / "models" / "model-Q8_0.gguf"
    path.parent.mkdir()
    write(path, Kind.Q8_0, tmp_path)
    bundle = export(path.parent, path, tmp_path / "bundle", max_length=40, ops="onnx")
    assert (bundle.draft.source.id, bundle.target.source.id) == ("model-Q8_0",) * 2
    assert bundle.target.architecture == "qwen2"
    assert bundle.target.weights_dtype == "keep"
    assert bundle.end_tokens == (0,)
    import specedge

    text = specedge.load(tmp_path / "bundle").generate("import json", max_new_tokens=8)
    assert len(text.tokens) == 8 or text.finish_reason == "end"
    assert Bundle.read(tmp_path / "bundle").files == bundle.files


def test_suffix_in_capital_letters_is_a_gguf_file(tmp_path):
    write(tmp_path / "model.gguf", Kind.Q8_0, tmp_path)
    os.rename(tmp_path / "model.gguf", tmp_path / "MODEL.GGUF")
    for name in (tmp_path, tmp_path / "MODEL.GGUF"):
        assert find(name).weights == ["MODEL.GGUF"]


def test_several_files_in_folder_need_choice(tmp_path):
    write(tmp_path / "model-Q8_0.gguf", Kind.Q8_0, tmp_path)
    write(tmp_path / "model-F16.gguf", Kind.F16, tmp_path)
    assert "2 GGUF files (model-F16.gguf, model-Q8_0.gguf); specify one" in refusal(tmp_path)
    assert find(tmp_path / "model-F16.gguf").weights == ["model-F16.gguf"]


def test_file_is_checked_from_header_only(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, Kind.Q8_0, tmp_path)
    size, ends = path.stat().st_size, gguf_files.header_size(path)
    assert 0 < ends < size
    head = path.read_bytes()
    for kept, whole in ((int(ends), True), (int(ends) // 2, False)):
        path.write_bytes(head[:kept] + bytes(size - kept))
        assert (gguf_files.header_size(path) <= kept) == whole
    path.write_bytes(head[: int(ends)] + bytes(size - int(ends)))
    assert find(path).config.hidden_size == 64


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.gguf", b"", "not a readable GGUF file"),
        ("model.gguf", b"nothing like it", "not a readable GGUF file"),
        ("model-00001-of-00001.gguf", b"GGUF", "it ends within its header, at byte 4"),
        ("model.txt", b"", "is a file, not a folder"),
    ],
)
def test_damaged_gguf_is_refused(name, content, said, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert said in refusal(tmp_path / name)


def test_family_unsupported_by_transformers_is_rejected(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "of-tomorrow")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "of-tomorrow" in refusal(tmp_path / "model.gguf")


def test_missing_gguf_is_rejected(tmp_path):
    assert "does not exist" in refusal(tmp_path / "missing.gguf")
    assert "hub cannot be reached" in refusal("org/name/missing.gguf")


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_dequantized_model_computes_like_the_original(arch, tmp_path):
    path = tmp_path / "model.gguf"
    numbers = write(path, Kind.Q8_0, tmp_path, arch)
    assert same(path, numbers, make_model(make_config(arch, kv_heads=2, scale=0.1)))


def same(path, numbers, model):
    """Return True if a file gives the logits of a model with its weights."""
    model.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in numbers.items()})
    loaded = loader.load(find(path), Progress())
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        tokens = torch.arange(120)[None]
        return torch.allclose(loaded.model(tokens).logits, model(tokens).logits, atol=1e-4)


def scaled(factor, theta=500_000.0):
    """Return the frequencies of Llama 3.1's scaled rotary embedding."""
    return {
        "context": 16384,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }


def factors(config):
    """Return the divisors that llama.cpp's converter writes as rope_freqs.weight. [D/2]"""
    rope = config.rope_parameters
    size = config.hidden_size // config.num_attention_heads
    freqs = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    longest, shortest = (
        rope["original_max_position_embeddings"] / rope[f"{which}_freq_factor"]
        for which in ("low", "high")
    )
    found = []
    for freq in freqs:
        length = 2 * math.pi / freq
        if length < shortest:
            found.append(1.0)
        elif length > longest:
            found.append(rope["factor"])
        else:
            smooth = (8192 / length - 1.0) / (4.0 - 1.0)
            found.append(float(1 / ((1 - smooth) / rope["factor"] + smooth)))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognized_by_its_factors(factor, tmp_path):
    path, options = tmp_path / "model.gguf", scaled(factor)
    config = make_config("llama", kv_heads=2, scale=0.1, **options)
    values = factors(config)
    assert len({*values}) > 2  # some are in between

    def more(writer):
        writer.add_tensor("rope_freqs.weight", values)

    numbers = write(path, Kind.F32, tmp_path, "llama", more, **options)
    found = find(path).config.rope_parameters
    assert found == config.rope_parameters
    assert same(path, numbers, make_model(config))


def write_linear(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def write_yarn(writer):  # as the converter writes Qwen2.5's
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def write_longrope(writer):  # as the converter writes Phi-3's, long context
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_rope_scaling_attn_factors(1.15)
    writer.add_tensor("rope_factors_long.weight", LONG)
    writer.add_tensor("rope_factors_short.weight", SHORT)


LONG, SHORT = (
    np.linspace(1, 40, len(ONES), dtype=np.float32),
    np.linspace(1, 3, len(ONES), dtype=np.float32),
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": LONG.tolist(),
    "short_factor": SHORT.tolist(),
    "original_max_position_embeddings": 64,
    "attention_factor": float(np.float32(1.15)),
    "factor": 4.0,
}


@pytest.mark.parametrize(
    ("arch", "write_scaling", "scaling"),
    [
        ("llama", write_linear, {"rope_type": "linear", "factor": 4.0}),
        (
            "llama",
            lambda w: w.add_float32("llama.rope.scale_linear", 4.0),
            {"rope_type": "linear", "factor": 4.0},
        ),
        ("qwen2", write_yarn, YARN),
        ("llama", write_longrope, LONGROPE),
    ],
)
def test_rotary_scaling_of_the_header_computes_like_the_original(
    arch, write_scaling, scaling, tmp_path
):
    rope = {"rope_theta": 10_000.0, **scaling}
    options = {"context": 256, "rope_parameters": rope}
    config = make_config(arch, kv_heads=2, scale=0.1, **options)
    path = tmp_path / "model.gguf"
    numbers = write(path, Kind.F32, tmp_path, arch, write_scaling, **options)
    assert find(path).config.rope_parameters["rope_type"] == scaling["rope_type"]
    assert same(path, numbers, make_model(config))
    unscaled = make_config(arch, kv_heads=2, scale=0.1, context=256)
    assert not same(path, numbers, make_model(unscaled))


def complete(config, tensors=(), **fields):
    """Return the rotary parameters of a config with a header's fields."""
    named = {f"arch.rope.{name.replace('__', '.')}": v for name, v in fields.items()}
    gguf_files.GgufCheckpoint("target", "model.gguf", named, tensors).complete_config(config)
    return config.rope_parameters


def test_gemma_3_rotary_scaling_applies_to_global_layers():
    config = transformers.Gemma3TextConfig()
    rope = complete(config, scaling__type="linear", scaling__factor=8.0)
    assert rope["full_attention"] == {
        "rope_type": "linear", "rope_theta": 1e6, "factor": 8.0,
    }  # fmt: skip
    assert rope["sliding_attention"]["rope_type"] == "default"


def test_yarn_has_the_attention_factor_and_context_of_the_header():
    config = transformers.Phi3Config(max_position_embeddings=131072, pad_token_id=0)
    rope = complete(
        config, scaling__type="yarn", scaling__factor=4.0, scaling__attn_factor=0.5,
        scaling__original_context_length=32768, scaling__yarn_beta_fast=16.0,
    )  # fmt: skip
    assert rope["attention_factor"] == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))
    assert (rope["beta_fast"], rope["beta_slow"]) == (16.0, 1.0)
    assert config.original_max_position_embeddings == 32768


@pytest.mark.parametrize(
    ("config_class", "layers", "hidden_size", "head_size", "scalar"),
    [
        (transformers.Gemma2Config, 42, 3584, 256, 256),
        (transformers.Gemma2Config, 46, 4608, 128, 144),
        (transformers.Gemma3TextConfig, 48, 3840, 256, 256),
        (transformers.Gemma3TextConfig, 62, 5376, 128, 168),
    ],
)
def test_gemma_query_scale_matches_published_sizes(
    config_class, layers, hidden_size, head_size, scalar
):
    """Headers lack the scale; transformers assumes 256."""
    heads = 32 if head_size == 128 else 16
    config = config_class(
        num_hidden_layers=layers, hidden_size=hidden_size, head_dim=head_size,
        num_attention_heads=heads,
    )  # fmt: skip
    complete(config)
    assert config.query_pre_attn_scalar == scalar


def test_rotary_size_of_phi_3_is_read():
    config = transformers.Phi3Config(
        hidden_size=3072, num_attention_heads=24, num_key_value_heads=8, pad_token_id=0
    )
    named = {"phi3.rope.dimension_count": 96}
    gguf_files.GgufCheckpoint("target", "model.gguf", named, ()).complete_config(config)
    assert config.rope_parameters["partial_rotary_factor"] == 0.75
    for size in (0, 129, "96"):
        named = {"phi3.rope.dimension_count": size}
        with pytest.raises(CheckpointError, match=f"rotary size of {size} for heads of 128"):
            gguf_files.GgufCheckpoint("target", "model.gguf", named, ()).complete_config(config)


@pytest.mark.parametrize(
    "fields",
    [
        {"scaling__type": "none", "scaling__attn_factor": 1.2},
        {"scaling__type": "yarn", "scaling__factor": -4.0},
        {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 0},
        {"scaling__type": "linear", "scaling__factor": math.nan},
        {"scaling__type": "linear", "scaling__factor": "4"},
        {"scaling__type": "linear", "scaling__factor": 4.0, "scaling__attn_factor": 1.2},
        {"scaling__type": "linear"},
    ],
)
def test_scaling_with_impossible_numbers_is_rejected_in_one_line(fields):
    for config in (transformers.LlamaConfig(), transformers.GPT2Config()):
        with pytest.raises(CheckpointError, match="unsupported rotary scaling"):
            complete(config, **fields)


def test_factor_without_a_type_of_scaling_has_no_effect():
    rope = complete(transformers.LlamaConfig(), scaling__type="none", scaling__factor=4.0)
    assert rope["rope_type"] == "default"


@pytest.mark.parametrize(
    ("arch", "more", "said"),
    [
        ("llama", lambda w: w.add_tensor("rope_freqs.weight", 2 * ONES), "rope_freqs.weight"),
        ("llama", lambda w: w.add_tensor("rope_factors_long.weight", ONES), "rope_factors_long"),
        ("llama", lambda w: w.add_tensor("rope_factors_short.weight", ONES), "rope_factors_sh"),
        ("llama", lambda w: w.add_tensor("rope_freqs.weight", ONES[:3]), "rope_freqs.weight"),
        ("qwen2", lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "is yarn"),
        ("qwen2", lambda w: w.add_rope_scaling_yarn_log_mul(0.1), "yarn_log_multiplier is 0.1"),
        ("qwen2", lambda w: w.add_rope_scaling_attn_factors(1.2), "attn_factor is 1.2"),
    ],
)
def test_unsupported_rotary_scaling_is_rejected(arch, more, said, tmp_path):
    path = tmp_path / "model.gguf"
    write(path, Kind.F32, tmp_path, arch, more)
    message = refusal(path)
    assert said in message
    assert "the original checkpoint" in message


def test_explicitly_unscaled_rotary_positions_are_supported(tmp_path):
    def more(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)

    path = tmp_path / "model.gguf"
    write(path, Kind.F32, tmp_path, "qwen2", more)
    assert find(path).config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize("name", ["adapter_config.json", "bundle.json", "tokenizer_config.json"])
def test_files_next_to_a_gguf_are_ignored(name, tmp_path):
    path = tmp_path / "model.gguf"
    write(path, Kind.F16, tmp_path)
    for other in (name, "model.safetensors", "tokenizer.json"):
        (tmp_path / other).write_text('{"base_model_name_or_path": "some/other"}', "utf-8")
    assert loader.load(find(path), Progress()).dtype == "float16"


def test_bundle_size_is_estimated_from_header(tmp_path):
    sizes = {}
    for kind in (Kind.F32, Kind.F16, Kind.Q4_0):
        write(tmp_path / kind.name, kind, tmp_path, hidden=256)
        sizes[kind] = gguf_files.open_files("target m", [tmp_path / kind.name]).expansion
    assert sizes[Kind.F32] == 1
    assert sizes[Kind.F16] == pytest.approx(1, abs=0.01)
    assert sizes[Kind.Q4_0] == pytest.approx(32 / 4.5, abs=0.1)


def test_unused_tensors_are_noted(tmp_path):
    path = tmp_path / "model.gguf"
    for more, said in (
        (lambda w: w.add_tensor("mm.0.bias", ONES), True),
        (None, False),
    ):
        write(path, Kind.F32, tmp_path, "llama", *([more] if more else []))
        progress = Progress()
        loader.load(find(path), progress)
        assert (progress.notes == [LEFT_OUT]) == said
        assert bool(progress.notes) == said


@pytest.mark.parametrize(
    ("name", "stated", "shown"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "Smollm2 135M 8k", "SmolLM2-135M-Instruct"),
        ("gemma-3-270m-q4_k_m", None, "gemma-3-270m"),
        ("Qwen2.5-7B-Instruct-Q8_0-00001-of-00001", None, "Qwen2.5-7B-Instruct"),
        ("phi-4-IQ4_XS", None, "phi-4"),
        ("model-BF16", "Tiny", "Tiny"),
        ("ggml-model-q4_0", None, "ggml-model-q4_0"),
        ("Llama-3.2-1B", "x", "Llama-3.2-1B"),
    ],
)
def test_model_has_its_name_and_license(name, stated, shown, tmp_path):
    def more(writer):
        writer.add_license("apache-2.0")
        if stated:
            writer.add_name(stated)

    path = tmp_path / f"{name}.gguf"
    write(path, Kind.F32, tmp_path, "qwen2", more)
    found = find(path)
    assert (found.source.id, found.source.license) == (shown, "apache-2.0")
    assert found.generation == {"eos_token_id": [0]}
