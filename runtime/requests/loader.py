"""Loader: a bundle on disk to a pipeline."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

from specedge.bundle import Bundle, store
from specedge.bundle.manifest import (
    PREFILL_LENGTH,
    MeasuredAcceptance,
    ModelEntry,
    chunk_length,
)
from specedge.diagnosis.doctor import why_not
from specedge.errors import DeviceError
from specedge.option_specs import check_integer
from specedge.request import DrafterName

from ..backend import self_test
from ..backend.batched_self_test import find_obstacle, share_passes
from ..backend.cuda.fixed_shapes import FixedShapeModel
from ..backend.memory import PairMemory, check_memory, fitting_slots, pair_memory
from ..backend.model_session import choose_ops
from ..backend.onnx_model import OrtModel
from ..backend.sessions import Device
from ..backend.source_encoder import SourceEncoder, encoder_owner
from ..decoding.invariance import longest_invariant
from ..drafters.draft_head import create_drafter
from ..planning.cost_files import PassCosts, cost_key
from ..planning.cost_table import Measurement
from ..planning.measurement import MIN_CONTEXT, measure
from ..text.tokenizer import load_tokenizer
from .pipeline import Pipeline

AUTO = "auto"
BATCH_SLOTS = 8  # most slots for a file of prompts; each needs memory for a whole context
EXACT_BYTES = 50_000_000  # weights up to which long passes are tested at the first load


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
    """Load a bundle.

    Args:
        bundle: Folder of the bundle, by default that of SPECEDGE_BUNDLE, else the one exported last
            without an output folder, else the embedded pair.
        device: "cpu", "cuda", "tensorrt" or "rtx", with a number for one of several GPUs, such as
            "cuda:1"; or "auto": "cuda" if it works and the bundle has graphs for it, else "cpu".
            "tensorrt" and "rtx" run engines that `specedge build` has built.
        threads: Number of CPU threads, by default the fastest by `specedge tune`, else one per core
            that this process may use (CPU affinity and the control group's CPU quota count).
        share_threads: True for one thread pool for all sessions of the process, which is faster for
            small models. Sessions of the app itself then need `use_per_session_threads` False. A
            pool that exists is used in any case.
        ops: Graph variant: "onnx", "gqa", one with a compute type, such as "gqa-fp16", or "auto"
            for the best one of each model on its device.
        draft_device: Device of the draft model, by default that of the target.
        slots: Number of requests that may run at a time, each with separate caches.
        max_length: Maximum length of texts, prompt included, by default the target's context.

    Raises:
        BundleError: There is no valid bundle.
        DeviceError: The device cannot run the bundle, or the available memory does not suffice.
        MissingExtraError: An optional package is missing.
    """
    loaded = Bundle.read(store.find_bundle(bundle))
    store.verify_large_files(loaded)
    devices = devices_of(loaded, device, threads, share_threads, ops, draft_device)
    target_device, draft_on_device = devices["target"], devices["draft"]
    need = memory_of(loaded, ops, slots, max_length)
    if target_device.is_cpu:
        check_memory(need)
    chosen = [choose_ops(model, ops, devices[role]) for role, model in loaded.models.items()]

    def read_costs() -> PassCosts:
        return PassCosts(cost_key(loaded, target_device, draft_on_device, ", ".join(chosen)))

    # A GPU's driver is queried once sessions use it; threads are tuned without a GPU.
    costs = read_costs() if target_device.is_cpu and draft_on_device.is_cpu else None
    default_threads = (costs and costs.table.threads) or None
    target_on, draft_on = (
        self_test.exact_device(
            loaded.models.values(), replace(base, default_threads=default_threads)
        )
        for base in (target_device, draft_on_device)
    )
    encoder = _load_encoder(loaded, loaded.target, target_on, ops)
    draft = None
    if loaded.draft is not None:
        draft_encoder = encoder
        if encoder_owner(loaded, loaded.draft) is not loaded.target:
            draft_encoder = _load_encoder(loaded, loaded.draft, draft_on, ops)
        draft = _open_model(loaded, loaded.draft, draft_on, ops, draft_encoder)
    target = _open_model(loaded, loaded.target, target_on, ops, encoder)
    targets = [target, *(target.with_new_cache() for _ in range(slots - 1))]
    drafts = [draft, *(draft.with_new_cache() for _ in range(slots - 1))] if draft else []
    longest = loaded.num_draft_tokens + 1
    for model in [] if target_on.is_cpu else targets:
        model.warm_up(range(1, longest + 1))
    for model in [] if draft_on.is_cpu else drafts:
        lengths = range(1, 3 if model.observed is None else longest + 1)
        if model.mask_token is not None:
            lengths = range(longest - 1, 2 * longest - 1)
        model.warm_up(lengths)
    seconds: dict[int, float] = {}
    notes: list[str | None] = []
    if costs is None or not costs.is_tested:
        notes.append(self_test.verify_lengths(target, loaded.target, target_on, longest, seconds))
    if slots > 1 and target_on.is_cpu and draft_on.is_cpu:
        targets, note = share_passes(loaded, loaded.target, target_on, targets)
        notes.append(note)
        if draft is not None and draft.observed is None:
            drafts, note = share_passes(loaded, loaded.draft_model, draft_on, drafts)
            notes.append(note)
        target, draft = targets[0], next(iter(drafts), None)
    elif slots > 1:
        notes.append("requests take turns, because passes on GPUs are not shared")
    if draft is not None and not draft_on.is_cpu and not draft_on.supports_engines:
        for model in [draft] if target_on.is_cpu else [target, draft]:
            model.read_longest()
        notes.append(draft.unroll(loaded, loaded.draft_model, draft_on))
    costs = costs or read_costs()
    invariant_length, is_invariant = costs.table.invariant_length, False
    if target_on.is_cpu:
        is_invariant = self_test.agrees_with_export(target, loaded.target)
        if not costs.is_measured and loaded.files[loaded.target.weights].size <= EXACT_BYTES:
            invariant_length = self_test.longest_invariant_length(target, loaded.target)
        longest = max(invariant_length, self_test.LONGEST)
        target.invariant_lengths = tuple(t for t in target.invariant_lengths if t <= longest)
    for model in targets[1:]:
        model.invariant_lengths = target.invariant_lengths
    for model in drafts[1:]:
        model.unroll_as(drafts[0])
    shortened = _with_max_length(loaded, max_length)
    note = "; ".join(dict.fromkeys(filter(None, notes))) or None
    shared_chunk_length = None
    if slots > 1 and target_on.is_cpu:
        shared_chunk_length = _shared_chunk_length(target, loaded.target, invariant_length)
    pipeline = Pipeline(
        shortened,
        load_tokenizer(loaded),
        target,
        draft,
        costs,
        note,
        zip_longest(targets[1:], drafts[1:]),
        shared_chunk_length,
    )
    context_length = min(model.context_length for model in loaded.models.values())
    if context_length >= MIN_CONTEXT:
        max_draft_tokens = max(1, pipeline.max_planned_tokens)
        drafter = acceptance = None
        if draft is not None:
            drafter = create_drafter(draft, loaded.draft_model)
            acceptance = drafter.acceptance
        costs.complete(
            lambda: _with_properties(
                measure(target, drafter, context_length, max_draft_tokens, samples=seconds),
                invariant_length,
                is_invariant,
                acceptance,
            )
        )
    return pipeline


def _with_properties(
    measured: Measurement,
    invariant_length: int,
    is_invariant: bool,
    acceptance: MeasuredAcceptance | None,
) -> Measurement:
    """Add results of the self-test and the bundle's acceptance rates to pass costs."""
    costs = replace(measured.costs, invariant_length=invariant_length, is_invariant=is_invariant)
    if acceptance is not None:
        greedy, sampled = (
            replace(mode, acceptance={DrafterName.MODEL: rate})
            for mode, rate in (
                (costs.greedy, acceptance.greedy),
                (costs.sampled, acceptance.sampled),
            )
        )
        costs = replace(costs, greedy=greedy, sampled=sampled)
    return replace(measured, costs=costs)


def _shared_chunk_length(target: OrtModel, entry: ModelEntry, invariant_length: int) -> int | None:
    """Return the length of a prompt's chunks if other requests wait for their end.

    Only invariant lengths replace the longest, so that a text does not depend on the number of
    slots. Chunks of 64 take 4 to 9% more time than those of 256 in int8.

    Args:
        target: The model, after its self-test.
        entry: Its entry in the manifest.
        invariant_length: Longest pass that is invariant on this machine; 0 if only the lengths of
            the self-test were tested, which then have to agree with the export.
    """
    recorded = entry.parity[target.ops].invariant_lengths
    longest = chunk_length(entry.capacity)
    agrees = min(longest, self_test.LONGEST) in target.invariant_lengths
    is_invariant = longest_invariant((1, *recorded), longest) == longest
    if invariant_length:
        is_invariant &= invariant_length >= longest
    return PREFILL_LENGTH if agrees and is_invariant else None


def devices_of(
    bundle: Bundle,
    device: str,
    threads: int | None = None,
    share_threads: bool = False,
    ops: str = "auto",
    draft_device: str | None = None,
) -> dict[str, Device]:
    """Return the devices of a bundle's models by role, for the arguments of `load`.

    Raises:
        DeviceError: A device is unknown, threads are given and no model may run on the CPU, or a
            draft device is given without a draft model.
    """
    if draft_device and bundle.draft is None:
        raise DeviceError(
            f"draft_device={draft_device} requires a draft model, which this bundle does not have; "
            "omit it"
        )
    target = Device(_resolve_device(device, bundle, ops), threads, share_threads)
    draft = target
    if draft_device:
        draft = replace(target, name=_resolve_device(draft_device, bundle, ops))
    on_cpu = target.is_cpu or draft.is_cpu
    if threads is not None and not on_cpu and AUTO not in (device, draft_device):
        names = " and ".join(dict.fromkeys((target.name, draft.name)))
        raise DeviceError(
            f"threads={threads} is for models on the CPU, and both run on {names}; leave threads "
            "out, or run the draft on the CPU"
        )
    return {"target": target, "draft": draft}


def _load_encoder(
    bundle: Bundle, model: ModelEntry, device: Device, ops: str
) -> SourceEncoder | None:
    """Return the encoder of a model, loaded, if it has one."""
    if model.encoder is None:
        return None
    encoder = SourceEncoder(bundle, model, device, ops)
    encoder.load()
    return encoder


def _open_model(
    bundle: Bundle, model: ModelEntry, device: Device, ops: str, encoder: SourceEncoder | None
) -> OrtModel:
    """Open a model for its device."""
    if device.supports_engines:
        return FixedShapeModel(bundle, model, device, ops)
    return OrtModel(bundle, model, device, ops, encoder=encoder)


def _resolve_device(device: str, bundle: Bundle, ops: str) -> str:
    """Return the device, resolved if it is "auto"."""
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


def batch_slots(
    bundle: str | os.PathLike[str] | None,
    num_requests: int,
    device: str = "cpu",
    draft_device: str | None = None,
    ops: str = "auto",
    memory_share: float = 1.0,
) -> int:
    """Return the number of slots for requests that are all known before the load.

    They are as many as share passes and fit into a share of the available memory, at most
    `BATCH_SLOTS`; 1 if requests would take turns.
    """
    loaded = Bundle.read(store.find_bundle(bundle))
    devices = devices_of(loaded, device, ops=ops, draft_device=draft_device)
    for role, model in loaded.models.items():
        obstacle = None if model.reads_hidden else find_obstacle(model, choose_ops(model, ops))
        if obstacle or not devices[role].is_cpu:
            return 1
    return fitting_slots(memory_of(loaded, ops), min(num_requests, BATCH_SLOTS), memory_share)


def _with_max_length(bundle: Bundle, max_length: int | None) -> Bundle:
    """Return the bundle with a shorter context of its target."""
    length = bundle.context_length if max_length is None else max_length
    target = replace(bundle.target, context_length=length)
    return replace(bundle, models=bundle.models | {"target": target}).at(bundle.folder)
