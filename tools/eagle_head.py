"""EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) for training, with SafeAILab's tensor names.

B sequences of T rows; F channels of the target's concatenated hidden states, H of the head's, V
draft tokens. Row t has the hidden states of token t and the embedding of token t + 1, and its
logits predict token t + 2. Step s > 0 of the training-time test reads, in row t, the head's own
output of step s - 1 and the embedding of token t + 1 + s: it drafts token t + 2 + s of a draft that
begins after token t + 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig


class HeadAttention(nn.Module):
    """Attention over the rows of step 0 and the steps of the row's own draft."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, self.dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(2 * size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(2 * size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, size, bias=False)
        exponents = torch.arange(0, self.dim, 2) / self.dim
        theta = config.rope_parameters["rope_theta"]
        self.register_buffer("frequencies", theta**-exponents, persistent=False)

    def rotate(self, states: torch.Tensor, step: int) -> torch.Tensor:
        """Apply RoPE for the positions t + step. [B, heads, T, D]"""
        positions = torch.arange(states.shape[2]) + step
        angles = (positions[:, None] * self.frequencies).repeat(1, 2)
        first, second = states.float().chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return (states * angles.cos() + turned * angles.sin()).to(states.dtype)

    def forward(
        self, inputs: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Attend, and append keys and values of this step to those of earlier steps.

        Args:
            inputs: Normalized embeddings and hidden states [B, T, 2 H].
            past: Keys and values [B, H_kv, T, D] of the steps before.

        Returns:
            The output [B, T, H].
        """
        batch, rows, _ = inputs.shape
        step, repeats = len(past), self.heads // self.kv_heads

        def split(states: torch.Tensor) -> torch.Tensor:
            return states.view(batch, rows, -1, self.dim).transpose(1, 2)

        query = self.rotate(split(self.q_proj(inputs)), step)
        key = self.rotate(split(self.k_proj(inputs)), step)
        past.append((key, split(self.v_proj(inputs))))
        # Grouped queries share keys: [B, H_kv, repeats, T, D].
        query = query.unflatten(1, (self.kv_heads, repeats)) * self.dim**-0.5
        keys, values = zip(*((k[:, :, None], v[:, :, None]) for k, v in past), strict=True)
        future = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = [(query @ keys[0].transpose(-1, -2)).masked_fill(future, -torch.inf)]
        scores += [(query * k).sum(-1, keepdim=True) for k in keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(query.dtype)
        output = weights[..., :rows] @ values[0]
        for i, value in enumerate(values[1:]):
            output = output + weights[..., rows + i, None] * value
        return self.o_proj(output.flatten(1, 2).transpose(1, 2).flatten(2))


class HeadLayer(nn.Module):
    """Decoder layer that reads an embedding beside the hidden state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = HeadAttention(config)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, config.intermediate_size, bias=False),
                "up_proj": nn.Linear(size, config.intermediate_size, bias=False),
                "down_proj": nn.Linear(config.intermediate_size, size, bias=False),
            }
        )
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Return the next hidden states. [B, T, H]"""
        inputs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(inputs, past)
        inner, mlp = self.post_attention_layernorm(hidden), self.mlp
        gated = functional.silu(mlp["gate_proj"](inner)) * mlp["up_proj"](inner)
        return hidden + mlp["down_proj"](gated)


class EagleHead(nn.Module):
    """EAGLE-3 head over the embedding of its target.

    Args:
        config: Config of the target; the layer of the head has its shape.
        token_ids: Target ids of the draft vocabulary, ascending [V].
        scale: Standard deviations of the target's hidden states [F], by which they are divided
            during training: few channels are hundreds of times larger than others. They are folded
            into `fc` in checkpoints.
    """

    def __init__(self, config: LlamaConfig, token_ids: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("token_ids", token_ids)
        self.register_buffer("scale", scale)
        self.fc = nn.Linear(len(scale), config.hidden_size, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(token_ids), bias=False)

    def forward(
        self, embeddings: torch.Tensor, features: torch.Tensor, steps: int
    ) -> list[torch.Tensor]:
        """Return the inputs of the LM head in each step of the training-time test.

        Args:
            embeddings: Embeddings of the tokens t + 1 of rows 0 to T + steps - 2
                [B, T + steps - 1, H].
            features: Hidden states of the tokens t [B, T, F].
            steps: Number of steps.

        Returns:
            Normalized hidden states of each step [B, T, H].
        """
        rows = features.shape[1]
        hidden, outputs = self.fc(features / self.scale).float(), []
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(steps):
            hidden = self.midlayer(embeddings[:, step : step + rows], hidden, past)
            outputs.append(self.norm(hidden))
        return outputs

    def save(self, folder: Path) -> None:
        """Write a checkpoint of SafeAILab's format."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.detach() for name, value in self.named_parameters()}
        tensors["fc.weight"] = tensors["fc.weight"] / self.scale
        tensors["d2t"] = self.token_ids - torch.arange(len(self.token_ids))
        tensors["t2d"] = torch.isin(torch.arange(self.config.vocab_size), self.token_ids)
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.checkpoint_config(), indent=2))

    def checkpoint_config(self) -> dict[str, Any]:
        """Return the fields of config.json."""
        names = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
            "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size",
            "bos_token_id", "eos_token_id",
        )  # fmt: skip
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.token_ids),
            "rope_theta": self.config.rope_parameters["rope_theta"],
            "torch_dtype": "float32",
            **{name: getattr(self.config, name) for name in names},
        }
