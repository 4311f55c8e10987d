"""Growth of each architecture: where its tensors read and write, and what it needs of a source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from growth import Axis, Growth, GrowthError, Places, head_dim


class LlamaGrowth(Growth):
    """Llama: RMSNorm, rotary positions, groups of query heads that share keys and values."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        d = head_dim(self.small)
        # Frequency i of d is theta^(-2i / d): number i * step of D, at the theta that `config` has.
        pairs = torch.arange(d // 2) * (self.head_dim // d)
        turning, straight = torch.cat([pairs, self.head_dim // 2 + pairs]), torch.arange(d)
        small, large = self.small, self.large
        wide, group = (one.num_attention_heads // one.num_key_value_heads for one in (small, large))
        copies = -(-wide // group)  # of a key head whose queries do not fit into one group
        queries = torch.arange(small.num_attention_heads)
        keys = torch.arange(small.num_key_value_heads).repeat_interleave(copies)
        rank = queries % wide
        homes = (queries // wide * copies + rank // group) * group + rank % group
        heads, key_heads = large.num_attention_heads, large.num_key_value_heads
        self.queries = self._heads(queries, homes, heads, turning)
        self.outputs = self._heads(queries, homes, heads, straight)
        self.keys = self._heads(keys, torch.arange(len(keys)), key_heads, turning)
        self.values = self._heads(keys, torch.arange(len(keys)), key_heads, straight)
        inner = torch.arange(small.intermediate_size)
        self.neurons = Places(inner, inner, large.intermediate_size)

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        kind = name.split(".")[-2]
        source = self._source(name) if kind != "lm_head" else self.weights.get(name)
        match kind:
            case "q_proj":
                return self._querying(name, source, self.queries)
            case "k_proj":
                return self._reading(name, source, self.keys)
            case "v_proj":
                return self._reading(name, source, self.values)
            case "gate_proj" | "up_proj":
                return self._reading(name, source, self.neurons)
            case "o_proj":
                return self._writing(name, source, self.outputs)
            case "down_proj":
                return self._writing(name, source, self.neurons)
            case "embed_tokens":
                return self._inputs(name)
            case "lm_head":
                return self._head(name, self._embedding() if source is None else source)
            case "norm":
                return self._norm(source, self._last_divisor())
            case _:
                return self._norm(source, self.gain)

    def _axes(self) -> list[Axis]:
        small, large = self.small, self.large
        wide, group = (one.num_attention_heads // one.num_key_value_heads for one in (small, large))
        needed = small.num_key_value_heads * -(-wide // group)
        return [
            *super()._axes(),
            Axis("neurons", small.intermediate_size, large.intermediate_size),
            Axis(f"key heads with {group} query heads each", needed, large.num_key_value_heads),
        ]

    def _embedding(self) -> Tensor:
        return self.weights["model.embed_tokens.weight"]

    def _head(self, name: str, head: Tensor) -> Tensor:
        """A head that is no embedding: it reads the stream. [v, h] -> [V, H]"""
        rest = self.large.hidden_size - self.small.hidden_size
        others = self._random(name, len(head), rest).mul_(float(head.std()))
        return self._table(name, torch.cat([head, others], 1))


class GPT2Growth(Growth):
    """GPT-2: LayerNorm, learned positions, biases; its matrices are stored [in, out]."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        heads = torch.arange(self.small.num_attention_heads)
        entries = torch.arange(head_dim(self.small))
        self.heads = self._heads(heads, heads, self.large.num_attention_heads, entries)
        inner = torch.arange(_num_neurons(self.small))
        self.neurons = Places(inner, inner, _num_neurons(self.large))

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        module, kind, part = ("." + name).split(".")[-3:]
        source = self._source(name)
        is_weight = part == "weight"
        match kind:
            case "wte":
                return self._inputs(name)
            case "wpe":
                assert source is not None
                return self._widened(source)[torch.arange(shape[0]) % len(source)]
            case "c_attn":
                return self._joined(name, source)
            case "c_fc" if is_weight:
                matrix = None if source is None else source.T
                return self._reading(name, matrix, self.neurons).T
            case "c_fc":
                return _spread(source, self.neurons)
            case "c_proj" if is_weight:
                columns = self.heads if module == "attn" else self.neurons
                return self._writing(name, None if source is None else source.T, columns).T
            case "c_proj":
                return torch.zeros(shape) if source is None else self._widened(source)
            case "ln_f" if is_weight:
                return self._norm(source, self._last_divisor())
            case _ if is_weight:
                return self._norm(source, self.gain)
            case "ln_f":
                assert source is not None
                return _spread(source, self.stream) / (self._last_divisor() / self.gain)
            case _:
                return _spread(source, self.stream)

    def _axes(self) -> list[Axis]:
        small, large = self.small, self.large
        return [
            *super()._axes(),
            Axis("heads", small.num_attention_heads, large.num_attention_heads),
            Axis("neurons", _num_neurons(small), _num_neurons(large)),
        ]

    def _embedding(self) -> Tensor:
        return self.weights["transformer.wte.weight"]

    def _rest(self, vectors: Tensor, size: int) -> Tensor:
        return vectors.mean(-1, keepdim=True).expand(*vectors.shape[:-1], size)

    def _joined(self, name: str, source: Tensor | None) -> Tensor:
        """Queries, keys and values side by side: [h, 3h] -> [H, 3H], or the biases of these."""
        parts = [None] * 3 if source is None else source.chunk(3, -1)
        if name.endswith("bias"):
            queries, *others = (_spread(part, self.heads) for part in parts)
            return torch.cat([self._scale() * queries, *others])
        query, key, value = (None if part is None else part.T for part in parts)
        matrices = [
            self._querying(f"{name} 0", query, self.heads),
            self._reading(f"{name} 1", key, self.heads),
            self._reading(f"{name} 2", value, self.heads),
        ]
        return torch.cat(matrices).T


FAMILIES: dict[str, type[Growth]] = {"llama": LlamaGrowth, "gpt2": GPT2Growth}


def settings(small: Any, shape: dict[str, Any]) -> dict[str, Any]:
    """A shape's config with the settings that the function depends on as the source has them.

    Raises GrowthError for a source of another architecture, or with what larger models cannot keep.
    """
    kind = shape["model_type"]
    if small.model_type != kind:
        raise GrowthError(
            f"the source is a {small.model_type}, the shape a {kind}; "
            "positions and norms of one are not a case of the other's"
        )
    tied = bool(small.tie_word_embeddings)
    if kind == "gpt2":
        if not tied or small.scale_attn_by_inverse_layer_idx or not small.scale_attn_weights:
            raise GrowthError("the source is no plain GPT-2: its head or attention has an option")
        own = {
            "layer_norm_epsilon": small.layer_norm_epsilon,
            "activation_function": small.activation_function,
        }
        return {**shape, **own}
    rope = small.rope_parameters
    if rope["rope_type"] != "default" or small.attention_bias or small.mlp_bias:
        raise GrowthError("the source is no plain Llama: it scales positions or has biases")
    if shape["tie_word_embeddings"] and not tied:
        raise GrowthError("the shape's head is its embedding, the source has one of its own")
    d, large = head_dim(small), shape["head_dim"]
    own = {
        "rms_norm_eps": small.rms_norm_eps,
        "hidden_act": small.hidden_act,
        "rope_theta": rope["rope_theta"] ** (large / d / max(large // d, 1)),
    }
    kept = {key: value for key, value in shape.items() if key != "rope_scaling"}
    return {**kept, **own}


def _num_neurons(config: Any) -> int:
    return int(config.n_inner or 4 * config.hidden_size)


def _spread(vector: Tensor | None, places: Places) -> Tensor:
    """A vector's entries at their places, 0 elsewhere. [small] -> [places.size]"""
    found = torch.zeros(places.size)
    if vector is not None:
        found[places.target] = vector[places.source]
    return found
