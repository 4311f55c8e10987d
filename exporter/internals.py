"""Undocumented interfaces of other libraries that the exporter depends on.

Each is one function, of transformers unless noted, in all versions that pyproject.toml allows
(`TESTED`). The replacements in tracing/families.py and the trace patterns in graph/graphs.py are
documented there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_any, tree_map, tree_map_only
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto as auto

from specedge.errors import CheckpointError, ExportError, SpecEdgeError

from .libraries import first_line, quiet, translate_errors

# The tree functions are torch's (2.13), the caches transformers'.
__all__ = ["Cache", "DynamicLayer", "tree_any", "tree_map", "tree_map_only"]
TESTED = {"transformers": ("5.17", "5.24"), "torch": ("2.13", "2.13"), "onnxscript": ("0.7", "0.7")}


def describe_error(error: BaseException) -> str:
    """Describe an error inside these libraries, with the installed versions."""
    message = first_line(error)
    name = type(error).__name__
    return f"{name if message == name else f'{name}: {message}'}; {describe_versions()}"


def translate_internal_errors(
    error_type: type[SpecEdgeError], context: str
) -> contextlib.AbstractContextManager[None]:
    """Translate errors inside these libraries, with their versions."""
    return translate_errors(error_type, f"{context} (", ")", describe=describe_error)


def describe_versions() -> str:
    """Describe the installed and the tested versions."""
    packages = (
        f"{package} {metadata.version(package)} (tested: {' to '.join(dict.fromkeys(tested))})"
        for package, tested in TESTED.items()
    )
    return "with " + ", ".join(packages)


_registry_lock = threading.RLock()


@contextlib.contextmanager
def reuse_operator_registry() -> Iterator[None]:
    """Let the exports of a process share PyTorch's registry of ONNX operators (torch 2.13).

    `torch.onnx.export` builds one for each export, in about a second, and only reads it. A torch
    without this class builds it as before. Threads take turns, as each restores torch's method.
    """
    with _registry_lock:
        try:
            module = importlib.import_module("torch.onnx._internal.exporter._registration")
            registry_class, method = module.ONNXRegistry, vars(module.ONNXRegistry)["from_torchlib"]
            cached = _cached_function(registry_class.from_torchlib)
        except (ImportError, AttributeError, KeyError):
            yield
            return
        registry_class.from_torchlib = staticmethod(cached)
        try:
            yield
        finally:
            registry_class.from_torchlib = method


@functools.cache
def _cached_function(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.cache(function)


def make_wrapper_tensor(subclass: type[torch.Tensor], like: torch.Tensor) -> Any:
    """Create a tensor of a subclass with the shape, strides and type of another (torch 2.13)."""
    make = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return make(subclass, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype)


def register_functions(name: str, attention: Any, mask: Any, experts: Any) -> None:
    """Register attention, mask and expert functions with transformers by name."""
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    ALL_EXPERTS_FUNCTIONS.register(name, experts)


def is_meta_error(error: BaseException | None) -> bool:
    """Return True if a computation failed because meta tensors have no data (torch 2.13)."""
    return isinstance(error, NotImplementedError) or (
        isinstance(error, RuntimeError) and "meta" in str(error)
    )


@contextlib.contextmanager
def implementation(model: torch.nn.Module, function: str, name: str) -> Iterator[None]:
    """Select the registered "attn" or "experts" function, by the configs' fields."""
    field = f"_{function}_implementation"
    configs = (getattr(module, "config", None) for module in model.modules())
    before = {id(c): (c, getattr(c, field)) for c in configs if hasattr(c, field)}
    for config, _ in before.values():
        setattr(config, field, name)
    try:
        yield
    finally:
        for config, old in before.values():
            setattr(config, field, old)


class FixedCacheLayer(CacheLayerMixin):
    """Cache layer with fixed buffers: the abstract methods except `update`."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the buffers exist."""

    def get_seq_length(self) -> int:
        """Return 0: masks depend on the positions that are passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Return the buffers' capacity."""
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the first key of a mask: all S rows."""
        return self.keys.shape[2], 0


class ConstantCacheLayer(FixedCacheLayer):
    """Cache layer with the keys and values of a source."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise ExportError: the graph has no hidden states to compute keys and values from."""
        raise ExportError(
            "its decoder computes keys and values of cross-attention in every pass instead of "
            f"reading them from its cache ({describe_versions()})"
        )

    def get_seq_length(self) -> int:
        """Return the number of rows, so that models do not compute them."""
        return self.keys.shape[2]


def has_parameter(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function has a parameter of that name."""
    return name in inspect.signature(function).parameters


def cache_name(model: torch.nn.Module) -> str:
    """Return the name of the cache in a model's arguments and outputs, which 5.24 changed."""
    return "cache" if has_parameter(model.forward, "cache") else "past_key_values"


def is_stateful(model: torch.nn.Module) -> bool:
    """Return True if transformers marks a model as recurrent."""
    return bool(getattr(model, "_is_stateful", False))


def has_recurrent_state(layer: Any) -> bool:
    """Return True if a cache layer keeps a recurrent or convolution state."""
    return hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states")


def has_key_values(layer: Any) -> bool:
    """Return True if a cache layer keeps keys and values, [B, H, T, D] each, and nothing else."""
    keys = getattr(layer, "keys", None)
    return not has_recurrent_state(layer) and keys is not None and keys.ndim == 4


def dynamic_rotary_modules(model: torch.nn.Module) -> Iterator[tuple[Any, str | None]]:
    """Yield rotary modules whose frequencies depend on the sequence length, with the layer type.

    They are recognized by `rope_type`, a string or a dictionary by layer type.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        types = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        for layer_type, name in types.items():
            if isinstance(name, str) and ("dynamic" in name or name == "longrope"):
                yield module, layer_type


def inverse_frequencies(module: Any, layer_type: str | None) -> torch.Tensor:
    """Copy a rotary module's frequencies, which transformers 5.23 updates in place. [D/2]"""
    return getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq").clone()


def freeze_frequencies(module: Any, layer_type: str | None) -> None:
    """Keep a rotary module's current frequencies in every pass."""
    if layer_type is None:
        module.rope_type = "fixed"
    else:
        module.rope_type = {**module.rope_type, layer_type: "fixed"}


def rotary_functions(code: ModuleType) -> list[str]:
    """Return the names of a module's functions that apply rotary embeddings."""
    return [name for name in vars(code) if name.startswith("apply_") and "rotary" in name]


def rename_keys(config: PreTrainedConfig, keys: list[str]) -> dict[str, str]:
    """Map a multimodal checkpoint's tensor names to those of transformers' model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    model = build_multimodal_model(config)
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    prefix, state = model.base_model_prefix, model.state_dict()
    return {key: rename_source_key(key, renamings, [], prefix, state)[0] for key in keys}


def decoder_class(config: PreTrainedConfig) -> type[Any] | None:
    """Return the class that transformers uses for a decoder or encoder-decoder, if any."""
    if not config.is_encoder_decoder:
        return auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if reads_speech(config):
        return auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING[type(config)]
    return auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING.get(type(config), None)


def reads_speech(config: PreTrainedConfig) -> bool:
    """Return True if the source of an encoder-decoder is speech."""
    return type(config) in auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING


def build_decoder(config: PreTrainedConfig) -> Any:
    """Build a text decoder or encoder-decoder from its config on the meta device."""
    auto_class = AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto_class = AutoModelForSpeechSeq2Seq if reads_speech(config) else AutoModelForSeq2SeqLM
    copied = copy.deepcopy(config)
    options = {"dtype": torch.float32, "trust_remote_code": False}
    with torch.device("meta"), quiet():
        return auto_class.from_config(copied, **options).eval()


def decoder_text_config(config: PreTrainedConfig) -> Any:
    """Return the config of a model's text decoder, with sizes under the names of decoders."""
    return config.get_text_config(**({"decoder": True} if config.is_encoder_decoder else {}))


def build_multimodal_model(config: PreTrainedConfig) -> Any:
    """Build the multimodal model of a config on the meta device."""
    model_class = auto.MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise CheckpointError(
            f"{config.model_type} is not a multimodal model ({describe_versions()})"
        )
    context = f"transformers cannot build a {config.model_type} model from its config"
    with translate_internal_errors(CheckpointError, context), torch.device("meta"), quiet():
        return model_class(copy.deepcopy(config)).eval()


def gguf_tensor_mapping(
    model: torch.nn.Module, architecture: str, permutation: str
) -> tuple[dict[str, str], Callable[[Any, str], Any]]:
    """Return model names by GGUF tensor name, and a function that permutes values.

    The function takes an array and its name in the file, and permutes as for the architecture
    `permutation`; it does not support stacked experts.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils as loading

    options = model.config.to_dict()  # type: ignore[union-attr,operator]
    options.setdefault("n_head", options.get("num_attention_heads"))  # its name in bloom
    processor = loading.TENSOR_PROCESSORS.get(permutation, loading.TensorProcessor)(options)
    # transformers builds the table of all names for each module, which dominated loading time.
    build_table = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = functools.cache(build_table)
    try:
        names = loading.get_gguf_hf_weights_map(model, processor, model_type=architecture)
    finally:
        gguf.get_tensor_name_map = build_table

    def arrange(weights: Any, name: str) -> Any:
        parsed: dict[str, dict[str, Any]] = {"tensors": {}}
        arranged = processor.process(
            weights=weights, name=name, tensor_key_mapping=names, parsed_parameters=parsed
        )
        return arranged.weights

    return names, arrange


def is_encoder(config: PreTrainedConfig) -> bool:
    """Return True for configs of masked language models and of image or audio classifiers."""
    return any(
        type(config) in getattr(auto, f"MODEL_FOR_{task}_MAPPING")
        for task in ("MASKED_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
    )
