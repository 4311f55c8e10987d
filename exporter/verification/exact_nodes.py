"""Float64 implementations of operators that ONNX's reference lacks or defines differently.

Arguments are a node's attributes and inputs. B = 1 sequence, T new tokens, S rows of cache; H query
heads and G key-value heads of size D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch

Array = np.ndarray


def _cast(options: dict[str, Any], x: Array) -> list[Array]:
    """Cast; a cast to float32 keeps float64, the type of the computation."""
    if options["to"] == onnx.TensorProto.FLOAT and x.dtype == np.float64:
        return [x]
    return [x.astype(onnx.helper.tensor_dtype_to_np_dtype(options["to"]))]


def _gelu(options: dict[str, Any], x: Array) -> list[Array]:
    approximation = options.get("approximate", b"none").decode()
    return [torch.nn.functional.gelu(torch.from_numpy(x), approximate=approximation).numpy()]


def _scatter(options: dict[str, Any], buffer: Array, rows: Array, start: Array) -> list[Array]:
    """Compute TensorScatter along S: [B, G, S, D], [B, G, T, D], [B] -> [B, G, S, D]"""
    assert options["axis"] == 2
    buffer = buffer.copy()
    buffer[:, :, int(start[0]) : int(start[0]) + rows.shape[2]] = rows
    return [buffer]


def _skip_norm(options: dict[str, Any], x: Array, skip: Array, scale: Array) -> list[Array | None]:
    """Compute SkipSimplifiedLayerNormalization: the RMS norm of a sum, and the sum."""
    total = x + skip
    mean = (total**2).mean(-1, keepdims=True)
    return [total / np.sqrt(mean + options["epsilon"]) * scale, None, None, total]


def _simplified_norm(options: dict[str, Any], x: Array, scale: Array) -> list[Array]:
    """Compute SimplifiedLayerNormalization, the RMS norm over the last axis."""
    assert options.get("axis", -1) in (-1, x.ndim - 1)
    return [x / np.sqrt((x**2).mean(-1, keepdims=True) + options.get("epsilon", 1e-5)) * scale]


def _rotary_embedding(options: dict[str, Any], x: Array, *inputs: Array) -> list[Array]:
    """Compute RotaryEmbedding of ONNX, or of ONNX Runtime, whose inputs begin with positions.

    [1, T, H D] or [1, H, T, D], 2 * [1, T, R/2], the first R values of each head are rotated;
    or positions [1, T], 2 * [S, R/2].
    """
    assert not options.get("interleaved")
    *positions, cos, sin = inputs
    if positions:
        cos, sin = cos[positions[0]], sin[positions[0]]
    size = 2 * cos.shape[-1]
    if x.ndim == 3:
        heads = options.get("num_heads") or x.shape[-1] // size
        rows = x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)
    else:
        rows = x
    a, b = np.split(rows[..., :size], 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = np.concatenate((a * cos - b * sin, b * cos + a * sin, rows[..., size:]), -1)
    return [rotated.transpose(0, 2, 1, 3).reshape(x.shape) if x.ndim == 3 else rotated]


def grouped_query_attention(
    options: dict[str, Any],
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array,
    past_value: Array,
    last: Array,
    total: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    positions: Array | None = None,
    bias: Array | None = None,
    sinks: Array | None = None,
) -> list[Array]:
    """Compute GroupQueryAttention as specified in ONNX Runtime's ContribOperators.md.

    [1, T, H D], 2 * [1, T, G D], 2 * [1, G, S, D], the last key's row, S, 2 * [S, D/2] ->
    [1, T, H D], caches. Without keys and values the query is a joined product, [1, T, (H + 2 G) D].
    """
    assert positions is None
    heads, groups = options["num_heads"], options["kv_num_heads"]
    length = query.shape[1]
    start = int(last.reshape(-1)[0]) + 1 - length
    end = start + length
    if key is None or value is None:
        size = query.shape[-1] // (heads + 2 * groups)
        query, key, value = np.split(query, [heads * size, (heads + groups) * size], -1)
    q, k, v = (
        torch.from_numpy(x).reshape(length, n, -1).transpose(0, 1)
        for x, n in ((query, heads), (key, groups), (value, groups))
    )
    if options.get("do_rotary"):
        assert cos is not None
        assert sin is not None
        assert not options.get("rotary_interleaved")
        factors = [torch.from_numpy(table[start:end]).to(q) for table in (cos, sin)]
        q, k = (_rotated(x, *factors) for x in (q, k))
    caches = [past_key.copy(), past_value.copy()]
    for cache, rows in zip(caches, (k, v), strict=True):
        cache[0, :, start:end] = rows
    mask = _visible(start, end, options).numpy()
    if bias is not None:
        mask = np.where(mask, bias[..., :end], -np.inf)
    seen, read = (cache[:, :, :end] for cache in caches)
    (output,) = attention(options, q[None].numpy(), seen, read, mask, sinks)
    return [output.transpose(0, 2, 1, 3).reshape(1, length, -1), *caches]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first half of the rotated channels against the second. [H, T, D], 2 * [T, r/2]"""
    half = cos.shape[-1]
    a, b, rest = x.tensor_split((half, 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def attention(
    options: dict[str, Any],
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    sinks: Array | None = None,
) -> list[Array]:
    """Compute Attention of opset 24 without caches, where the softcap precedes the mask.

    The reference of onnx 1.20 applies it after the mask, and computes roots in double.
    [1, H, T, D], 2 * [1, G, S, D], [..., T, S] -> [1, H, T, D]; `sinks` are GroupQueryAttention's.
    """
    q, k, v = (torch.from_numpy(np.ascontiguousarray(x)) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (options.get("scale") or q.shape[-1] ** -0.5)
    if softcap := options.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == bool:
        scores = scores.masked_fill(~torch.from_numpy(mask), -torch.inf)
    elif mask is not None:
        scores = scores + torch.from_numpy(mask)
    if sinks is not None:
        sink = torch.from_numpy(sinks).to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), -1)
    return [(torch.softmax(scores, -1)[..., : k.shape[2]] @ v).numpy()]


def _visible(start: int, end: int, options: dict[str, Any]) -> torch.Tensor:
    """Return the causal or windowed mask of queries start to end. [T, end]"""
    ahead = torch.arange(start, end)[:, None] - torch.arange(end)
    window = options.get("local_window_size", -1)
    return (ahead >= 0) & (ahead < (window if window > 0 else end))


def _conv(options: dict[str, Any], x: Array, weight: Array, bias: Array) -> list[Array]:
    """Compute Conv of one spatial axis. [B, C, N], [M, C, K], [M] -> [B, M, N']"""
    first, last = options["pads"]
    padded = torch.nn.functional.pad(torch.from_numpy(x), (first, last))
    (stride,) = options["strides"]
    tensors = (torch.from_numpy(array.copy()) for array in (weight, bias))
    return [torch.nn.functional.conv1d(padded, *tensors, stride=stride).numpy()]


IMPLEMENTATIONS: dict[str, Callable[..., list[Any]]] = {
    "Attention": attention,
    "Cast": _cast,
    "Conv": _conv,
    "Gelu": _gelu,
    "Erf": lambda options, x: [torch.erf(torch.from_numpy(x)).numpy()],
    # The reference's implementation is limited to 64 rows.
    "GatherElements": lambda options, x, i: [np.take_along_axis(x, i, options.get("axis", 0))],
    "RotaryEmbedding": _rotary_embedding,
    "SimplifiedLayerNormalization": _simplified_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "TensorScatter": _scatter,
    "GroupQueryAttention": grouped_query_attention,
}
