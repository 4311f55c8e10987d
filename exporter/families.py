"""What a few model families need before they can be traced: the least that each lacks.

Most decoders go through transformers' attention interface. Those named below keep attention code of
their own, which is replaced by a call of ours; experts are picked by gathering their matrices.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import attention, capacity, visible

NAME = "specedge"


@contextlib.contextmanager
def registered(model: torch.nn.Module) -> Iterator[None]:
    """Let the model use our attention, masks and experts, and give it its own back."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, visible)
    ALL_EXPERTS_FUNCTIONS.register(NAME, gathered_experts)
    undo = [_set(model, f"_{kind}_implementation", NAME) for kind in ("attn", "experts")]
    for module in model.modules():
        if getattr(module, "use_alibi", False) or type(module).__name__ == "BloomModel":
            undo.append(_whole_alibi(sys.modules[type(module).__module__]))
        for method, replacement in _OWN_ATTENTION.get(type(module).__name__, {}).items():
            setattr(module, method, MethodType(replacement, module))
            undo.append(lambda m=module, n=method: delattr(m, n))  # type: ignore[misc]
    try:
        with torch.no_grad():
            yield
    finally:
        for step in reversed(undo):
            step()


@contextlib.contextmanager
def eager_experts(model: torch.nn.Module) -> Iterator[None]:
    """Let experts compute one after another, the one way that they have in every type."""
    undo = _set(model, "_experts_implementation", "eager")
    try:
        yield
    finally:
        undo()


def _set(model: torch.nn.Module, field: str, value: str) -> Callable[[], None]:
    """Set a field in all configs of a model; returns what sets it back."""
    configs = (getattr(module, "config", None) for module in model.modules())
    before = {id(c): (c, getattr(c, field)) for c in configs if hasattr(c, field)}
    for config, _ in before.values():
        setattr(config, field, value)

    def undo() -> None:
        for config, old in before.values():
            setattr(config, field, old)

    return undo


def _whole_alibi(code: Any) -> Callable[[], None]:
    """Let a model build its biases for all rows of the cache, not for the new ones alone.

    Newer versions of bloom do so themselves.
    """
    build = code.build_alibi_tensor

    def whole(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        return build(torch.ones(1, capacity(), dtype=mask.dtype), num_heads, dtype)

    code.build_alibi_tensor = whole
    return lambda: setattr(code, "build_alibi_tensor", build)


def gathered_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Each token times its own experts' matrices, a graph of fixed structure.

    [T, in], [T, k], [T, k] -> [T, in]
    """
    first = "gate_up_proj" if self.has_gate else "up_proj"
    inner = _expert_linear(self, first, hidden_states[:, None], top_k_index)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    outer = _expert_linear(self, "down_proj", inner, top_k_index)
    if getattr(self, "has_post_expert_norm", False):
        outer = self.post_expert_norm(outer)
    return (outer * top_k_weights[..., None]).sum(1)


def _expert_linear(self: Any, name: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[T, 1 or k, in], [T, k] -> [T, k, out]"""
    weight = getattr(self, name)[index]
    if self.is_transposed:
        result = torch.matmul(x[..., None, :], weight)[..., 0, :]
    else:
        result = torch.matmul(weight, x[..., None])[..., 0]
    return result + getattr(self, f"{name}_bias")[index] if self.has_bias else result


def _gptj(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, None]:
    scaling = 1 / float(self.scale_attn)
    output, _ = attention(self, query, key, value, mask, scaling=scaling)
    return output.transpose(1, 2), None


def _bloom(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: torch.Tensor,
    layer_past: Any,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    key, value = layer_past.update(key, value, self.layer_idx)
    output, _ = attention(
        self, query, key, value, attention_mask, scaling=self.inv_norm_factor, bias=alibi[None]
    )
    return self.dense(output.flatten(2)) + residual, None


def _falcon(
    self: Any,
    hidden_states: torch.Tensor,
    alibi: torch.Tensor | None,
    attention_mask: torch.Tensor,
    layer_past: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """With ALiBi the mask is a bias already, as the model makes it for its own fused attention."""
    query, key, value = _falcon_heads(self, self.query_key_value(hidden_states))
    if alibi is None:
        rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
        assert position_embeddings is not None
        query, key = rotate(query, key, *position_embeddings)
    key, value = layer_past.update(key, value, self.layer_idx)
    output, _ = attention(self, query, key, value, attention_mask)
    return self.dense(output.flatten(2)), None


def _falcon_heads(self: Any, fused: torch.Tensor) -> list[torch.Tensor]:
    """[B, T, ...] -> 3 * [B, heads, T, D]; the model caches a key for every query head."""
    if not self.new_decoder_architecture:
        return [part.transpose(1, 2) for part in self._split_heads(fused)]
    groups = self.num_heads // self.num_kv_heads
    parts = fused.unflatten(2, (self.num_kv_heads, groups + 2, self.head_dim))
    repeated = torch.arange(self.num_heads) // groups
    pairs = (torch.index_select(parts[:, :, :, -i], 2, repeated) for i in (2, 1))
    return [part.transpose(1, 2) for part in (parts[:, :, :, :-2].flatten(2, 3), *pairs)]


_OWN_ATTENTION: dict[str, dict[str, Callable[..., Any]]] = {
    "GPTJAttention": {"_attn": _gptj},
    "CodeGenAttention": {"_attn": _gptj},
    "BloomAttention": {"forward": _bloom},
    "FalconAttention": {"forward": _falcon},
}
