"""EAGLE-3's forward pass in float64, from SafeAILab/EAGLE's `eagle/model/cnets.py` and the paper.

Layers after the first are those of TensorRT-LLM's `Eagle3DecoderLayer`, whose names they have. It
is written with tensors alone, to check the exporter's modules, which are transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from eagle_heads import HeadSpec

EPSILON, THETA = 1e-5, 10000.0


@dataclass
class EagleReference:
    """A head with its keys and values of earlier rows, by layer. Tensors are [T, ...]."""

    spec: HeadSpec
    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor
    caches: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """[T, F] -> [T, H]"""
        return states.double() @ self._matrix("fc").T

    def run(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read tokens [T] beside hidden states [T, H]; return logits and hidden states."""
        rows = zip(tokens, hidden.double(), strict=True)
        results = [self._row(self.embedding.double()[token], state) for token, state in rows]
        logits, states = zip(*results, strict=True)
        return torch.stack(logits), torch.stack(states)

    def target_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits by token of the target, -inf for those without a column. [T, Vd] -> [T, V]"""
        columns = torch.arange(self.spec.columns)
        scattered = torch.full((len(logits), self.spec.vocab_size), -torch.inf).double()
        scattered[:, columns + self.tensors.get("d2t", torch.zeros_like(columns))] = logits
        return scattered

    def _row(self, embedding: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layers = ["midlayer"]
        if self.spec.num_layers > 1:
            layers = [f"midlayer.{i}" for i in range(self.spec.num_layers)]
        for layer in layers:
            read = self._norm(f"{layer}.hidden_norm", state)
            if layer == layers[0]:
                read = torch.cat((self._norm(f"{layer}.input_layernorm", embedding), read))
            state = state + self._matrix(f"{layer}.self_attn.o_proj") @ self._attend(layer, read)
            read = self._norm(f"{layer}.post_attention_layernorm", state)
            gate = torch.nn.functional.silu(self._matrix(f"{layer}.mlp.gate_proj") @ read)
            inner = gate * (self._matrix(f"{layer}.mlp.up_proj") @ read)
            state = state + self._matrix(f"{layer}.mlp.down_proj") @ inner
        return self._matrix("lm_head") @ self._norm("norm", state), state

    def _attend(self, layer: str, read: torch.Tensor) -> torch.Tensor:
        spec, cache = self.spec, self.caches.setdefault(layer, [])
        position = len(cache)
        q, k, v = (
            (self._matrix(f"{layer}.self_attn.{name}_proj") @ read).view(-1, spec.head_size)
            for name in "qkv"
        )
        cache.append((_rotate(k, position), v))
        group = spec.heads // spec.kv_heads
        keys, values = (
            torch.stack(rows).repeat_interleave(group, 1) for rows in zip(*cache, strict=True)
        )
        scores = torch.einsum("hd,thd->ht", _rotate(q, position), keys) / spec.head_size**0.5
        return torch.einsum("ht,thd->hd", scores.softmax(1), values).flatten()

    def _matrix(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"].double()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._matrix(name) * x / (x.square().mean() + EPSILON).sqrt()


def _rotate(heads: torch.Tensor, position: int) -> torch.Tensor:
    half = heads.shape[1] // 2
    angles = position / THETA ** (torch.arange(half).double() / half)
    a, b = heads[:, :half], heads[:, half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), 1)
