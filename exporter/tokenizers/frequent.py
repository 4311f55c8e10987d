"""Which tokens a smaller head keeps: the most frequent ones of a text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from specedge.errors import ExportError

from ..progress import Progress


def most_frequent(
    count: int,
    text: tuple[str, str],
    tokenizer: Path,
    ends: Iterable[int],
    num_tokens: int,
    progress: Progress,
) -> list[int]:
    """The `count` most frequent of the first `num_tokens` ids in a text, by its name; ascending.

    End tokens and special ones are always among them. Of ids that are in the text as often the
    lower ones are taken: a tokenizer that was trained numbers what it found often first. Raises
    ExportError where the head would keep nothing else, or everything.
    """
    name, content = text
    if count >= num_tokens:
        raise ExportError(
            f"--draft-vocab {count}: the draft has {num_tokens} tokens; give fewer, or leave it out"
        )
    always = {token for token in (*ends, *_special(tokenizer)) if 0 <= token < num_tokens}
    if count <= len(always):
        raise ExportError(
            f"--draft-vocab {count}: the {len(always)} end tokens and special tokens are always "
            "kept; give more"
        )
    encoding = Tokenizer.from_file(str(tokenizer)).encode(content, add_special_tokens=False)
    counts = np.bincount([t for t in encoding.ids if t < num_tokens], minlength=num_tokens)
    order = np.argsort(-counts, kind="stable")
    rest = order[~np.isin(order, list(always))]
    kept = sorted({*always, *rest[: count - len(always)].tolist()})
    share = counts[kept].sum() / max(1, counts.sum())
    progress.note(
        f"the draft's head has {count} of {num_tokens} tokens, which are {share:.1%} of {name}; it "
        "drafts no others"
    )
    return kept


def _special(tokenizer: Path) -> list[int]:
    added = json.loads(tokenizer.read_text("utf-8")).get("added_tokens") or []
    return [token["id"] for token in added if token.get("special")]
