"""Reference of MiMo's MTP layer in float64, without transformers.

Written after `MiMoMTPLayers` in `modeling_mimo.py` of XiaomiMiMo/MiMo-7B-RL, whose attention and
MLP are those of Qwen2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.functional import linear, silu

PREFIX = "model.mtp_layers.0."


@dataclass
class MimoReference:
    """The layer with its rows of keys and values so far; H channels, V vocabulary entries."""

    tensors: Mapping[str, torch.Tensor]
    num_heads: int
    num_kv_heads: int
    theta: float
    epsilon: float
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def run(
        self, tokens: torch.Tensor, hidden: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read tokens [T] and states [T, H] from a position on; return logits and next states."""
        embedding = self._tensor("model.embed_tokens.weight")[tokens]
        joined = (self._norm("hidden_layernorm", hidden), self._norm("token_layernorm", embedding))
        total = self._linear("input_proj", torch.cat(joined, -1))
        rows = self._norm("input_layernorm", total)
        attended = [self._attend(row, start + i) for i, row in enumerate(rows)]
        total = total + self._linear("self_attn.o_proj", torch.stack(attended))
        rows = self._norm("post_attention_layernorm", total)
        gated = silu(self._linear("mlp.gate_proj", rows)) * self._linear("mlp.up_proj", rows)
        states = self._norm("final_layernorm", total + self._linear("mlp.down_proj", gated))
        return linear(states, self._tensor("lm_head.weight")), states

    def _attend(self, row: torch.Tensor, position: int) -> torch.Tensor:
        """Attend from a normalized row to it and all earlier ones. [H] -> [H]"""
        query, key, value = (self._linear(f"self_attn.{name}_proj", row) for name in "qkv")
        size = len(query) // self.num_heads
        self.keys.append(self._rotate(key.view(self.num_kv_heads, size), position))
        self.values.append(value.view(self.num_kv_heads, size))
        queries = self._rotate(query.view(self.num_heads, size), position)
        outputs = []
        for head, vector in enumerate(queries):
            group = head * self.num_kv_heads // self.num_heads
            keys, values = (torch.stack(x)[:, group] for x in (self.keys, self.values))
            outputs.append(torch.softmax(keys @ vector / size**0.5, 0) @ values)
        return torch.cat(outputs)

    def _rotate(self, vectors: torch.Tensor, position: int) -> torch.Tensor:
        """Rotate pairs (i, i + D/2) of vectors [heads, D]."""
        size = vectors.shape[1]
        angles = position / self.theta ** (torch.arange(0, size, 2).double() / size)
        cos, sin = (torch.cat((x, x)) for x in (angles.cos(), angles.sin()))
        first, second = vectors.chunk(2, -1)
        return vectors * cos + torch.cat((-second, first), -1) * sin

    def _tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name].double()

    def _norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return self._tensor(f"{PREFIX}{name}.weight") * rows * scale

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        bias = f"{PREFIX}{name}.bias"
        weight = self._tensor(f"{PREFIX}{name}.weight")
        return linear(rows, weight, self._tensor(bias) if bias in self.tensors else None)
