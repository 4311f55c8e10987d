"""Any Hugging Face decoder becomes a graph over fixed KV-cache buffers, with no code of its own.

Two public extension points of transformers do the work: a Cache whose layers write into fixed
buffers, and attention and mask functions registered by name. B sequences, T new tokens, S rows
of cache, H heads of D, V vocabulary entries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
import torch.onnx.ops
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specedge.errors import ExportError, SpecEdgeError

from .geometry import Geometry
from .quiet import one_line, quiet

OPSET = 24
NAME = "specedge"
EXAMPLE_LENGTH = 5
# What attention calls carry beside these changes nothing: dropout is off, the mask has the windows.
_HARMLESS = {"dropout", "sliding_window", "is_causal", "use_cache", "position_ids"}


class StaticLayer(CacheLayerMixin):
    """Keys and values live in [B, H, S, D] buffers; new rows are scattered in at `past_length`."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, past_length: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.past_length = keys, values, past_length
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """The buffers are given."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [B, H, T, D] rows and return the whole buffers."""
        self.keys = self._scatter(self.keys, key_states)
        self.values = self._scatter(self.values, value_states)
        return self.keys, self.values

    def _scatter(self, buffer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        inputs = (buffer, rows, self.past_length)
        return operator("TensorScatter", inputs, buffer, buffer.shape, axis=2)

    def get_seq_length(self) -> int:
        """0, because the mask counts from the positions that are given."""
        return 0

    def get_max_length(self) -> int:
        """S."""
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers all S rows, from row 0."""
        return self.keys.shape[2], 0


class Pass:
    """What the registered functions need to know about the pass that is being traced."""

    current: Pass | None = None

    def __init__(self, offsets: torch.Tensor, positions: torch.Tensor, capacity: int) -> None:
        last = offsets[0, -1:]
        self.positions = torch.cat((positions, positions[:, -1:]), 1)  # [B, T + 1]
        self.rows = torch.cat((offsets[0], last))  # [T + 1]: 0, 1 ... T - 1, T - 1
        self.keys = torch.arange(capacity)

    @classmethod
    @contextlib.contextmanager
    def tracing(cls, *args: Any) -> Iterator[None]:
        """Make a pass the current one."""
        cls.current = cls(*args)
        try:
            yield
        finally:
            cls.current = None


def operator(
    name: str, inputs: tuple[torch.Tensor, ...], like: torch.Tensor, shape: Any, **attributes: Any
) -> torch.Tensor:
    """One ONNX node in the traced graph."""
    return torch.onnx.ops.symbolic(
        name, inputs, attrs=attributes, dtype=like.dtype, shape=shape, version=OPSET
    )


def visible(mask_function: Any, **unused: Any) -> torch.Tensor:
    """The mask that a model asks for, causal or windowed. [B, 1, T+1, S]"""
    now = Pass.current
    assert now is not None
    zero = torch.zeros((), dtype=torch.long)
    query, key = now.positions[:, None, :, None], now.keys[None, None, None, :]
    try:
        return mask_function(zero, zero, query, key)
    except Exception as error:
        raise ExportError(f"the model's attention mask cannot be traced: {error}") from error


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """One Attention node. [B, H, T, D], 2 * [B, H, S, D], [B, 1, T+1, S] -> [B, T, H, D]

    The last query row goes in twice and the copy's output is dropped: for a single row ONNX
    Runtime takes another path on the CPU, whose last bits differ.
    """
    now = Pass.current
    assert now is not None
    _refuse_unknown(attention_mask, options)
    query = torch.index_select(query, 2, now.rows)
    extra = {"softcap": float(softcap)} if softcap else {}
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    shape = (*query.shape[:3], value.shape[3])
    output = operator(
        "Attention", (query, key, value, attention_mask), query, shape, scale=scale, **extra
    )
    return output.transpose(1, 2)[:, :-1], None


def _refuse_unknown(mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    if mask is None or mask.dtype != torch.bool:
        raise ExportError("the model's attention does not take its mask from transformers")
    given = {name for name, value in options.items() if value is not None and value is not False}
    if unknown := sorted(given - _HARMLESS):
        raise ExportError(f"the model's attention has {unknown[0]}, which no graph can hold yet")


class Traceable(torch.nn.Module):
    """input_ids [B, T], past_length [B], caches 2 * [B, H, S, D] a layer -> logits, caches."""

    def __init__(self, model: torch.nn.Module, context_length: int) -> None:
        super().__init__()
        self.model = model
        self.last = context_length - 1

    def forward(
        self, input_ids: torch.Tensor, past_length: torch.Tensor, caches: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        offsets = torch.cumsum(input_ids * 0 + 1, 1) - 1  # a Range node would run on the CPU
        positions = past_length[:, None] + offsets
        layers = [
            StaticLayer(k, v, past_length) for k, v in zip(caches[::2], caches[1::2], strict=True)
        ]
        cache = Cache(layers=layers)  # type: ignore[arg-type]
        with Pass.tracing(offsets, positions, caches[0].shape[2]):
            output = self.model(
                input_ids=input_ids,
                # Rows that pad a pass may lie beyond the last position; Gather refuses those.
                position_ids=torch.clamp(positions, max=self.last),
                past_key_values=cache,
                use_cache=True,
            )
        return output.logits.float(), *(t for x in layers for t in (x.keys, x.values))


def trace(model: torch.nn.Module, geometry: Geometry) -> ir.Model:
    """The model as a graph with T symbolic; its initializers still share the model's memory."""
    names = geometry.cache_names()
    caches = [torch.zeros(shape) for shape in geometry.cache_shapes()]
    inputs = (
        torch.zeros(1, EXAMPLE_LENGTH, dtype=torch.long),
        torch.zeros(1, dtype=torch.long),
        caches,
    )
    with quiet(), _registered(model):
        program = torch.onnx.export(
            Traceable(model, geometry.context_length),
            inputs,
            input_names=["input_ids", "past_length", *names],
            output_names=["logits", *(n.replace("past_key_values", "present") for n in names)],
            dynamic_shapes=({1: torch.export.Dim("T", min=1)}, None, [None] * len(caches)),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    return program.model


@contextlib.contextmanager
def refusal(model: torch.nn.Module) -> Iterator[None]:
    """Say in one line why a model cannot be exported."""
    try:
        yield
    except (SpecEdgeError, OSError):
        raise
    except Exception as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
            causes.append(cause)
        if ours := next((c for c in causes if isinstance(c, ExportError)), None):
            raise ours from None
        kind: Any = model.config
        raise ExportError(
            f"{kind.model_type} models cannot be exported: {one_line(causes[-1])}"
        ) from error


@contextlib.contextmanager
def _registered(model: torch.nn.Module) -> Iterator[None]:
    """Let the model use the functions above, and give it its own attention back."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, visible)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        with torch.no_grad():
            yield
    finally:
        config._attn_implementation = before
