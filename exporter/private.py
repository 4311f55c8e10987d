"""What the exporter uses of other libraries that they do not promise to keep.

A place a function, with the versions that it was seen with, of transformers where it says no more.
What families.py replaces by name, and graphs.py reads from a trace, says so there. `TRIED` are the
versions that pyproject allows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_leaves, tree_map, tree_map_only
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto as auto

from specedge.errors import CheckpointError, SpecEdgeError

from .quiet import explained, one_line, quiet

# Of torch 2.13: tensors with shapes alone, modes that see every operator's call, nested arguments.
# Of transformers: a cache of given layers, and one layer of a cache that grows.
__all__ = [
    "Cache", "DynamicLayer", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_any",
    "tree_leaves", "tree_map", "tree_map_only",
]  # fmt: skip
TRIED = {"transformers": ("5.17", "5.23"), "torch": ("2.13", "2.13"), "onnxscript": ("0.7", "0.7")}


def trouble(error: BaseException) -> str:
    """What went wrong inside these libraries, by the exception's name, and with which versions."""
    said = one_line(error)
    name = type(error).__name__
    return f"{name if said == name else f'{name}: {said}'}; {versions()}"


def tried(kind: type[SpecEdgeError], what: str) -> contextlib.AbstractContextManager[None]:
    """Turn what goes wrong inside these libraries into an error of ours, with their versions."""
    return explained(kind, f"{what} (", ")", said=trouble)


def versions() -> str:
    """What is installed, and what was tried."""
    found = (
        f"{package} {metadata.version(package)} (tried: {' to '.join(dict.fromkeys(tried))})"
        for package, tried in TRIED.items()
    )
    return "with " + ", ".join(found)


def tensor_of(kind: type[torch.Tensor], like: torch.Tensor) -> Any:
    """A tensor of a class of ours, in the shape, strides and type of another (torch 2.13)."""
    make = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return make(kind, like.shape, like.stride(), like.storage_offset(), dtype=like.dtype)


def register(name: str, attention: Any, mask: Any, experts: Any) -> None:
    """Make our functions known to transformers by a name (5.17 to 5.23)."""
    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    ALL_EXPERTS_FUNCTIONS.register(name, experts)


def needs_numbers(error: BaseException | None) -> bool:
    """Whether a computation failed because the meta device has shapes alone (torch 2.13)."""
    return isinstance(error, NotImplementedError) or (
        isinstance(error, RuntimeError) and "meta" in str(error)
    )


@contextlib.contextmanager
def chosen(model: torch.nn.Module, kind: str, name: str) -> Iterator[None]:
    """Let a model use the registered "attn" or "experts", by its configs' fields (5.17 to 5.23)."""
    field = f"_{kind}_implementation"
    configs = (getattr(module, "config", None) for module in model.modules())
    before = {id(c): (c, getattr(c, field)) for c in configs if hasattr(c, field)}
    for config, _ in before.values():
        setattr(config, field, name)
    try:
        yield
    finally:
        for config, old in before.values():
            setattr(config, field, old)


class FixedLayer(CacheLayerMixin):
    """A layer of a cache that has its memory from the start: all that transformers asks of one.

    The abstract methods of 5.17 to 5.23; only `update` is left to the one who knows the buffers.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """The buffers are given."""

    def get_seq_length(self) -> int:
        """0, because the mask counts from the positions that are given."""
        return 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers all S rows, from row 0."""
        return self.keys.shape[2], 0


def keeps_a_state(model: torch.nn.Module) -> bool:
    """Whether transformers marks a model as one with a recurrent state (5.17 to 5.23)."""
    return bool(getattr(model, "_is_stateful", False))


def keeps_state(layer: Any) -> bool:
    """Whether a layer of a cache keeps a recurrent or convolution state (5.17 to 5.23)."""
    return hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states")


def keeps_rows(layer: Any) -> bool:
    """Whether a layer of a cache keeps keys and values, [B, H, T, D] each, and nothing else."""
    keys = getattr(layer, "keys", None)
    return not keeps_state(layer) and keys is not None and keys.ndim == 4


def growing_factors(model: torch.nn.Module) -> Iterator[tuple[Any, str | None]]:
    """Rotary modules whose factors change with a pass's last position, and for which layers.

    Told by `rope_type`, a text or one for each type of layers (transformers 5.17 to 5.23).
    """
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        kinds = found if isinstance(found, dict) else {None: found}
        for layer_type, kind in kinds.items():
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                yield module, layer_type


def factors(module: Any, layer_type: str | None) -> torch.Tensor:
    """A copy of a rotary module's factors: transformers 5.23 updates them in place. [D/2]"""
    return getattr(module, f"{layer_type}_inv_freq" if layer_type else "inv_freq").clone()


def settle(module: Any, layer_type: str | None) -> None:
    """Leave a rotary module's factors as they are now, in every pass (5.17 to 5.23)."""
    if layer_type is None:
        module.rope_type = "fixed"
    else:
        module.rope_type = {**module.rope_type, layer_type: "fixed"}


def rotary_functions(code: ModuleType) -> list[str]:
    """The functions of a model's code that apply rotary tables, by name (5.17 to 5.23)."""
    return [name for name in vars(code) if name.startswith("apply_") and "rotary" in name]


def renamed(config: PreTrainedConfig, keys: list[str]) -> dict[str, str]:
    """What transformers calls the tensors of a multimodal checkpoint, by their published names.

    Of the conversions that it applies when it loads, those of names (5.17 to 5.23).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    model = whole_model(config)
    found = get_model_conversion_mapping(model)
    renamings = [one for one in found if isinstance(one, WeightRenaming)]
    prefix, state = model.base_model_prefix, model.state_dict()
    return {key: rename_source_key(key, renamings, [], prefix, state)[0] for key in keys}


def decoder_class(config: PreTrainedConfig) -> type[Any] | None:
    """The class that AutoModelForCausalLM takes for a config, if any (5.17 to 5.23)."""
    return auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def decoder(config: PreTrainedConfig) -> Any:
    """A text decoder as its config says, in shapes without numbers (5.17 to 5.23)."""
    copied = copy.deepcopy(config)
    options = {"dtype": torch.float32, "trust_remote_code": False}
    with torch.device("meta"), quiet():
        return AutoModelForCausalLM.from_config(copied, **options).eval()


def whole_model(config: PreTrainedConfig) -> Any:
    """The multimodal model that a config describes, without numbers (5.17 to 5.23)."""
    found = auto.MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise CheckpointError(f"{config.model_type} is no multimodal model ({versions()})")
    what = f"transformers cannot build a {config.model_type} model of its config"
    with tried(CheckpointError, what), torch.device("meta"), quiet():
        return found(copy.deepcopy(config)).eval()


def is_encoder(config: PreTrainedConfig) -> bool:
    """Whether transformers has a type for filling in masks, or for what is seen or heard."""
    return any(
        type(config) in getattr(auto, f"MODEL_FOR_{task}_MAPPING")
        for task in ("MASKED_LM", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION")
    )
