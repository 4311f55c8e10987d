"""Whether a model can be exported, seen from its config, on the meta device."""

from __future__ import annotations

from typing import Any

from specedge.errors import ExportError

from .. import private
from . import experts, geometry, tracing
from .layers import Layer


def check(config: Any, context_length: int, num_draft_tokens: int, ops: str) -> None:
    """Refuse a decoder that cannot be exported, or not in this op set. Raises ExportError.

    One that does not run without numbers goes on; it is seen again when its weights are there. But
    experts that do not go through transformers' interface, and take rows by their numbers, are not.
    """
    num_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(num_layers, int) and num_layers < 1:
        raise ExportError(f"its config.json says {num_layers} layers")
    try:
        layers = observe(config, context_length, num_draft_tokens)
    except ExportError as error:
        if not private.needs_numbers(error.__cause__):
            raise
        model = without_numbers(config)
        if any(p.ndim == 3 for p in model.parameters()) and not experts.among(model):
            raise ExportError(
                "its experts do not go through transformers' interface, and pick rows in a way "
                "that no graph can hold"
            ) from error
        return
    reasons = filter(None, (layer.obstacle() for layer in layers))
    if ops == "gqa" and (reason := next(reasons, None)):
        raise ExportError(f"{reason}; it cannot be exported in gqa")


def observe(config: Any, context_length: int, num_draft_tokens: int) -> list[Layer]:
    """What each layer of such a model does."""
    model = without_numbers(config)
    return tracing.observe(model, geometry.measure(model, context_length, num_draft_tokens))


def without_numbers(config: Any) -> Any:
    """The decoder of a config, which computes shapes alone. Raises ExportError."""
    what = f"transformers cannot build a {config.model_type} model of its config"
    with private.tried(ExportError, what):
        model = private.decoder(config)
    for module, layer_type in list(private.growing_factors(model)):
        private.settle(module, layer_type)
    return model
