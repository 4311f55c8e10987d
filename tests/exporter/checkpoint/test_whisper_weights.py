"""Conversion of CTranslate2's Whisper files to transformers' checkpoints."""

import json
import struct

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, WhisperConfig, WhisperForConditionalGeneration

import whisper_weights

NAMES = {
    "self_attn_layer_norm": "self_attention/layer_norm",
    "encoder_attn_layer_norm": "attention/layer_norm",
    "final_layer_norm": "ffn/layer_norm",
    "fc1": "ffn/linear_0",
    "fc2": "ffn/linear_1",
    "self_attn.out_proj": "self_attention/linear_1",
    "encoder_attn.out_proj": "attention/linear_2",
}


def tiny_model():
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=120, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=40, num_mel_bins=8,
        max_source_positions=20, max_target_positions=12, pad_token_id=0, bos_token_id=0,
        eos_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()  # as the file stores them
    return model


def tensors_of(model):
    """CTranslate2's tensors of a model."""
    state, config = model.state_dict(), model.config
    for part, heads in (("encoder", 2), ("decoder", 4)):
        yield f"{part}/num_heads", np.array(heads, np.int16)
        yield f"{part}/pre_norm", np.array(1, np.int8)
    names = {name.rpartition(".")[0] for name in state if name.startswith("model.")}
    for prefix in names:
        _, part, *rest = prefix.split(".")
        if rest[0] != "layers":
            name = {"embed_positions": "position_encodings", "embed_tokens": "embeddings"}.get(
                rest[0], rest[0]
            )
            for kind in ("weight", "bias"):
                if (key := f"{prefix}.{kind}") in state:
                    yield f"{part}/{name}/{suffix(name, kind)}", state[key].numpy()
        elif (inner := ".".join(rest[2:])) in NAMES:
            for kind in ("weight", "bias"):
                name = f"{part}/layer_{rest[1]}/{NAMES[inner]}"
                yield f"{name}/{suffix(name, kind)}", state[f"{prefix}.{kind}"].numpy()
    for part, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        for i in range(count):
            yield from joined(state, f"model.{part}.layers.{i}.self_attn",
                              f"{part}/layer_{i}/self_attention/linear_0", "qkv")  # fmt: skip
            if part == "decoder":
                for parts, name in (("q", "linear_0"), ("kv", "linear_1")):
                    yield from joined(state, f"model.{part}.layers.{i}.encoder_attn",
                                      f"{part}/layer_{i}/attention/{name}", parts)  # fmt: skip


def suffix(name, kind):
    if name == "position_encodings":
        return "encodings"
    return {"weight": "gamma", "bias": "beta"}[kind] if name.endswith("layer_norm") else kind


def joined(state, source, name, parts):
    size = len(state[f"{source}.q_proj.weight"])
    for kind in ("weight", "bias"):
        rows = [state.get(f"{source}.{part}_proj.{kind}", torch.zeros(size)) for part in parts]
        yield f"{name}/{kind}", torch.cat(rows).numpy()


def write_model(path, tensors):
    def text(value):
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    numbers = {"f": 4, "i": 2}
    content = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(tensors))
    for name, values in tensors.items():
        values = values.astype(np.float16) if values.dtype.kind == "f" else values
        dtype = 1 if values.dtype == np.int8 else numbers[values.dtype.kind]
        content += text(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        content += struct.pack("<BI", dtype, values.nbytes) + values.tobytes()
    path.write_bytes(content + struct.pack("<I", 0))


def write_source(folder, model, specials):
    write_model(folder / "model.bin", dict(tensors_of(model)))
    (folder / "config.json").write_text(
        json.dumps({"suppress_ids": [3], "suppress_ids_begin": [2, 0], "lang_ids": [102]})
    )
    vocabulary = {chr(ord("!") + i): i for i in range(90)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        "added_tokens": [
            {"id": 90 + i, "content": f"<|{name}|>", "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": True}
            for i, name in enumerate(specials)
        ],
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


SPECIALS = [
    "endoftext", "startoftranscript", "en", "translate", "transcribe", "startofprev",
    "notimestamps",
]  # fmt: skip


def test_converted_weights_compute_the_same_logits(tmp_path):
    model = tiny_model()
    write_source(tmp_path, model, SPECIALS)
    whisper_weights.convert(tmp_path, tmp_path / "checkpoint")
    converted, report = WhisperForConditionalGeneration.from_pretrained(
        tmp_path / "checkpoint", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    features = torch.randn(1, 8, 40)
    with torch.inference_mode():
        expected, actual = (
            one.eval()(features, decoder_input_ids=torch.tensor([[1, 5, 7]])).logits
            for one in (model, converted)
        )
    assert torch.equal(expected, actual)
    assert converted.generation_config.no_timestamps_token_id == 96
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    assert tokenizer.convert_tokens_to_ids(["<|0.00|>", "<|30.00|>"]) == [97, 97 + 1500]


def test_other_versions_are_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(struct.pack("<I", 5))
    with pytest.raises(ValueError, match="version 5; 6 is supported"):
        whisper_weights.convert(tmp_path, tmp_path / "checkpoint")
