"""From a bundle on disk to a pipeline."""

from __future__ import annotations

import os

from specedge import store
from specedge.bundle import Bundle

from .backend.onnx_model import OrtModel
from .pipeline import Pipeline
from .planning.cost_files import key_of
from .planning.known_costs import KnownCosts
from .text.tokenizing import load_tokenizer


def load(
    bundle: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    threads: int | None = None,
    share_threads: bool = True,
    ops: str = "auto",
) -> Pipeline:
    """Load a bundle: the folder named, else SPECEDGE_BUNDLE's, else the one exported last without
    an output folder, else the embedded pair.

    `threads` is the number of CPU threads that both models share, by default one a core. The pool
    belongs to the process: sessions that the host makes beside it need `use_per_session_threads`
    False, or `share_threads` False here, which is slower.

    `ops` is the op set to run, "onnx", "gqa", or "auto" for the better one on this device.

    Raises BundleError, DeviceError or MissingExtraError.
    """
    found = Bundle.read(store.find(bundle))
    store.check_large_files(found)
    draft = OrtModel(found, found.draft, device, threads, share_threads, ops)
    target = OrtModel(found, found.target, device, threads, share_threads, ops)
    ops = f"{target.ops}, {draft.ops}"
    costs = KnownCosts(found, key_of(found, device, threads, share_threads, ops))
    return Pipeline(found, load_tokenizer(found), target, draft, costs)
