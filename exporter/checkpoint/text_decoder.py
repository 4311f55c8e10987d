"""Text decoder of a checkpoint: usually the whole model, or a part of a multimodal model.

Checkpoints without a decoder are rejected by model type, before weights are fetched.
"""

from __future__ import annotations

from typing import Any, TypeVar

from transformers import CONFIG_MAPPING, PreTrainedConfig

from specedge.errors import CheckpointError

from .. import internals

T = TypeVar("T")
# Text models without a separate class: for text, M-RoPE is plain RoPE.
_TEXT_ARCHITECTURES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_INHERITED = ("tie_word_embeddings", "eos_token_id")  # fields that text configs may lack
_M_ROPE = ("mrope_section", "mrope_interleaved")


def decoder_config(where: str, config: Any) -> Any:
    """Return the text decoder's config. Raises CheckpointError if there is no decoder."""
    about = f"{where} ({config.model_type})"
    if config.is_encoder_decoder:
        _check_encoder_decoder(about, config)
        return config
    if getattr(config, "add_cross_attention", False):
        raise CheckpointError(
            f"{about} has cross-attention without an encoder; specify a decoder or an "
            "encoder-decoder"
        )
    text = _text_config(about, config)
    encoder = internals.is_encoder(config) or internals.is_encoder(text)
    if encoder and not getattr(text, "is_decoder", False):
        raise CheckpointError(
            f"{about} is an encoder, which predicts no next token; specify a decoder-only model"
        )
    if internals.decoder_class(text) is None:
        raise CheckpointError(
            f"{about} has no text decoder that transformers can run by itself "
            f"({internals.describe_versions()}); specify another model"
        )
    if text is not config and not _prefixes(config, text):
        raise CheckpointError(
            f"{about} has its text decoder in an unknown module "
            f"({internals.describe_versions()}); specify another model"
        )
    return text


def _check_encoder_decoder(about: str, config: Any) -> None:
    """Reject sources other than tokens and Whisper's spectrograms. Raises CheckpointError."""
    if internals.decoder_class(config) is None:
        raise CheckpointError(
            f"{about} is an encoder-decoder whose source is not text "
            f"({internals.describe_versions()}); specify another model"
        )
    if internals.reads_speech(config) and not isinstance(
        getattr(config, "num_mel_bins", None), int
    ):
        raise CheckpointError(
            f"{about} reads speech in another form than Whisper's log-mel spectrograms; specify "
            "another model"
        )


def decoder_tensors(published: Any, config: Any, tensors: dict[str, T]) -> dict[str, T]:
    """Select the text decoder's tensors of a checkpoint, renamed to the decoder's names.

    Args:
        published: Config of the checkpoint.
        config: Config of its text decoder.
        tensors: Tensors of the checkpoint by name.
    """
    if config is published:
        return tensors
    prefixes = _prefixes(published, config)
    selected = {}
    for key, name in internals.rename_keys(published, list(tensors)).items():
        for prefix, decoder_prefix in prefixes.items():
            if name.startswith(f"{prefix}."):
                selected[f"{decoder_prefix}{name[len(prefix) + 1 :]}"] = tensors[key]
                break
    return selected


def _text_config(about: str, config: Any) -> Any:
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise CheckpointError(
            f"{about} has several text models, and it is ambiguous which one to export; specify a "
            "decoder alone"
        ) from error
    if text is config:
        return config
    if not isinstance(text, PreTrainedConfig):
        raise CheckpointError(f"{about} has an invalid text config; download it again")
    for name in _INHERITED:
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    if text.model_type not in _TEXT_ARCHITECTURES:
        return text
    fields = {k: v for k, v in text.to_dict().items() if k not in ("model_type", "architectures")}
    rope = {k: v for k, v in (text.rope_parameters or {}).items() if k not in _M_ROPE}
    return CONFIG_MAPPING[_TEXT_ARCHITECTURES[text.model_type]](
        **{**fields, "rope_parameters": rope}
    )


def _prefixes(published: Any, config: Any) -> dict[str, str]:
    """Map name prefixes of decoder and LM head in the multimodal model to the decoder's own."""
    whole, text = internals.build_multimodal_model(published), internals.build_decoder(config)
    text_config = whole.config.get_text_config()
    candidates = {
        n: m for n, m in whole.named_modules() if getattr(m, "config", None) is text_config
    }
    prefix = next(iter(candidates), "")
    if isinstance(candidates.get(prefix), type(text)):
        return {prefix: ""}
    head, own_head = _head_prefix(whole), _head_prefix(text)
    if not prefix or not head:
        return {}
    return {prefix: f"{text.base_model_prefix}.", head: f"{own_head}."}


def _head_prefix(model: Any) -> str:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "")
