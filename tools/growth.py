"""A small checkpoint's function in a larger model of the same architecture, tensor by tensor.

The larger model computes the smaller one's logits, but for rounding, while `noise` is 0:

* The small residual stream is the first channels of the large one, times `sqrt(H / h)`, so that its
  mean square stays. What else a Llama's stream has is 0. In GPT-2's it is the mean of the small
  stream: then LayerNorm subtracts the same mean and divides by the same deviation.
* Layers, heads and neurons that the small model lacks have random weights where they read, and
  zeros where they write.
* A rotary pair goes to the place that turns at its frequency, and queries are scaled for the larger
  head's division by `sqrt(head_dim)`.
* A row of the tables for a token that the small model lacks is the mean of several of its rows, so
  its logit is never the largest; they are those of rare tokens, so it is small.

With noise every matrix that writes to the stream, and the embedding's other channels, have normal
numbers added. H, D, N, V are the large model's hidden size, head size, layers and vocabulary, and
small letters the small one's.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MIXED = 4  # rows that a new token's row is the mean of


class GrowthError(ValueError):
    """A source that does not fit into a shape."""


@dataclass(frozen=True)
class Places:
    """Entry `source[i]` of the small model's axis goes to `target[i]` of an axis of `size`."""

    source: Tensor
    target: Tensor
    size: int


@dataclass(frozen=True)
class Axis:
    """Counts that must fit: what it is called, and how many the two models have."""

    name: str
    small: int
    large: int


class Growth:
    """The tensors of a large model; of its subclasses one for each architecture.

    `weights` are the small model's by their names, in float32, `small` and `large` configs, `rare`
    tokens that it seldom gives.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        small: Any,
        large: Any,
        rare: Tensor,
        noise: float,
        seed: int,
    ) -> None:
        self.weights, self.small, self.large, self.rare = weights, small, large, rare
        self.noise, self.seed = noise, seed
        self.head_dim = _head_dim(large)
        for axis in self._axes():
            if axis.small > axis.large:
                raise GrowthError(
                    f"{axis.name}: the source needs {axis.small}, the shape has {axis.large}"
                )
        h, H = small.hidden_size, large.hidden_size  # noqa: N806
        self.gain = (H / h) ** 0.5
        self.stream = Places(torch.arange(h), torch.arange(h), H)
        n, N = small.num_hidden_layers, large.num_hidden_layers  # noqa: N806
        self.layers = {(2 * i + 1) * N // (2 * n): i for i in range(n)}

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """A tensor of the large model in float32."""
        raise NotImplementedError

    def _axes(self) -> list[Axis]:
        small, large = self.small, self.large
        return [
            Axis("hidden size", small.hidden_size, large.hidden_size),
            Axis("layers", small.num_hidden_layers, large.num_hidden_layers),
            Axis("head size", _head_dim(small), self.head_dim),
            Axis("vocabulary", small.vocab_size, large.vocab_size),
        ]

    def _source(self, name: str) -> Tensor | None:
        """The small model's tensor that belongs in a layer's, None in a layer that it lacks."""
        number = re.search(r"\.(\d+)\.", name)
        if number is None:
            return self.weights[name]
        layer = self.layers.get(int(number[1]))
        return None if layer is None else self.weights[name.replace(number[0], f".{layer}.", 1)]

    def _random(self, name: str, *shape: int) -> Tensor:
        """Normal numbers that depend on the seed and the tensor's name."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
        return torch.randn(shape, generator=generator)

    def _noise(self, name: str, *shape: int, fan_in: int = 1) -> Tensor:
        """What is added where there is to be no function: as large as `noise` says.

        All that write to the stream, two in a layer and the embedding, have equal parts in noise
        whose size is `noise` times that of an embedding.
        """
        if not self.noise:
            return torch.zeros(shape)
        size = self._embedding().square().mean().sqrt()
        parts = fan_in * (2 * self.large.num_hidden_layers + 1)
        return self._random(name, *shape).mul_(float(self.noise * size / parts**0.5))

    def _embedding(self) -> Tensor:
        """The small model's. [v, h]"""
        raise NotImplementedError

    def _heads(self, source: Tensor, target: Tensor, count: int, entries: Tensor) -> Places:
        """Head `source[i]` becomes head `target[i]` of `count`, entry j of one `entries[j]`."""
        d = len(entries)
        old = source[:, None] * d + torch.arange(d)
        new = target[:, None] * self.head_dim + entries
        return Places(old.flatten(), new.flatten(), count * self.head_dim)

    def _last_divisor(self) -> float:
        """Of the last norm: a head that is the embedding has the stream's scale as well."""
        return self.gain**2 if self.large.tie_word_embeddings else self.gain

    def _widened(self, vectors: Tensor) -> Tensor:
        """Vectors that are added to the stream. [..., h] -> [..., H]"""
        rest = self.large.hidden_size - self.small.hidden_size
        return self.gain * torch.cat([vectors, self._rest(vectors, rest)], -1)

    def _rest(self, vectors: Tensor, size: int) -> Tensor:
        """What other channels have of a vector. [..., h] -> [..., size]"""
        return vectors.new_zeros(*vectors.shape[:-1], size)

    def _reading(self, name: str, matrix: Tensor | None, rows: Places) -> Tensor:
        """A matrix that reads the stream. [out, h] -> [rows.size, H]"""
        found = self._random(name, rows.size, self.stream.size).div_(self.stream.size**0.5)
        if matrix is not None:
            found[rows.target[:, None], self.stream.target] = matrix[rows.source]
        return found

    def _querying(self, name: str, matrix: Tensor | None, rows: Places) -> Tensor:
        """A `_reading` matrix of queries: entries that a head lacked add nothing to its scores."""
        if matrix is None:
            return self._reading(name, None, rows)
        found = self._reading(name, self._scale() * matrix, rows)
        silent = torch.zeros(rows.size, dtype=torch.bool)
        silent.view(-1, self.head_dim)[rows.target // self.head_dim] = True
        silent[rows.target] = False
        found[silent] *= self.noise
        return found

    def _scale(self) -> float:
        """Of queries: attention divides by the root of the head's size."""
        return float((self.head_dim / _head_dim(self.small)) ** 0.5)

    def _writing(self, name: str, matrix: Tensor | None, columns: Places) -> Tensor:
        """A matrix that writes to the stream. [h, in] -> [H, columns.size]"""
        found = self._noise(name, self.stream.size, columns.size, fan_in=columns.size)
        if matrix is not None:
            found[:, columns.target] += self._widened(matrix[:, columns.source].T).T
        return found

    def _norm(self, weight: Tensor | None, divisor: float) -> Tensor:
        """A norm's weights, which undo the stream's scale. [h] -> [H]"""
        if weight is None:
            return torch.ones(self.large.hidden_size)
        rest = self.large.hidden_size - self.small.hidden_size
        return torch.cat([weight, weight.mean().expand(rest)]) / divisor

    def _table(self, name: str, table: Tensor) -> Tensor:
        """An embedding's or a head's rows with those of the tokens it lacks. [v, H] -> [V, H]"""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name} rows".encode()))
        shape = self.large.vocab_size - len(table), MIXED
        chosen = self.rare[torch.randint(len(self.rare), shape, generator=generator)]
        return torch.cat([table, nn.functional.embedding_bag(chosen, table, mode="mean")])

    def _inputs(self, name: str) -> Tensor:
        """The embedding: what is added to the stream, and noise in its other channels."""
        table = self._widened(self._embedding())
        rest = table[:, self.small.hidden_size :]
        rest += self._noise(name, *rest.shape)
        return self._table(name, table)


class LlamaGrowth(Growth):
    """Llama: RMSNorm, rotary positions, groups of query heads that share keys and values."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        d = _head_dim(self.small)
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
        entries = torch.arange(_head_dim(self.small))
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
    d, large = _head_dim(small), shape["head_dim"]
    own = {
        "rms_norm_eps": small.rms_norm_eps,
        "hidden_act": small.hidden_act,
        "rope_theta": rope["rope_theta"] ** (large / d / max(large // d, 1)),
    }
    kept = {key: value for key, value in shape.items() if key != "rope_scaling"}
    return {**kept, **own}


def _head_dim(config: Any) -> int:
    found = getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)


def _num_neurons(config: Any) -> int:
    return int(config.n_inner or 4 * config.hidden_size)


def _spread(vector: Tensor | None, places: Places) -> Tensor:
    """A vector's entries at their places, 0 elsewhere. [small] -> [places.size]"""
    found = torch.zeros(places.size)
    if vector is not None:
        found[places.target] = vector[places.source]
    return found
