"""From a bundle on disk to a pipeline."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace

from specedge import store
from specedge.bundle import Bundle
from specedge.errors import DeviceError

from .backend import self_test
from .backend.memory import PairMemory, check_memory, pair_memory
from .backend.model_session import choose_ops
from .backend.onnx_model import OrtModel
from .backend.sessions import Device
from .diagnosis.providers import why_not
from .pipeline import Pipeline
from .planning.cost_files import key_of
from .planning.known_costs import KnownCosts
from .text.tokenizing import load_tokenizer

AUTO = "auto"


def load(
    bundle: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    threads: int | None = None,
    share_threads: bool = False,
    ops: str = "auto",
    draft_device: str | None = None,
) -> Pipeline:
    """Load a bundle: the folder named, else SPECEDGE_BUNDLE's, else the one exported last without
    an output folder, else the embedded pair.

    `threads` is the number of CPU threads, by default what `specedge tune` found the fastest for
    this bundle, else one a core. `share_threads` makes one pool
    for all sessions of the process, which is faster for small models; sessions that the app makes
    itself then need `use_per_session_threads` False. Where such a pool is, it is used in any case.

    `device` is "cpu" or "cuda", of several GPUs with a number, such as "cuda:1", or "auto": "cuda"
    where that works and the bundle has graphs for it, else "cpu". The draft runs there, too, unless
    `draft_device` names another.

    `ops` is the op set to run, "onnx", "gqa", one of those that compute in a type of their own,
    such as "gqa-fp16", or "auto" for the better one of each model on its device.

    Raises BundleError, DeviceError, also where the memory left cannot hold the pair, or
    MissingExtraError.
    """
    found = Bundle.read(store.find(bundle))
    store.check_large_files(found)
    asked = Device(_chosen(device, found, ops), threads, share_threads)
    apart = replace(asked, name=_chosen(draft_device, found, ops)) if draft_device else asked
    if asked.is_cpu:
        check_memory(memory_of(found, ops))
    devices = {"target": asked, "draft": apart}
    chosen = [choose_ops(model, ops, devices[role]) for role, model in found.models.items()]
    costs = KnownCosts(found, key_of(found, asked, apart, ", ".join(chosen)))
    usual = costs.table.threads or None
    target_on, draft_on = (
        self_test.fitting(found.models.values(), replace(one, usual=usual))
        for one in (asked, apart)
    )
    draft = OrtModel(found, found.draft, draft_on, ops)
    target = OrtModel(found, found.target, target_on, ops)
    longest = found.num_draft_tokens + 1
    if not draft_on.is_cpu:
        draft.warm_up(range(1, 3))
    if target_on.is_cpu:
        note = self_test.run(target, found.target)
    else:
        target.warm_up(range(1, longest + 1))
        note = self_test.run_on_gpu(target, found.target, longest)
    if not draft_on.is_cpu:
        draft.unroll(found, found.draft, draft_on)
    return Pipeline(found, load_tokenizer(found), target, draft, costs, note)


def _chosen(device: str, bundle: Bundle, ops: str) -> str:
    """The device that "auto" is here; another is itself."""
    if device != AUTO:
        return device
    with suppress(DeviceError):
        for model in bundle.models.values():
            choose_ops(model, ops, Device("cuda"))
        if why_not("cuda") is None:
            return "cuda"
    return "cpu"


def memory_of(bundle: Bundle, ops: str = "auto") -> PairMemory:
    """What a process that loads and runs a bundle holds at its peak. Raises BundleError."""
    return pair_memory(bundle, choose_ops(bundle.target, ops), choose_ops(bundle.draft, ops))
