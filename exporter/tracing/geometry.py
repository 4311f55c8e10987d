"""Shape of a model's KV cache, measured in one pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specedge.bundle.manifest import (
    EncoderEntry,
    HiddenStates,
    State,
    cross_attention_states,
    key_value_states,
)
from specedge.bundle.precision import DTYPE
from specedge.errors import ExportError, MissingExtraError, SpecEdgeError

from .. import internals
from ..checkpoint.draft_heads import DraftHeadModule
from ..checkpoint.encoder_decoder import SourceConditionedDecoder
from ..libraries import quiet
from .attention import TracedPass, active_pass
from .families import registered_functions
from .hidden_states import HIDDEN_STATES, NEXT_HIDDEN, HiddenStateRecorder

ALIGNMENT = 8
_STATE = "a state that cannot be rolled back"


@dataclass(frozen=True)
class Geometry:
    """States of a model by layer: `capacity` rows (S) for `context_length` tokens.

    `constants` are those of cross-attention over the hidden states of `encoder`. Passes of a target
    return the states of `hidden`, and those of a draft, which reads them, return the output of its
    last layer, or of the final norm if `returns_normalized`. `has_fuse` if they read other states
    than the target's.
    """

    context_length: int
    capacity: int
    padded_vocab_size: int
    layers: tuple[tuple[State, ...], ...]
    constants: tuple[State, ...] = ()
    encoder: EncoderEntry | None = None
    hidden: HiddenStates | None = None
    returns_normalized: bool = False
    has_fuse: bool = False

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states passes return."""
        if self.hidden is None:
            return ()
        if self.reads_hidden:
            return (len(self.layers) + self.returns_normalized,)
        return self.hidden.layers

    @property
    def reads_hidden(self) -> bool:
        """True for a draft whose passes read hidden states."""
        return self.hidden is not None and self.hidden.draft_size is not None

    @property
    def hidden_output(self) -> str:
        """Name of the output with hidden states."""
        return NEXT_HIDDEN if self.reads_hidden else HIDDEN_STATES

    @property
    def states(self) -> tuple[State, ...]:
        """States of all layers."""
        return tuple(itertools.chain.from_iterable(self.layers))

    def first_layers(self, count: int) -> Geometry:
        """Return the states of the first layers alone.

        Hidden states of further layers become those before the last one; those after all layers
        remain there.
        """
        constants, hidden = self.constants[: 2 * count], self.hidden
        if hidden is not None and not self.reads_hidden:
            num_fewer = len(self.layers) - count
            # Not its output, which the prefill graph of the first layers does not compute.
            layers = (max(min(x, max(0, count - 2)), x - num_fewer) for x in hidden.layers)
            hidden = replace(hidden, layers=tuple(layers))
        return replace(self, layers=self.layers[:count], constants=constants, hidden=hidden)

    def cache_names(self) -> list[str]:
        """Return the graph's input names of the states."""
        return [f"past_key_values.{state.name}" for state in self.states]

    def cache_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape [B, H, S, D] of each state, in the order of `cache_names`."""
        return [state.sizes(self.capacity) for state in self.states]

    def constant_names(self) -> list[str]:
        """Return the graph's input names of the constant states."""
        return [f"past_key_values.{state.name}" for state in self.constants]

    def constant_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape [B, H, E, D] of each constant state."""
        rows = self.encoder.capacity if self.encoder else 0
        return [state.sizes(rows) for state in self.constants]

    @property
    def num_outputs(self) -> int:
        """Number of logits and cache values of a token."""
        return self.padded_vocab_size + sum(math.prod(state.sizes(1)) for state in self.states)


def measure_geometry(
    model: torch.nn.Module,
    context_length: int,
    num_draft_tokens: int,
    hidden_layers: Sequence[int] = (),
) -> Geometry:
    """Run one pass and read the layout of its cache. Raises ExportError.

    The capacity includes a padded pass at the end, and the row that `gqa` writes after it. Passes
    return the hidden states of `hidden_layers`, see `HiddenStates`.
    """
    if hidden_layers and isinstance(model, SourceConditionedDecoder):
        raise ExportError(
            f"{model.config.model_type} models are encoder-decoders, whose hidden states no draft "
            "model reads; specify another --draft"
        )
    recorder = HiddenStateRecorder(model, hidden_layers)
    with recorder.recorded():
        output = _run_pass(model)
    kept = getattr(getattr(output, internals.cache_name(model), None), "layers", ())
    if all(map(internals.has_recurrent_state, kept)):  # none, or none with keys and values
        recurrent = f": they are recurrent, with {_STATE}" if internals.is_stateful(model) else ""
        raise ExportError(
            f"{model.config.model_type} models have no KV cache{recurrent}; "
            "specedge exports decoders with attention only"
        )
    layers = tuple(_states(model.config.model_type, i, layer) for i, layer in enumerate(kept))
    _check_optimum(model, layers)
    capacity = -(-(context_length + num_draft_tokens + 2) // ALIGNMENT) * ALIGNMENT
    hidden = _hidden_states(model.config.model_type, hidden_layers, recorder.take())
    shape = Geometry(context_length, capacity, output.logits.shape[-1], layers, hidden=hidden)
    if isinstance(model, SourceConditionedDecoder):
        shape = _with_encoder(shape, model)
    if isinstance(model, DraftHeadModule):
        normalized = model.returned_layer > len(layers)
        shape = replace(shape, hidden=model.hidden, returns_normalized=normalized)
        shape = replace(shape, has_fuse=model.has_fuse)
    return shape


def _hidden_states(
    model_type: str, layers: Sequence[int], states: Sequence[torch.Tensor]
) -> HiddenStates | None:
    """Describe recorded hidden states, of a pass of two tokens. Raises ExportError."""
    for layer, tensor in zip(layers, states, strict=True):
        if tensor.ndim != 3 or tensor.shape[:2] != (1, 2):
            raise ExportError(
                f"the hidden states of layer {layer} of {model_type} models have shape "
                f"{list(tensor.shape)} for two tokens, which no draft model reads"
            )
    size = sum(tensor.shape[-1] for tensor in states)
    return HiddenStates(tuple(layers), size) if layers else None


def _with_encoder(shape: Geometry, model: SourceConditionedDecoder) -> Geometry:
    """Add the encoder's sizes and the states of cross-attention."""
    with torch.no_grad():
        hidden = model.encode(model.sample_source())
        tensors = model.open(hidden)
    sizes = [(tensor.shape[1], tensor.shape[3]) for tensor in tensors]
    pairs = zip(sizes[::2], sizes[1::2], strict=True)
    max_length, capacity = model.max_source_length or shape.context_length, hidden.shape[1]
    if model.num_mel_bins is None:
        max_length = min(max_length, shape.context_length)
        capacity = -(-max_length // ALIGNMENT) * ALIGNMENT
    states = (cross_attention_states(i, *pair, DTYPE) for i, pair in enumerate(pairs))
    return replace(
        shape,
        constants=tuple(itertools.chain.from_iterable(states)),
        encoder=EncoderEntry(max_length, model.num_mel_bins, hidden.shape[2], capacity),
    )


def _run_pass(model: torch.nn.Module) -> Any:
    """Run the model on two tokens with a separate cache."""
    parameter = next(model.parameters())
    tokens = torch.zeros(1, 2, dtype=torch.long, device=parameter.device)
    now = TracedPass("none", tokens[:, 0], torch.arange(2, device=tokens.device)[None], 2)
    options = {}
    try:
        with quiet(), torch.no_grad():
            if isinstance(model, SourceConditionedDecoder):
                now.constants = model.open(model.encode(model.sample_source()))
                options["constants"] = now.constants
        with quiet(), registered_functions(model), active_pass(now):
            return model(input_ids=tokens, use_cache=True, **options)
    except SpecEdgeError:
        raise
    except Exception as error:
        if internals.is_stateful(model):
            raise ExportError(
                f"{model.config.model_type} models are hybrid: they have {_STATE}"
            ) from error
        raise ExportError(
            f"{model.config.model_type} models cannot be run for tracing "
            f"({internals.describe_error(error)})"
        ) from error


def _states(model_type: str, index: int, layer: Any) -> tuple[State, ...]:
    if internals.has_recurrent_state(layer):
        raise ExportError(f"{model_type} models are hybrid: layer {index} has {_STATE}")
    if not internals.has_key_values(layer):
        raise ExportError(f"layer {index} of {model_type} models has no separate keys and values")
    if (rows := layer.keys.shape[2]) != 2:
        raise ExportError(f"layer {index} of {model_type} models has {rows} rows for two tokens")
    keys, values = layer.keys.shape, layer.values.shape
    return key_value_states(index, (keys[1], keys[3]), (values[1], values[3]), DTYPE)


def _check_optimum(model: torch.nn.Module, layers: tuple[tuple[State, ...], ...]) -> None:
    """Check the measured layout against optimum's normalized config. Raises ExportError."""
    try:
        from optimum.utils import NormalizedConfigManager
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "optimum":
            raise MissingExtraError(
                'optimum is not installed; run: pip install "specedge[cpu,export]"'
            ) from error
        raise ExportError(
            f"optimum cannot be imported ({internals.describe_error(error)})"
        ) from error
    try:
        normalized = NormalizedConfigManager.get_normalized_config_class(model.config.model_type)(
            model.config
        )
        num_layers = normalized.num_layers
    except (KeyError, AttributeError):
        return
    if num_layers != len(layers):
        raise ExportError(f"one pass fills {len(layers)} cache layers, the config has {num_layers}")
    heads = (
        normalized.num_key_value_heads if normalized.has_attribute("num_key_value_heads") else None
    )
    measured = [state.shape[1] for states in layers for state in states]
    if isinstance(heads, int) and any(number != heads for number in measured):
        raise ExportError(f"one pass fills {measured[0]} heads, the config has {heads}")
