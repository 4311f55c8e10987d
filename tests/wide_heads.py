"""Pairs with heads of more than 128 channels, whose kernels depend on the cache length."""

from __future__ import annotations

from pathlib import Path

from checkpoints import make_pair
from specedge.exporter import export

CONTEXT = 340  # an L2 cache of 2 MB has room for 256 keys of 256 channels


def make_wide_pair(folder: Path, head_size: int = 256, has_draft: bool = True) -> Path:
    """Export a pair, or a target alone, in `gqa`; return the bundle's folder."""
    draft, target = make_pair(
        folder, "llama", hidden=32, heads=1, head_size=head_size, context=CONTEXT
    )
    bundle = folder / "bundle"
    export(draft if has_draft else None, target, bundle, ops="gqa", num_draft_tokens=8)
    return bundle
