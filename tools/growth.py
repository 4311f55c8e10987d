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
from abc import ABC, abstractmethod
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


class Growth(ABC):
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
        self.head_dim = head_dim(large)
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

    @abstractmethod
    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """A tensor of the large model in float32."""

    def _axes(self) -> list[Axis]:
        small, large = self.small, self.large
        return [
            Axis("hidden size", small.hidden_size, large.hidden_size),
            Axis("layers", small.num_hidden_layers, large.num_hidden_layers),
            Axis("head size", head_dim(small), self.head_dim),
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

    @abstractmethod
    def _embedding(self) -> Tensor:
        """The small model's. [v, h]"""

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
        return float((self.head_dim / head_dim(self.small)) ** 0.5)

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


def head_dim(config: Any) -> int:
    found = getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)
