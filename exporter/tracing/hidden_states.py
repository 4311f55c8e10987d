"""Hidden states between a decoder's layers, which a draft model reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from specedge.errors import ExportError

from ..checkpoint.decoder_layers import layer_list

HIDDEN_STATES = "hidden"  # output of a target's graphs, and input of a draft's
NEXT_HIDDEN = "next_hidden"  # output of a draft's graphs
RETURNED = (HIDDEN_STATES, NEXT_HIDDEN)


def hidden_states_index(values: Sequence[Any]) -> int:
    """Return the index of a layer's first tensor argument."""
    return next((i for i, x in enumerate(values) if isinstance(x, torch.Tensor)), -1)


def join_hidden_states(graph: ir.Graph, states: Sequence[ir.Value], num_outputs: int = 1) -> None:
    """Return the concatenation of hidden states, instead of the outputs after the logits.

    Optimizers remove Concat nodes with one input.
    """
    is_single = len(states) == 1
    node = ir.node("Sum", states) if is_single else ir.node("Concat", states, {"axis": -1})
    (output,) = node.outputs
    shapes = [value.shape for value in states if value.shape is not None]
    size = sum(int(shape[-1]) for shape in shapes)  # type: ignore[arg-type]
    is_draft = any(value.name == HIDDEN_STATES for value in graph.inputs)
    output.name = NEXT_HIDDEN if is_draft else HIDDEN_STATES
    output.dtype = ir.DataType.FLOAT
    output.shape = ir.Shape([*shapes[0][:-1], size])
    graph.append(node)
    graph.outputs[1 : 1 + num_outputs] = [output]


class HiddenStateRecorder:
    """Recorder of hidden states while a decoder runs.

    Args:
        model: The decoder.
        layers: Layers whose inputs are recorded, as in `HiddenStates`: the number of layers stands
            for the last layer's output, and one more for that of the final norm.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        self._model, self._layers = model, layers
        self._states: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record while the context lasts. Raises ExportError if the model has too few layers."""
        with contextlib.ExitStack() as stack:
            for layer in {*self._layers}:
                stack.enter_context(self._hook(layer))
            yield

    def take(self) -> list[torch.Tensor]:
        """Return the states of the last pass in the order of `layers`, and forget them."""
        states, self._states = self._states, {}
        return [states[layer] for layer in self._layers]

    def _hook(self, layer: int) -> torch.utils.hooks.RemovableHandle:
        name, layers = layer_list(self._model)
        if layer < len(layers):
            record = partial(self._record_input, layer)
            return layers[layer].register_forward_pre_hook(record, with_kwargs=True)
        record_output = partial(self._record_output, layer)
        if layer == len(layers):
            return layers[-1].register_forward_hook(record_output)
        if layer > len(layers) + 1:
            raise ExportError(
                f"the draft model reads the hidden states of layer {layer}, and the target has "
                f"{len(layers)} layers"
            )
        decoder = self._model.get_submodule(name.rpartition(".")[0])
        return decoder.register_forward_hook(record_output)

    def _record_input(
        self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        values = [*args, *kwargs.values()]
        self._states[layer] = values[hidden_states_index(values)]

    def _record_output(self, layer: int, _: nn.Module, __: Any, output: Any) -> None:
        self._states[layer] = output if isinstance(output, torch.Tensor) else output[0]
