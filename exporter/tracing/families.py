"""Minimal adaptations of a few model families for tracing.

Most decoders use transformers' attention interface. The families below have attention code of their
own, which is replaced. Class names, methods and arguments are those of the tested versions of
transformers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.masking_utils import sliding_window_causal_mask_function

from .. import internals
from ..checkpoint.placeholders import WeightSources
from . import experts
from .attention import attention, attention_mask, current_pass

NAME = "specedge"


@contextlib.contextmanager
def registered_functions(
    model: torch.nn.Module, sources: WeightSources | None = None
) -> Iterator[None]:
    """Make the model use this package's attention, masks and experts while the context lasts.

    `sources` have the values of placeholders, if it is traced.
    """
    with contextlib.ExitStack() as stack:
        internals.register_functions(
            NAME, attention, attention_mask, experts.prepare_experts(model, stack, sources)
        )
        for function in ("attn", "experts"):
            stack.enter_context(internals.implementation(model, function, NAME))
        for module in model.modules():
            if getattr(module, "use_alibi", False) or type(module).__name__ == "BloomModel":
                stack.callback(_patch_alibi(_source_module(module)))
            for method, replacement in _REPLACEMENTS.get(type(module).__name__, {}).items():
                setattr(module, method, MethodType(replacement, module))
                stack.callback(delattr, module, method)
        stack.enter_context(torch.no_grad())
        yield


@contextlib.contextmanager
def eager_functions(model: torch.nn.Module) -> Iterator[None]:
    """Select eager attention and experts, which support every type, while the context lasts.

    Falcon's eager attention adds ALiBi's biases twice (transformers 5.23), so it uses its default.
    """
    with eager_attention(model), internals.implementation(model, "experts", "eager"):
        yield


def eager_attention(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Select eager attention, as `eager_functions`."""
    is_falcon = any(type(module).__name__ == "FalconAttention" for module in model.modules())
    return internals.implementation(model, "attn", "sdpa" if is_falcon else "eager")


@contextlib.contextmanager
def count_experts(model: torch.nn.Module) -> Iterator[dict[torch.nn.Module, int]]:
    """Replace experts by a function that records how many of them a row uses, on any device."""
    counts: dict[torch.nn.Module, int] = {}

    def count(
        module: torch.nn.Module, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        counts[module] = chosen.shape[1]
        return torch.zeros_like(rows)

    internals.register_functions(NAME, attention, attention_mask, count)
    with internals.implementation(model, "experts", NAME):
        yield counts


def _source_module(module: Any) -> Any:
    """Return the Python module that defines a module's class."""
    return sys.modules[type(module).__module__]


def _patch_alibi(code: Any) -> Callable[[], None]:
    """Patch a model to build biases for all rows of the cache, as newer versions of Bloom do."""
    build = code.build_alibi_tensor

    def whole(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        whole_mask = torch.ones(1, current_pass().capacity, dtype=mask.dtype, device=mask.device)
        return build(whole_mask, num_heads, dtype)

    code.build_alibi_tensor = whole
    return lambda: setattr(code, "build_alibi_tensor", build)


def _gptj(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, None]:
    output, _ = attention(self, query, key, value, mask, scaling=1 / float(self.scale_attn))
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
    """Replace Falcon's forward; with ALiBi the mask contains the bias."""
    query, key, value = _falcon_heads(self, self.query_key_value(hidden_states))
    if alibi is None:
        rotate = _source_module(self).apply_rotary_pos_emb
        assert position_embeddings is not None
        query, key = rotate(query, key, *position_embeddings)
    key, value = layer_past.update(key, value, self.layer_idx)
    output, _ = attention(self, query, key, value, attention_mask)
    return self.dense(output.flatten(2)), None


def _falcon_heads(self: Any, fused: torch.Tensor) -> list[torch.Tensor]:
    """Split heads, cached per query head. [B, T, ...] -> 3 * [B, heads, T, D]"""
    if not self.new_decoder_architecture:
        return [part.transpose(1, 2) for part in self._split_heads(fused)]
    groups = self.num_heads // self.num_kv_heads
    parts = fused.unflatten(2, (self.num_kv_heads, groups + 2, self.head_dim))
    repeated = torch.arange(self.num_heads) // groups
    pairs = (torch.index_select(parts[:, :, :, -i], 2, repeated) for i in (2, 1))
    return [part.transpose(1, 2) for part in (parts[:, :, :, :-2].flatten(2, 3), *pairs)]


def _mpt(
    self: Any,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,
    attention_mask: torch.Tensor,
    **inputs: Any,
) -> tuple[torch.Tensor, None]:
    """Replace MPT's forward; `position_bias` is `_mpt_alibi`'s."""
    fused = self.Wqkv(hidden_states)
    if self.clip_qkv:
        fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    heads = (part.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in fused.chunk(3, 2))
    query, key, value = heads
    key, value = _cache_of(inputs).update(key, value, self.layer_idx)
    output, _ = attention(
        self, query, key, value, attention_mask, scaling=self.softmax_scale, bias=position_bias
    )
    return self.out_proj(output.flatten(2)), None


def _cache_of(inputs: dict[str, Any]) -> Any:
    """Return the cache among a module's inputs; transformers 5.24 renamed the argument."""
    return inputs["cache"] if "cache" in inputs else inputs["past_key_values"]


def _mpt_alibi(self: Any, num_heads: int, length: int, **unused: Any) -> torch.Tensor:
    """Return ALiBi's biases by distance to each row, bitwise equal for any T. [B, H, T + 1, S]

    The model measures distances from the last key; softmax is invariant to the difference.
    """
    now = current_pass()
    slopes = -_source_module(self).build_mpt_alibi_tensor(num_heads, 2)[:, :, :1]
    rows = torch.cat((now.positions, now.positions[:, -1:]), 1)
    distances = torch.arange(now.capacity, device=rows.device) - rows[..., None]
    return slopes.to(rows.device) * distances[:, None].float()


def _llama4(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: torch.Tensor,
    attention_mask: torch.Tensor,
    **inputs: Any,
) -> tuple[torch.Tensor, None]:
    """Replace Llama 4's forward, which reads the sequence length from the cache."""
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    query, key, value = (part.unflatten(2, (-1, self.head_dim)) for part in parts)
    if self.use_rope:
        query, key = _source_module(self).apply_rotary_emb(query, key, position_embeddings)
    if hasattr(self, "qk_norm"):
        query, key = self.qk_norm(query), self.qk_norm(key)
    if self.attn_temperature_tuning and not self.use_rope:
        steps = torch.floor((current_pass().positions.float() + 1) / self.floor_scale)
        query = query * (torch.log1p(steps) * self.attn_scale + 1)[..., None, None]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    key, value = _cache_of(inputs).update(key, value, self.layer_idx)
    output, _ = attention(self, query, key, value, attention_mask, scaling=self.scaling)
    return self.o_proj(output.flatten(2)), None


def _llama4_experts(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute all experts as one wide MLP, so that results are bitwise equal for any T.

    The router's weight is applied after the first matrix instead of before it.
    """
    rows = hidden_states.flatten(0, -2)
    scores, logits = self.router(rows)
    first, last = self.experts.gate_up_proj, self.experts.down_proj
    inner = torch.matmul(rows, first.transpose(0, 1).flatten(1))
    gate, up = (inner.unflatten(1, (len(first), -1)) * scores[..., None]).chunk(2, -1)
    outer = up * self.experts.act_fn(gate)
    return self.shared_expert(rows) + torch.matmul(outer.flatten(1), last.flatten(0, 1)), logits


def _t5_bias(self: Any, *unused: Any, **more: Any) -> torch.Tensor:
    """Replace T5's relative position bias by a lookup by distance. -> [B, H, T + 1, S]"""
    now = current_pass()
    rows = torch.arange(now.capacity, device=now.offsets.device)
    options = {}
    if internals.has_parameter(self._relative_position_bucket, "bidirectional"):
        options = {
            "bidirectional": False,
            "num_buckets": self.relative_attention_num_buckets,
            "max_distance": self.relative_attention_max_distance,
        }
    table = self.relative_attention_bias(self._relative_position_bucket(-rows, **options))
    distances = torch.clamp(now.query_positions[..., None] - rows, min=0)
    return nn.functional.embedding(distances, table).permute(0, 3, 1, 2)


def _positions(self: Any, *unused: Any, **more: Any) -> torch.Tensor:
    """Replace a lookup of position embeddings, which counts rows of the cache."""
    offset, positions = getattr(self, "offset", 0), current_pass().positions
    last = len(self.weight) - 1 - offset
    return nn.functional.embedding(torch.clamp(positions, max=last) + offset, self.weight)


def _m2m_positions(self: Any, *unused: Any, **more: Any) -> torch.Tensor:
    """Replace M2M-100's, whose first position follows the padding's."""
    positions = current_pass().positions + self.padding_idx + 1
    return nn.functional.embedding(torch.clamp(positions, max=len(self.weights) - 1), self.weights)


def _gpt_neo(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Replace GPT-Neo's attention: "local" layers have a window; nothing is scaled."""
    if self.attention_type == "local":
        mask = attention_mask(sliding_window_causal_mask_function(self.config.window_size))
    output, _ = attention(self, query, key, value, mask, scaling=1.0)
    return output.transpose(1, 2), None


_REPLACEMENTS: dict[str, dict[str, Callable[..., Any]]] = {
    "GPTJAttention": {"_attn": _gptj},
    "CodeGenAttention": {"_attn": _gptj},
    "BloomAttention": {"forward": _bloom},
    "FalconAttention": {"forward": _falcon},
    "MptAttention": {"forward": _mpt},
    "MptModel": {"build_mpt_alibi_tensor": _mpt_alibi},
    "Llama4TextAttention": {"forward": _llama4},
    "Llama4TextMoe": {"forward": _llama4_experts},
    "GPTNeoSelfAttention": {"_attn": _gpt_neo},
    "T5Attention": {"compute_bias": _t5_bias},
    "MT5Attention": {"compute_bias": _t5_bias},
    "UMT5Attention": {"compute_bias": _t5_bias},
    "BartLearnedPositionalEmbedding": {"forward": _positions},
    "MBartLearnedPositionalEmbedding": {"forward": _positions},
    "PLBartLearnedPositionalEmbedding": {"forward": _positions},
    "BlenderbotLearnedPositionalEmbedding": {"forward": _positions},
    "BlenderbotSmallLearnedPositionalEmbedding": {"forward": _positions},
    "MvpLearnedPositionalEmbedding": {"forward": _positions},
    "MarianSinusoidalPositionalEmbedding": {"forward": _positions},
    "PegasusSinusoidalPositionalEmbedding": {"forward": _positions},
    "WhisperPositionalEmbedding": {"forward": _positions},
    "M2M100SinusoidalPositionalEmbedding": {"forward": _m2m_positions},
}
