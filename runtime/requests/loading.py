"""From a bundle on disk to a pipeline."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from functools import partial

from specedge.bundle import Bundle, store
from specedge.bundle.manifest import ModelEntry
from specedge.diagnosis.doctor import why_not
from specedge.errors import DeviceError
from specedge.option_specs import check_integer

from ..backend import self_test
from ..backend.cuda.fixed_shapes import FixedShapeModel
from ..backend.memory import PairMemory, check_memory, pair_memory
from ..backend.model_session import choose_ops
from ..backend.onnx_model import OrtModel
from ..backend.sessions import Device
from ..planning.cost_files import PassCosts, cost_key
from ..planning.measurement import MIN_CONTEXT, Models, measure
from ..text.tokenizing import load_tokenizer
from .pipeline import Pipeline

AUTO = "auto"
EXACT_BYTES = 50_000_000  # of weights up to which long passes' bits are tried at the first load


def load(
    bundle: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    threads: int | None = None,
    share_threads: bool = False,
    ops: str = "auto",
    draft_device: str | None = None,
    slots: int = 1,
    max_length: int | None = None,
) -> Pipeline:
    """Load a bundle: the folder named, else SPECEDGE_BUNDLE's, else the one exported last without
    an output folder, else the embedded pair.

    `threads` is the number of CPU threads, by default what `specedge tune` found the fastest for
    this bundle, else one a core that this process may use (CPU affinity and the control group's
    CPU quota count). `share_threads` makes one pool for all sessions of the process,
    which is faster for small models; sessions that the app makes itself then need
    `use_per_session_threads` False. Where such a pool is, it is used in any case.

    `device` is "cpu", "cuda", "tensorrt" or "rtx", of several GPUs with a number, such as "cuda:1",
    or "auto": "cuda" where that works and the bundle has graphs for it, else "cpu". The draft runs
    there, too, unless `draft_device` names another. "tensorrt" and "rtx" run engines that
    `specedge build` has built.

    `slots` requests may run at a time, each in caches of its own, with texts of at most
    `max_length` tokens, prompt included, by default the target's context.

    `ops` is the op set to run, "onnx", "gqa", one of those that compute in a type of their own,
    such as "gqa-fp16", or "auto" for the better one of each model on its device.

    Raises BundleError, DeviceError, also where the memory left cannot hold the pair, or
    MissingExtraError.
    """
    found = Bundle.read(store.find_bundle(bundle))
    store.verify_large_files(found)
    devices = devices_of(found, device, threads, share_threads, ops, draft_device)
    asked, apart = devices["target"], devices["draft"]
    need = memory_of(found, ops, slots, max_length)
    if asked.is_cpu:
        check_memory(need)
    chosen = [choose_ops(model, ops, devices[role]) for role, model in found.models.items()]
    known = partial(_costs, found, asked, apart, chosen)
    # Of a GPU the driver is asked, once sessions have it at work; threads are tuned without one.
    costs = known() if asked.is_cpu and apart.is_cpu else None
    usual = (costs and costs.table.threads) or None
    target_on, draft_on = (
        self_test.exact_device(found.models.values(), replace(one, default_threads=usual))
        for one in (asked, apart)
    )
    draft = None if found.draft is None else _opened(found, found.draft, draft_on, ops)
    target = _opened(found, found.target, target_on, ops)
    more = [(target.twin(), draft.twin() if draft else None) for _ in range(slots - 1)]
    longest = found.num_draft_tokens + 1
    for one, other in [(target, draft), *more]:
        if not target_on.is_cpu:
            one.warm_up(range(1, longest + 1))
        if other is not None and not draft_on.is_cpu:
            other.warm_up(range(1, 3))
    seconds: dict[int, float] = {}
    notes = [self_test.verify_lengths(target, found.target, target_on, longest, seconds)]
    if draft is not None and not draft_on.is_cpu and not draft_on.supports_engines:
        for one in [draft] if target_on.is_cpu else [target, draft]:
            one.read_longest()
        notes.append(draft.unroll(found, found.draft_model, draft_on))
    costs = costs or known()
    exact_length = costs.table.exact_length
    if target_on.is_cpu:
        if not costs.is_measured and found.files[found.target.weights].size <= EXACT_BYTES:
            exact_length = self_test.longest_invariant_length(target, found.target)
        longest = max(exact_length, self_test.LONGEST)
        target.invariant_lengths = tuple(t for t in target.invariant_lengths if t <= longest)
    for one, other in more:
        one.invariant_lengths = target.invariant_lengths
        if other is not None and draft is not None:
            other.unroll_as(draft)
    shorter = _shortened(found, max_length)
    note = "; ".join(filter(None, notes)) or None
    pipeline = Pipeline(shorter, load_tokenizer(found), target, draft, costs, note, more)
    models = Models.of(found, target, draft)
    if models.context >= MIN_CONTEXT:
        most = max(1, pipeline.max_planned_tokens)
        costs.complete(
            lambda: replace(measure(models, most, samples=seconds).costs, exact_length=exact_length)
        )
    return pipeline


def devices_of(
    bundle: Bundle,
    device: str,
    threads: int | None = None,
    share_threads: bool = False,
    ops: str = "auto",
    draft_device: str | None = None,
) -> dict[str, Device]:
    """What the models of a bundle run on, by their roles, as `load` is told.

    DeviceError also for a number of threads where neither model is, or may be, on the CPU, and for
    a draft device where there is no draft model.
    """
    if draft_device and bundle.draft is None:
        raise DeviceError(
            f"draft_device={draft_device} is for a draft model, which this bundle does not have; "
            "leave it out"
        )
    target = Device(_chosen(device, bundle, ops), threads, share_threads)
    draft = target
    if draft_device:
        draft = replace(target, name=_chosen(draft_device, bundle, ops))
    on_cpu = target.is_cpu or draft.is_cpu
    if threads is not None and not on_cpu and AUTO not in (device, draft_device):
        names = " and ".join(dict.fromkeys((target.name, draft.name)))
        raise DeviceError(
            f"threads={threads} is for models on the CPU, and both run on {names}; leave threads "
            "out, or run the draft on the CPU"
        )
    return {"target": target, "draft": draft}


def _costs(bundle: Bundle, target_on: Device, draft_on: Device, ops: list[str]) -> PassCosts:
    """What is known of a pair's costs there, by its models' op sets."""
    return PassCosts(cost_key(bundle, target_on, draft_on, ", ".join(ops)))


def _opened(bundle: Bundle, model: ModelEntry, device: Device, ops: str) -> OrtModel:
    """A model as its device runs it."""
    return (FixedShapeModel if device.supports_engines else OrtModel)(bundle, model, device, ops)


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


def memory_of(
    bundle: Bundle, ops: str = "auto", slots: int = 1, max_length: int | None = None
) -> PairMemory:
    """Predict the peak memory of a process that loads and runs a bundle.

    The first load of a bundle on a machine, which measures passes, may take tens of MB more.

    Raises:
        BundleError: The bundle has no graphs for `ops`.
        ValueError: The number of slots or the length is invalid.
    """
    check_integer("slots", slots, 1)
    if max_length is not None:
        check_integer("max_length", max_length, 2, bundle.context_length)
    chosen = {role: choose_ops(model, ops) for role, model in bundle.models.items()}
    return pair_memory(bundle, chosen, slots, max_length)


def _shortened(bundle: Bundle, max_length: int | None) -> Bundle:
    """The bundle as if its target took only so many tokens."""
    length = bundle.context_length if max_length is None else max_length
    target = replace(bundle.target, context_length=length)
    return replace(bundle, target=target).at(bundle.folder)
