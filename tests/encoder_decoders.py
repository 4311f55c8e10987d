"""Encoder-decoders with the keys of published config.json files, at small width.

The width, layers, context and vocabulary are reduced, and token ids follow the vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
)

from checkpoints import VOCAB_SIZE, make_tokenizer

CONTEXT = 112
END, PAD, START = 0, 511, 2
_T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 96,
    "d_kv": 16,
    "d_model": 64,
    "decoder_start_token_id": PAD,
    "dropout_rate": 0.1,
    "eos_token_id": END,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "model_type": "t5",
    "n_positions": CONTEXT,
    "num_heads": 4,
    "num_layers": 2,
    "pad_token_id": PAD,
    "relative_attention_num_buckets": 32,
    "vocab_size": VOCAB_SIZE,
}
_GATED = {
    "feed_forward_proj": "gated-gelu",
    "num_decoder_layers": 3,
    "num_layers": 3,
    "relative_attention_max_distance": 128,
    "tie_word_embeddings": False,
}
_BART = {
    "activation_function": "gelu",
    "bos_token_id": 1,
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "decoder_layers": 3,
    "decoder_start_token_id": START,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "encoder_layers": 2,
    "eos_token_id": END,
    "init_std": 0.2,
    "is_encoder_decoder": True,
    "max_position_embeddings": CONTEXT,
    "model_type": "bart",
    "num_hidden_layers": 2,
    "pad_token_id": PAD,
    "scale_embedding": False,
    "vocab_size": VOCAB_SIZE,
}
_GEMMA = {
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 1,
    "eos_token_id": END,
    "final_logit_softcapping": 30.0,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
    "model_type": "t5_gemma_module",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "query_pre_attn_scalar": 16,
    "rms_norm_eps": 1e-06,
    "sliding_window": 24,
    "vocab_size": VOCAB_SIZE,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "t5": _T5,  # t5-small
    "flan_t5": {**_T5, **_GATED},
    "mt5": {**_T5, **_GATED, "architectures": ["MT5ForConditionalGeneration"], "model_type": "mt5"},
    "umt5": {
        **_T5,
        **_GATED,
        "architectures": ["UMT5ForConditionalGeneration"],
        "model_type": "umt5",
        "scalable_attention": True,
    },
    "bart": {  # bart-large-cnn
        **_BART,
        "architectures": ["BartForConditionalGeneration"],
        "num_beams": 4,
        "forced_bos_token_id": 1,
        "forced_eos_token_id": END,
        "no_repeat_ngram_size": 3,
    },
    "mbart": {  # mbart-large-50-many-to-many-mmt
        **_BART,
        "architectures": ["MBartForConditionalGeneration"],
        "model_type": "mbart",
        "activation_function": "relu",
        "scale_embedding": True,
        "normalize_before": True,
    },
    "marian": {  # opus-mt-en-de
        **_BART,
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "activation_function": "swish",
        "scale_embedding": True,
        "static_position_embeddings": True,
        "decoder_start_token_id": PAD,
        "bad_words_ids": [[PAD]],
        "num_beams": 6,
    },
    "nllb": {  # nllb-200-distilled-600M
        **_BART,
        "architectures": ["M2M100ForConditionalGeneration"],
        "model_type": "m2m_100",
        "activation_function": "relu",
        "scale_embedding": True,
        "pad_token_id": 1,
        "bos_token_id": 3,
    },
    "pegasus": {  # pegasus-xsum
        **_BART,
        "architectures": ["PegasusForConditionalGeneration"],
        "model_type": "pegasus",
        "activation_function": "relu",
        "scale_embedding": True,
        "normalize_before": True,
        "decoder_start_token_id": PAD,
        "length_penalty": 0.6,
        "num_beams": 8,
    },
    "t5gemma": {  # t5gemma-2b-2b-ul2
        "architectures": ["T5GemmaForConditionalGeneration"],
        "decoder": {**_GEMMA, "cross_attention_hidden_size": 64, "is_decoder": True},
        "encoder": _GEMMA,
        "decoder_start_token_id": 1,
        "eos_token_id": [END, 5],
        "is_encoder_decoder": True,
        "model_type": "t5gemma",
        "pad_token_id": PAD,
        "vocab_size": VOCAB_SIZE,
    },
    "whisper": {  # whisper-tiny
        **_BART,
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "max_source_positions": 50,  # of one second of speech
        "max_target_positions": CONTEXT,
        "num_mel_bins": 8,
    },
}


def make_encoder_decoder(
    name: str, folder: Path, seed: int = 0, noise: float = 0.0, **options: Any
) -> Path:
    """Write a random checkpoint of a family; `noise` perturbs its matrices for a draft.

    `options` are further keys of its config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(CONFIGS[name] | options)
    (folder / "config.json").write_text(text, "utf-8")
    config = AutoConfig.from_pretrained(folder)
    loader = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    torch.manual_seed(seed)
    model = loader.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * torch.randn_like(parameter) * parameter[0].numel() ** -0.5)
        for parameter in model.parameters() if noise else ():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(text, "utf-8")  # with the keys of published files
    if name == "whisper":
        WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    tokenizer = make_tokenizer(folder)
    backend, end = tokenizer.backend_tokenizer, tokenizer.eos_token
    backend.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=end, model_max_length=CONTEXT
    ).save_pretrained(folder)
    return folder
