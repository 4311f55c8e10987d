"""The shape of a model's KV cache, measured from one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specedge.errors import ExportError, MissingExtraError
from specedge.manifest import CacheLayer

from .quiet import quiet

ALIGNMENT = 8


@dataclass(frozen=True)
class Geometry:
    """S rows of cache for `context_length` tokens, one entry a layer, and V logits a row."""

    context_length: int
    capacity: int
    padded_vocab_size: int
    layers: tuple[CacheLayer, ...]

    def cache_names(self) -> list[str]:
        """The graph's input names of the caches."""
        kinds = ("key", "value")
        return [f"past_key_values.{i}.{kind}" for i in range(len(self.layers)) for kind in kinds]

    def cache_shapes(self) -> list[tuple[int, int, int, int]]:
        """[B, H, S, D] for each name."""
        sizes = [(x.heads, d) for x in self.layers for d in (x.key_size, x.value_size)]
        return [(1, heads, self.capacity, size) for heads, size in sizes]


def measure(model: torch.nn.Module, context_length: int, num_draft_tokens: int) -> Geometry:
    """Run one pass and read the cache it leaves.

    S has room for a padded pass at the end, and for the row that `gqa` writes behind it.
    """
    with torch.no_grad(), quiet():
        output = model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=True)
    layers = tuple(map(_layer, getattr(getattr(output, "past_key_values", None), "layers", ())))
    if not layers:
        raise ExportError(no_cache(_kind(model)))
    _check_optimum(model, layers)
    capacity = -(-(context_length + num_draft_tokens + 2) // ALIGNMENT) * ALIGNMENT
    return Geometry(context_length, capacity, output.logits.shape[-1], layers)


def no_cache(kind: str) -> str:
    """Why a model without a KV cache is refused."""
    return (
        f"{kind} models keep no KV cache (recurrent ones keep a state that cannot be rolled back); "
        "specedge takes decoders with attention alone"
    )


def _layer(layer: Any) -> CacheLayer:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    recurrent = hasattr(layer, "recurrent_states") or hasattr(layer, "conv_states")
    if recurrent or keys is None or values is None or keys.ndim != 4 or keys.shape[2] != 2:
        raise ExportError(
            "a layer of the model keeps something other than keys and values, as recurrent and "
            "hybrid models do, which cannot be rolled back"
        )
    return CacheLayer(keys.shape[1], keys.shape[3], values.shape[3])


def _check_optimum(model: torch.nn.Module, layers: tuple[CacheLayer, ...]) -> None:
    """What optimum knows of an architecture must be what was measured."""
    try:
        from optimum.utils import NormalizedConfigManager
    except ImportError as error:
        raise MissingExtraError(
            'optimum is not installed; run: pip install "specedge[cpu,export]"'
        ) from error
    try:
        known = NormalizedConfigManager.get_normalized_config_class(_kind(model))(model.config)
        num_layers = known.num_layers
    except (KeyError, AttributeError):
        return
    if num_layers != len(layers):
        raise ExportError(
            f"one pass fills {len(layers)} cache layers, the config says {num_layers}"
        )
    heads = known.num_key_value_heads if known.has_attribute("num_key_value_heads") else None
    if isinstance(heads, int) and any(layer.heads != heads for layer in layers):
        raise ExportError(f"one pass fills {layers[0].heads} heads, the config says {heads}")


def _kind(model: torch.nn.Module) -> str:
    config: Any = model.config
    return str(config.model_type)
