"""Attention and KV caches of the graph, through transformers' two extension points.

While a model is observed and traced, a Cache with fixed buffers, and registered attention and mask
functions, replace its own. B sequences, T new tokens, S rows of cache; H query heads and G
key-value heads of size D.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.onnx.ops

from specedge.errors import ExportError

from .. import internals

OPSET = 24
# Options without effect: dropout is off, and the mask contains sliding windows.
_IGNORED_OPTIONS = {"dropout", "sliding_window", "is_causal", "use_cache", "position_ids"}
_SAMPLES = 64


@dataclass
class TracedPass:
    """Context of the pass that is being observed or traced, for the registered functions."""

    ops: str  # "onnx", "gqa", or "none" while the model is only observed
    past_length: torch.Tensor
    offsets: torch.Tensor  # [1, T]: 0, 1 ... T - 1
    capacity: int
    layers: list[LayerAttention] = field(default_factory=list)
    calls: int = 0
    cache: BufferLayer | None = None  # the layer that was written last
    written: tuple[torch.Tensor, ...] = ()  # its new keys and values
    masks: dict[int, tuple[int | None, torch.Tensor]] = field(default_factory=dict)
    constants: Sequence[torch.Tensor] = ()  # keys and values of cross-attention
    source_length: torch.Tensor | None = None  # their number of rows, [B]

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the new tokens. [B, T]"""
        return self.past_length[:, None] + self.offsets

    @property
    def rows(self) -> torch.Tensor:
        """Indices of the query rows: 0, 1 ... T - 1, T - 1. [T + 1]

        The last row is duplicated and the duplicate's output dropped: for a single row ONNX Runtime
        has another CPU kernel, which is not bitwise equal.
        """
        return torch.cat((self.offsets[0], self.offsets[0, -1:]))

    @property
    def query_positions(self) -> torch.Tensor:
        """Positions of the query rows. [B, T + 1]"""
        return torch.index_select(self.positions, 1, self.rows)

    def is_constant(self, key: torch.Tensor) -> bool:
        """Return True for keys of cross-attention."""
        return any(key is constant for constant in self.constants)


_current: list[TracedPass] = []


@contextlib.contextmanager
def active_pass(traced_pass: TracedPass) -> Iterator[TracedPass]:
    """Make a pass the current one while the context lasts."""
    _current.append(traced_pass)
    try:
        yield traced_pass
    finally:
        _current.pop()


def current_pass() -> TracedPass:
    """Return the pass that is being observed or traced."""
    return _current[-1]


class BufferLayer(internals.FixedCacheLayer):
    """Cache layer over [B, G, S, D] buffers; rows are written at the pass's past length."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write rows [B, G, T, D]; return the updated buffers, or in `gqa` the rows."""
        now = current_pass()
        if now.ops == "onnx":
            self.keys = _write_rows(self.keys, key_states, now.past_length)
            self.values = _write_rows(self.values, value_states, now.past_length)
            return self.keys, self.values
        now.cache, now.written = self, (key_states, value_states)
        return now.written


def buffer_cache(caches: list[torch.Tensor]) -> Any:
    """Return a cache over 2 * [B, G, S, D] buffers a layer."""
    pairs = zip(caches[::2], caches[1::2], strict=True)
    return internals.Cache(layers=[BufferLayer(k, v) for k, v in pairs])


def attention_mask(mask_function: Any, **unused: Any) -> torch.Tensor:
    """Evaluate a model's mask, causal or windowed. [B, 1, T + 1, S]

    In `gqa` windows are attributes, known from the observed pass, and the mask is all True.
    """
    now = current_pass()
    if now.ops == "gqa":
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)
    if now.ops == "none":
        return _sample_mask(mask_function, now)
    queries = torch.cat((now.positions, now.positions[:, -1:]), 1)
    return _evaluate_mask(mask_function, queries, now.capacity)


def _sample_mask(mask_function: Any, now: TracedPass) -> torch.Tensor:
    """Evaluate the mask at sampled positions, which identify it; also on the meta device."""
    samples = min(_SAMPLES, now.capacity)
    queries = torch.linspace(0, now.capacity - 1, samples).long()[None]
    device = now.past_length.device
    try:
        seen = _evaluate_mask(mask_function, queries, now.capacity)
        window = detect_window(seen[0, 0], queries[0])
    except ExportError:
        if device.type != "meta":
            raise
        # The mask depends on data, as in llama4, and is evaluated again with the weights.
        seen, window = torch.zeros(1, 1, samples, now.capacity, dtype=torch.bool), None
    mask = seen.to(device)
    now.masks[id(mask)] = (window, mask)
    return mask


def _evaluate_mask(mask_function: Any, queries: torch.Tensor, capacity: int) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(capacity)
    with internals.translate_internal_errors(
        ExportError, "the model's attention mask cannot be traced"
    ):
        return mask_function(zero, zero, queries[:, None, :, None], keys[None, None, None, :])


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention in the graph variant of the pass.

    [B, H, T, D], 2 * [B, G, T or S or E, D] -> [B, T, H, D]

    `s_aux` [H] are attention sinks, logits of a key without a value; `bias` [B, H, 1, S] is added
    to the logits, as in ALiBi, and so is `position_bias` [B, H, T + 1, S] of T5, which is zero in
    cross-attention.
    """
    now = current_pass()
    is_cross = now.is_constant(key)
    if is_cross:
        attention_mask, position_bias = _source_mask(now, key), None
    bias = position_bias if bias is None else bias
    _check(options, attention_mask, s_aux, softcap)
    assert attention_mask is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if now.ops == "none" and is_cross:
        return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3]), None
    if now.ops == "none":
        layer = _observe_layer(now, query, key, value, attention_mask)
        now.layers.append(replace(layer, scale=scale, softcap=float(softcap or 0)))
        return query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[3]), None
    softcap = float(softcap or 0)
    if now.ops == "gqa" and not is_cross:
        return _group_query_attention(
            now, query, key, value, attention_mask, scale, softcap, s_aux, bias
        ), None
    query = torch.index_select(query, 2, now.rows)
    if bias is not None:
        attention_mask = torch.where(attention_mask, bias, float("-inf"))
    if s_aux is None:
        extra = {"softcap": softcap} if softcap else {}
        shape, inputs = (*query.shape[:3], value.shape[3]), (query, key, value, attention_mask)
        output = onnx_operator("Attention", inputs, query, shape, scale=scale, **extra)
    else:
        output = _attention_with_sinks(query * scale, key, value, attention_mask, s_aux)
    return output.transpose(1, 2)[:, :-1].contiguous(), None


def _source_mask(now: TracedPass, key: torch.Tensor) -> torch.Tensor:
    """Return the mask of the source's rows, all if their number is unknown. [B, 1, T + 1, E]"""
    is_query = now.query_positions[:, None, :, None] >= 0
    if now.source_length is None:
        return is_query
    rows = torch.arange(key.shape[2], device=key.device)
    return is_query & (rows < now.source_length[:, None, None, None])


def _check(
    options: dict[str, Any],
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
) -> None:
    """Reject attention options that no graph can represent. Raises ExportError."""
    names = {name for name, value in options.items() if value is not None and value is not False}
    if unknown := sorted(names - _IGNORED_OPTIONS):
        raise ExportError(f"the model's attention has {unknown[0]}, which is not supported")
    if mask is None:
        raise ExportError(
            "the model's attention does not take its mask from transformers "
            f"({internals.describe_versions()})"
        )
    if sinks is not None and softcap:
        raise ExportError("the model's attention has both sinks and a softcap")


def onnx_operator(
    name: str, inputs: tuple[torch.Tensor, ...], like: torch.Tensor, shape: Any, **attributes: Any
) -> torch.Tensor:
    """Add one ONNX node to the traced graph."""
    return torch.onnx.ops.symbolic(
        name, inputs, attrs=attributes, dtype=like.dtype, shape=shape, version=OPSET
    )


def _write_rows(buffer: torch.Tensor, rows: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    return onnx_operator("TensorScatter", (buffer, rows, start), buffer, buffer.shape, axis=2)


def _attention_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Compute attention with sinks, which the Attention node does not have, in single steps."""
    batch, heads, _, size = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, size)
    logits = torch.matmul(grouped, key.transpose(2, 3)).reshape(batch, heads, -1, key.shape[2])
    logits = torch.where(mask, logits, float("-inf"))
    sink = query[..., :1] * 0 + sinks.reshape(1, heads, 1, 1)
    probs = torch.softmax(torch.cat((logits, sink), -1), -1)[..., :-1]
    output = torch.matmul(probs.reshape(batch, key.shape[1], -1, key.shape[2]), value)
    return output.reshape(batch, heads, -1, value.shape[3])


def _group_query_attention(
    now: TracedPass,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Add one GroupQueryAttention node, which also writes the cache. -> [B, T, H, D]

    The duplicate of the last row is written after the new rows, where the next pass overwrites it.
    """
    layer = now.layers[now.calls]
    now.calls += 1
    cache, now.cache = now.cache, None
    if cache is None:
        raise ExportError("two layers share one cache, which gqa does not support; use --ops onnx")
    batch, heads, _, size = query.shape
    rows = [
        torch.index_select(t.transpose(1, 2).reshape(batch, -1, t.shape[1] * size), 1, now.rows)
        for t in (query, key, value)
    ]
    attributes = {
        "num_heads": heads, "kv_num_heads": key.shape[1], "scale": scale, "softcap": softcap,
        "local_window_size": layer.window or -1,
    }  # fmt: skip
    if bias is None and mask.dtype != torch.bool:
        bias = mask  # a family that adds its bias to the mask
    if bias is not None:
        bias = bias + torch.index_select(query[:, :1, :, :1], 2, now.rows) * 0
    last = (now.past_length + now.offsets[0, -1:] + 1).to(torch.int32)
    # The constant capacity, because CUDA graph capture requires a value on the host.
    total = torch.full((), now.capacity, dtype=torch.int32)
    inputs = (*rows, cache.keys, cache.values, last, total, None, None, None, bias, sinks)
    while inputs[-1] is None:
        inputs = inputs[:-1]
    output, cache.keys, cache.values = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::GroupQueryAttention",
        inputs,
        attrs={name: v for name, v in attributes.items() if v},
        dtypes=(query.dtype, key.dtype, value.dtype),
        shapes=((batch, rows[0].shape[1], heads * size), cache.keys.shape, cache.values.shape),
        version=1,
    )
    return output[:, :-1].reshape(batch, -1, heads, size)


def _observe_layer(
    now: TracedPass, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> LayerAttention:
    windows = {window for window, _ in now.masks.values()}
    mask_entry = now.masks.get(id(mask))
    window = mask_entry[0] if mask_entry else windows.pop() if len(windows) == 1 else OTHER_MASK
    sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
    written = now.written and key is now.written[0] and value is now.written[1]
    return LayerAttention(window, *sizes, as_cached=bool(written))


OTHER_MASK = -1  # marks a mask that is neither causal nor a window


@dataclass(frozen=True)
class LayerAttention:
    """Observed behavior of one attention call.

    `window` is None for full attention; `as_cached` is True if the keys and values are those that
    were written to the cache; scores are multiplied by `scale`.
    """

    window: int | None
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    as_cached: bool
    scale: float = 1.0
    softcap: float = 0.0

    def gqa_obstacle(self) -> str | None:
        """Return the reason why GroupQueryAttention cannot compute this; None if it can."""
        if self.window == OTHER_MASK:
            return "its attention mask is neither causal nor a window"
        if not self.as_cached:
            return "its cache holds something other than the keys and values it attends to"
        if self.key_size != self.value_size:
            return f"its keys have size {self.key_size}, its values {self.value_size}"
        if self.key_size % 8:
            return f"its heads have size {self.key_size}, which is not a multiple of 8"
        return None


def detect_window(mask: torch.Tensor, queries: torch.Tensor) -> int | None:
    """Return the window of a mask including the query; None for causal. [n, S], [n] -> window"""
    keys = torch.arange(mask.shape[1])
    widths = mask.sum(1)
    width = int(widths.max())
    for window in (None, width):
        lowest = queries - (window or mask.shape[1])
        windowed = (keys <= queries[:, None]) & (keys > lowest[:, None])
        if torch.equal(mask, windowed):
            return window
    return OTHER_MASK
