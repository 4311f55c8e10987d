"""Self-draft, `--draft self:N`: the target's own first N layers as a draft model.

Early exit, as in LayerSkip (Elhoushi et al. 2024), but of a target that was not trained for it: the
first N layers, the final norm and the LM head.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace

from specedge.bundle.manifest import CheckpointSource
from specedge.errors import CheckpointError

from .. import internals
from .checkpoints import Checkpoint
from .decoder_layers import truncate
from .loader import LoadedCheckpoint

PREFIX = "self:"


def parse_num_layers(draft: str, revision: str | None, adapter: str | None = None) -> int | None:
    """Return N of `self:N`; None for a separate checkpoint. Raises CheckpointError."""
    if not draft.startswith(PREFIX):
        return None
    number = draft.removeprefix(PREFIX)
    if not re.fullmatch(r"[0-9]{1,9}", number) or not int(number):
        raise CheckpointError(
            f"draft {draft}: specify self:N, with N of at least 1, for the target's first N layers "
            f"(or ./{draft} for a folder of that name)"
        )
    if revision is not None:
        raise CheckpointError(
            f"draft {draft} is part of the target and has no revision; omit --draft-revision"
        )
    if adapter is not None:
        raise CheckpointError(
            f"draft {draft} is part of the target and shares its --adapter; omit --draft-adapter"
        )
    return int(number)


def check_num_layers(num_layers: int, target: Checkpoint) -> None:
    """Reject a draft with as many layers as the target. Raises CheckpointError."""
    whole = getattr(internals.decoder_text_config(target.config), "num_hidden_layers", None)
    if type(whole) is not int:
        raise CheckpointError(
            f"target {target.name} does not state its number of layers, so it cannot be truncated; "
            "specify another --draft"
        )
    if num_layers >= whole:
        cures = {1: "specify another --draft", 2: "specify self:1"}
        cure = cures.get(whole, f"specify self:1 to self:{whole - 1}")
        raise CheckpointError(
            f"draft {PREFIX}{num_layers}: target {target.name} has {whole} "
            f"layer{'s' if whole > 1 else ''}, and its draft must have fewer; {cure}"
        )


def source(target: CheckpointSource, num_layers: int) -> CheckpointSource:
    """Return the manifest's source of a self-draft: the target's checkpoint and the layers."""
    return replace(target, id=f"{target.id[:480]} {PREFIX}{num_layers}")


def keep_layers(loaded: LoadedCheckpoint, num_layers: int) -> LoadedCheckpoint:
    """Return a copy of the model with its first layers, which shares all tensors.

    Raises ExportError if the layers are not in one module list.
    """
    model = loaded.model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, shared)
    truncate(model, num_layers)
    return replace(loaded, model=model)
