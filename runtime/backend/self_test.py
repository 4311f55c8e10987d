"""What this machine's kernels give, seen before they are used: exports may be of another machine.

T tokens a pass, K and N the sizes of a matrix.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import numpy as np

from specedge import int8_products
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.op_sets import attention_ops
from specedge.bundle.precision import OLDEST_ONNXRUNTIME, QUANTIZED_DTYPES
from specedge.diagnosis import packages
from specedge.errors import DeviceError

from .onnx_model import OrtModel
from .ort import onnxruntime, translated_errors
from .sessions import Device

LONGEST = 18  # tokens of a pass that is tried; longer ones read prompts, or drafts if asked
STEP = 7  # between tokens; equal ones choose the same experts, whose kernels then see many rows
PASTS = (0, 512)  # rows of the cache before it, on a GPU, whose kernels may split long ones
KNOWN = {
    "int8-block": "MatMulNBits may have other sums at one row: onnxruntime issue 29853",
    "int4": "MatMulNBits may have other sums at one row: onnxruntime issue 29853",
}
EXPERTS = (
    "sums of QMoE depend on the rows of an expert before ONNX Runtime "
    f"{OLDEST_ONNXRUNTIME['experts']}; upgrade it, or take --ops onnx where the bundle has that"
)


def settle(
    model: OrtModel,
    facts: ModelEntry,
    device: Device,
    longest: int,
    seconds: dict[int, float] | None = None,
) -> str | None:
    """Let a target rely on the lengths of passes that keep rows' bits on its device, of those up to
    `longest` on a GPU. What is to be said of others. `seconds` gets what each length took.

    Ends with an empty cache.
    """
    if device.is_cpu:
        return run(model, facts, seconds)
    return run_on_gpu(model, facts, longest, seconds)


def run(model: OrtModel, facts: ModelEntry, seconds: dict[int, float] | None = None) -> str | None:
    """Pass the last of a few tokens again, in passes of each T that the export found to keep rows'
    bits, and let the model rely on those alone that do so here. What is to be said of the others.

    Where passes of two keep them and passes of one do not, here or at the export, single tokens are
    padded to passes of two. Ends with an empty cache.
    """
    recorded = model.invariant_lengths
    tried = [t for t in recorded if t <= min(LONGEST, facts.context_length)]
    if not tried:
        return None
    seconds = {} if seconds is None else seconds
    lost = _lost(model, facts, tried, seconds)
    if 2 in {*tried} - {*lost} and (1 in lost or 1 not in tried):
        model.pad_single_tokens()
        recorded = tuple(sorted({1, *recorded}))
        lost = _lost(model, facts, sorted({1, *tried}), seconds)
    if not lost:
        model.invariant_lengths = recorded
        return None
    kept = [t for t in recorded if t < min(lost)]
    model.invariant_lengths = tuple(kept) if 1 in kept else ()
    return (
        f"{facts.source.id}: on this machine passes of {', '.join(map(str, lost))} tokens give "
        f"other last bits than longer ones ({_known(facts, model.ops)};"
        f" ONNX Runtime {onnxruntime().__version__}), so drafts stay shorter than that"
    )


def _lost(
    model: OrtModel, facts: ModelEntry, lengths: list[int], seconds: dict[int, float]
) -> list[int]:
    """Return the T whose rows do not have the bits of the longest pass, ascending."""
    held = [_held(model, lengths, seconds, step=step) for step in _steps(facts)]
    invariant: set[int] = set.intersection(*held)
    return sorted({*lengths} - invariant)


def _steps(facts: ModelEntry) -> tuple[int, ...]:
    """Return the steps between tokens to try: where they are all alike, experts are, too."""
    return (STEP, 0) if facts.num_experts else (STEP,)


def longest_exact(model: OrtModel, facts: ModelEntry) -> int:
    """Return the pass length up to which rows keep their bits here, of those that the export
    recorded and `run` does not try: passes that read a prompt beside a draft may be so long.

    At least LONGEST. Ends with an empty cache.
    """
    recorded = facts.parity[model.ops].invariant_lengths
    tried = [t for t in recorded if LONGEST <= t <= facts.context_length]
    if len(tried) < 2 or LONGEST not in model.invariant_lengths:
        return LONGEST
    held = set.intersection(*(_held(model, tried, {}, step=step) for step in _steps(facts)))
    first_lost = min((t for t in tried if t not in held), default=tried[-1] + 1)
    return max((t for t in tried if t < first_lost), default=LONGEST)


def _known(facts: ModelEntry, ops: str) -> str:
    """What is known to give a row other bits among others."""
    installed, oldest = onnxruntime().__version__, OLDEST_ONNXRUNTIME["experts"]
    has_qmoe = (
        facts.num_experts
        and facts.weights_dtype in QUANTIZED_DTYPES
        and attention_ops(ops) == "gqa"
    )
    if has_qmoe and packages.version_numbers(installed) < packages.version_numbers(oldest):
        return EXPERTS
    return KNOWN.get(facts.weights_dtype, "as some kernels do")


def run_on_gpu(
    model: OrtModel, facts: ModelEntry, longest: int, seconds: dict[int, float] | None = None
) -> str | None:
    """Pass the last of a few tokens again in passes of every T that requests use, and let the model
    rely on those whose rows have the bits of the longest. What is to be said of the others.

    Ends with an empty cache.
    """
    lengths = list(range(1, min(longest, facts.context_length) + 1))
    pasts = {min(past, facts.context_length - lengths[-1]) for past in PASTS}
    seconds = {} if seconds is None else seconds
    held = set.intersection(*(_held(model, lengths, seconds, past, caches=False) for past in pasts))
    if not (lost := sorted({*lengths} - held)):
        model.invariant_lengths = tuple(lengths)
        return None
    return (
        f"{facts.source.id}: on this device passes of {', '.join(map(str, lost))} tokens give "
        f"other last bits than those of {lengths[-1]}, so near-ties may be decided otherwise than "
        "by the target alone; --exact decides as it does"
    )


def _held(
    model: OrtModel,
    lengths: list[int],
    seconds: dict[int, float],
    past: int = 0,
    caches: bool = True,
    step: int = STEP,
) -> set[int]:
    """The T whose rows, of logits and perhaps of caches, have the bits of the longest pass behind
    `past` rows. Tokens are every `step`-th. `seconds` gets what each pass took.
    """
    longest = past + max(lengths)
    tokens = [step * i % model.vocab_size for i in range(longest)]
    model.truncate(0)
    model.prefill(tokens[:past])
    wanted = model.forward(tokens[past:]).array().copy()
    rows = model.cache_rows(past, longest) if caches else []
    held = {max(lengths)}
    for length in lengths:
        start = longest - length
        model.truncate(start)
        begin = time.perf_counter()
        found = model.forward(tokens[start:]).array()
        seconds[length] = time.perf_counter() - begin
        at = start - past
        same = np.array_equal(found, wanted[at:])
        again = model.cache_rows(start, longest) if caches else []
        if same and all(np.array_equal(a, b[:, at:]) for a, b in zip(again, rows, strict=True)):
            held.add(length)
    model.truncate(0)
    return held


def fitting(models: Iterable[ModelEntry], device: Device) -> Device:
    """The device as models need it: one on which sums of products of bytes are what they are.

    DeviceError where making both kinds unsigned does not help.
    """
    rounded = next((model for model in models if model.weights_dtype in QUANTIZED_DTYPES), None)
    if rounded is None or not device.is_cpu or _products_are_right(device):
        return device
    if _products_are_right(unsigned := replace(device, unsigned=True)):
        return unsigned
    raise DeviceError(
        f"{rounded.source.id} has {rounded.weights_dtype} weights, and ONNX Runtime "
        f"{onnxruntime().__version__} multiplies bytes wrongly on this processor (AVX2 without "
        "VNNI saturates); upgrade ONNX Runtime, or export the pair with --precision fp32"
    )


@cache
def _products_are_right(device: Device) -> bool:
    """Whether products of the largest bytes are NumPy's, by one row and by several."""
    session = device.open(int8_products.PRODUCT_GRAPH)
    with translated_errors("a product of bytes"):
        return int8_products.are_exact(lambda x: session.run(None, {"x": x})[0])
