"""Reduced draft vocabulary, `--draft-vocab N`: selection of tokens, and the pruned LM head.

The embedding keeps all tokens; a tied LM head becomes a separate matrix.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from specedge.errors import ExportError

from ..progress import Progress
from .loader import LoadedCheckpoint


def lm_head(model: nn.Module) -> nn.Linear:
    """Return a model's LM head. Raises ExportError if it is not a single matrix."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        raise ExportError(
            f"the draft's LM head is {type(head).__name__}, not one matrix, so it cannot be "
            "pruned; omit --draft-vocab, or specify a draft with the target's tokenizer"
        )
    return head


def prune_head(loaded: LoadedCheckpoint, ids: Sequence[int]) -> LoadedCheckpoint:
    """Restrict the model's logits to these tokens, in their order. Raises ExportError."""
    head = lm_head(loaded.model)
    rows = torch.tensor(ids)
    stored = loaded.sources.stored_matrix(head.weight)
    weight = (head.weight.detach() if stored is None else stored).index_select(0, rows)
    smaller = nn.Linear(head.in_features, len(ids), head.bias is not None, device="meta")
    smaller.weight = loaded.sources.parameter(weight)
    if head.bias is not None:
        smaller.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    loaded.model.set_output_embeddings(smaller.eval())  # type: ignore[operator]
    return replace(loaded, num_tokens=head.out_features)


def most_frequent_tokens(
    count: int,
    text: tuple[str, str],
    tokenizer: Path,
    ends: Iterable[int],
    tokens: Sequence[int],
    progress: Progress,
) -> list[int]:
    """Return the most frequent token ids of a text, ascending.

    End tokens and special tokens are always included. Lower ids win ties, because BPE training
    numbers frequent tokens first.

    Args:
        count: Number of tokens to keep.
        text: Name and content of the text.
        tokenizer: Path of tokenizer.json.
        ends: End tokens.
        tokens: Ids to select from, ascending.
        progress: Receives a note of the text's coverage.

    Raises:
        ExportError: `count` leaves no token to select, or includes all of them.
    """
    name, content = text
    num_tokens = len(tokens)
    if count >= num_tokens:
        raise ExportError(
            f"--draft-vocab {count}: the draft has {num_tokens} tokens; use a smaller number, or "
            "omit it"
        )
    always = {*ends, *_special_tokens(tokenizer)} & {*tokens}
    if count <= len(always):
        raise ExportError(
            f"--draft-vocab {count}: the {len(always)} end tokens and special tokens are always "
            "kept; use a larger number"
        )
    encoding = Tokenizer.from_file(str(tokenizer)).encode(content, add_special_tokens=False)
    counts = np.bincount(encoding.ids, minlength=tokens[-1] + 1)
    order = np.array(tokens)[np.argsort(-counts[tokens], kind="stable")]
    rest = order[~np.isin(order, list(always))]
    kept = sorted({*always, *rest[: count - len(always)].tolist()})
    share = counts[kept].sum() / max(1, counts.sum())
    progress.note(
        f"the draft's LM head is reduced to {count} of {num_tokens} tokens, which cover "
        f"{share:.1%} of {name}"
    )
    return kept


def _special_tokens(tokenizer: Path) -> list[int]:
    added = json.loads(tokenizer.read_text("utf-8")).get("added_tokens") or []
    return [token["id"] for token in added if token.get("special")]
