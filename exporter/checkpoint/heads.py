"""A head cut to some tokens: `--draft-vocab N`. N columns, ids [N] ascending.

The embedding stays whole, so the model reads every token; a head that was tied to it becomes a
matrix of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from specedge.errors import ExportError

from .lazy_tensors import numbers
from .loading import Loaded


def matrix(model: nn.Module) -> nn.Linear:
    """A model's head, if it is one matrix with a row a token. Raises ExportError."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        raise ExportError(
            f"the draft's head is {type(head).__name__}, not one matrix, so it cannot be cut; "
            "leave --draft-vocab out"
        )
    return head


def cut(loaded: Loaded, ids: Sequence[int]) -> Loaded:
    """The model, whose logits from now on are of these tokens alone. Raises ExportError."""
    head = matrix(loaded.model)
    rows = torch.tensor(ids)
    behind = loaded.sources.behind(head.weight)
    weight = numbers(head.weight.detach() if behind is None else behind)[rows]
    smaller = nn.Linear(head.in_features, len(ids), head.bias is not None, device="meta")
    smaller.weight = nn.Parameter(loaded.sources.placeholder(weight), requires_grad=False)
    if head.bias is not None:
        smaller.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    loaded.model.set_output_embeddings(smaller.eval())  # type: ignore[operator]
    return replace(loaded, num_tokens=head.out_features)
