"""Where the families keep the matrices of a layer: what reads, what writes, and which rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_WRITERS = {
    "o_proj", "out_proj", "dense", "c_proj", "fc2", "down_proj", "dense_4h_to_h", "fc_out",
}  # fmt: skip
_GATED = {"gate_up_proj"}
_READERS = {
    "gate_proj", "up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h", *_GATED,
}  # fmt: skip
_FED = {"fc2", "down_proj", "dense_4h_to_h", "fc_out"}
Rows = tuple[Tensor | None, Tensor | None, Tensor | None]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of the model's layers."""
    size = model.config.get_text_config().num_hidden_layers  # type: ignore[operator, union-attr]
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    return next(layers for layers in lists if len(layers) == size)


def matrix(module: nn.Module) -> Tensor | None:
    """A view of a module's matrix with a row for each output, if it is one. [out, in]"""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2:
        return None
    return weight.T if isinstance(module, Conv1D) else weight


def writes(last: str) -> bool:
    """Whether a matrix of this name writes to the residual."""
    return last in _WRITERS


def reads(last: str) -> bool:
    """Whether a matrix of this name reads the residual, through a norm."""
    return not writes(last) and last not in ("kv_b_proj", "q_b_proj")


def first_neuron(name: str, size: int) -> list[int] | None:
    """The rows with which a feed-forward part's first neuron reads; none where a matrix writes."""
    part, _, last = name.rpartition(".")
    if "shared" in name:
        return None
    if last in _FED or (last == "c_proj" and part.endswith("mlp")):
        return []
    if last not in _READERS:
        return None
    return [0, size // 2] if last in _GATED else [0]


def attention(layer: nn.Module) -> Any:
    """A layer's attention."""
    names = ("self_attn", "attn", "attention", "self_attention")
    return next(getattr(layer, name) for name in names if hasattr(layer, name))


def attention_rows(model: Any, layer: nn.Module, last: str, size: int) -> Rows | None:
    """The rows of queries, keys and values in a matrix, head by head: three of [heads, D]."""
    config = model.config.get_text_config()
    if hasattr(attention(layer), "kv_b_proj") or config.model_type == "codegen":
        return None
    heads = config.num_attention_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    rows = torch.arange(size)
    if last in ("q_proj", "k_proj", "v_proj"):
        q, k, v = (rows.view(-1, d) if last[0] == name else None for name in "qkv")
        return q, k, v
    if last in ("c_attn", "qkv_proj", "Wqkv") or getattr(config, "multi_query", False):
        if last not in ("c_attn", "qkv_proj", "Wqkv", "query_key_value"):
            return None
        if not getattr(config, "new_decoder_architecture", False):
            q, k, v = rows.split([heads * d, (size - heads * d) // 2, (size - heads * d) // 2])
            return q.view(-1, d), k.view(-1, d), v.view(-1, d)
    if last != "query_key_value":
        return None
    groups = getattr(config, "num_kv_heads", heads)
    if not getattr(config, "new_decoder_architecture", False):
        groups = heads
    grouped = rows.view(groups, -1, d)
    return grouped[:, :-2].reshape(-1, d), grouped[:, -2], grouped[:, -1]
