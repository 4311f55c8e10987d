"""Layers of a decoder, which transformers keeps in one module list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from specedge.errors import ExportError

from .encoder_decoder import SourceConditionedDecoder


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the outermost list with one module per layer, after its name.

    Raises:
        ExportError: The layers are not in one module list.
    """
    num_layers = _text_config(model).num_hidden_layers
    candidates: dict[str, nn.ModuleList] = {}
    encoder = model.encoder if isinstance(model, SourceConditionedDecoder) else None
    outer_names = [name for name, module in model.named_modules() if module is encoder]
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer in (*outer_names, *candidates))
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not is_inner:
            candidates[name] = module
    if len(candidates) != 1:
        raise ExportError(
            f"its {num_layers} layers are in {len(candidates)} module lists instead of one"
        )
    return next(iter(candidates.items()))


def truncate(model: nn.Module, num_layers: int) -> Callable[[], None]:
    """Truncate a model to its first layers in place; return a function that restores it.

    Raises:
        ExportError: The layers are not in one module list.
    """
    name, layers = layer_list(model)
    parent, _, child = name.rpartition(".")
    config = _text_config(model)
    fields: dict[str, Any] = {"num_hidden_layers": num_layers}
    if getattr(config, "layer_types", None):
        fields["layer_types"] = list(config.layer_types)[:num_layers]
    before = {field: getattr(config, field) for field in fields}

    def put(kept: nn.ModuleList, values: Mapping[str, Any]) -> None:
        setattr(model.get_submodule(parent), child, kept)
        for field, value in values.items():
            setattr(config, field, value)

    put(layers[:num_layers], fields)
    return lambda: put(layers, before)


def per_layer_values(model: nn.Module, index: int) -> list[tuple[str, Any]]:
    """Return the values of a layer in lists of the config with one value per layer."""
    config = _text_config(model)
    return [
        (name, values[index])
        for name, values in vars(config).items()
        if isinstance(values, list | tuple) and len(values) == config.num_hidden_layers
    ]


def _text_config(model: nn.Module) -> Any:
    return model.config.get_text_config()  # type: ignore[union-attr,operator]
