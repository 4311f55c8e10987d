"""EAGLE-3's forward pass in float64, from SafeAILab/EAGLE's `eagle/model/cnets.py` and the paper.

It is written with tensors alone, to check the exporter's modules, which are transformers'.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from eagle_heads import HeadSpec

EPSILON, THETA = 1e-5, 10000.0


@dataclass
class EagleReference:
    """A head with one layer, with its keys and values of earlier rows. Tensors are [T, ...]."""

    spec: HeadSpec
    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

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
        spec, position = self.spec, len(self.keys)
        read = torch.cat(
            (
                self._norm("midlayer.input_layernorm", embedding),
                self._norm("midlayer.hidden_norm", state),
            )
        )
        q, k, v = (
            (self._matrix(f"midlayer.self_attn.{name}_proj") @ read).view(-1, spec.head_size)
            for name in "qkv"
        )
        self.keys.append(_rotate(k, position))
        self.values.append(v)
        group = spec.heads // spec.kv_heads
        keys = torch.stack(self.keys).repeat_interleave(group, 1)
        values = torch.stack(self.values).repeat_interleave(group, 1)
        scores = torch.einsum("hd,thd->ht", _rotate(q, position), keys) / spec.head_size**0.5
        attended = torch.einsum("ht,thd->hd", scores.softmax(1), values).flatten()
        state = state + self._matrix("midlayer.self_attn.o_proj") @ attended
        read = self._norm("midlayer.post_attention_layernorm", state)
        gate = torch.nn.functional.silu(self._matrix("midlayer.mlp.gate_proj") @ read)
        inner = gate * (self._matrix("midlayer.mlp.up_proj") @ read)
        state = state + self._matrix("midlayer.mlp.down_proj") @ inner
        return self._matrix("lm_head") @ self._norm("norm", state), state

    def _matrix(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"].double()

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._matrix(name) * x / (x.square().mean() + EPSILON).sqrt()


def _rotate(heads: torch.Tensor, position: int) -> torch.Tensor:
    half = heads.shape[1] // 2
    angles = position / THETA ** (torch.arange(half).double() / half)
    a, b = heads[:, :half], heads[:, half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), 1)
