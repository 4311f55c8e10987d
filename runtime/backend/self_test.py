"""Self-test of pass lengths and int8 products on this machine, at load.

T tokens per pass, K and N the sizes of a matrix.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from specedge import int8_products
from specedge.attention_kernels import pass_boundaries
from specedge.bundle.graph_variants import attention_ops, has_compute_type, is_qdq
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.precision import OLDEST_ONNXRUNTIME, QUANTIZED_DTYPES
from specedge.diagnosis import packages
from specedge.errors import DeviceError

from .onnx_model import OrtModel
from .ort import onnxruntime, translated_errors
from .sessions import Device

LONGEST = 18  # longest tested pass; longer ones are for prompts, or for drafts on request
STEP = 7  # between tokens, which then select different experts
NUM_RESIDUES = 8  # of totals that are tested, modulo this number
ENDS_PER_LENGTH = 2  # of short passes; with four such lengths, totals have all residues modulo 8
PASTS = (0, 512)  # cache rows before a pass on a GPU, whose kernels may split long caches
KNOWN_CAUSES = {
    "int8-block": "MatMulNBits may round differently at one row: onnxruntime issue 29853",
    "int4": "MatMulNBits may round differently at one row: onnxruntime issue 29853",
    "keep": "MatMulNBits may round differently at one row: onnxruntime issue 29853",
}
EXPERTS = (
    "sums of QMoE depend on the number of rows of an expert before ONNX Runtime "
    f"{OLDEST_ONNXRUNTIME['experts']}; upgrade it, or use --ops onnx if the bundle has it"
)


def verify_lengths(
    model: OrtModel,
    entry: ModelEntry,
    device: Device,
    longest: int,
    seconds: dict[int, float] | None = None,
) -> str | None:
    """Set the invariant pass lengths of a target on its device; empties the cache.

    Args:
        model: The target.
        entry: Its manifest entry.
        device: Its device.
        longest: Longest length to test on a GPU.
        seconds: Receives the seconds of each length.

    Returns:
        A note on lengths that are not invariant.
    """
    if device.is_cpu:
        return verify_cpu_lengths(model, entry, seconds)
    return _verify_gpu_lengths(model, entry, longest, {} if seconds is None else seconds)


def verify_cpu_lengths(
    model: OrtModel, entry: ModelEntry, seconds: dict[int, float] | None = None
) -> str | None:
    """Test the lengths that the export recorded as invariant; keep those that are invariant here.

    If passes of two tokens are invariant and passes of one are not, here or at the export, single
    tokens are padded to passes of two. Empties the cache.

    Returns:
        A note on lengths that are not invariant.
    """
    recorded = model.invariant_lengths
    tested = [t for t in recorded if t <= min(LONGEST, entry.context_length)]
    if not tested:
        return None
    seconds = {} if seconds is None else seconds
    varying = _varying_at_any_total(model, entry, tested, seconds)
    if 2 in {*tested} - {*varying} and (1 in varying or 1 not in tested):
        model.pad_single_tokens()
        recorded = tuple(sorted({1, *recorded}))
        varying = _varying_at_any_total(model, entry, sorted({1, *tested}), seconds)
    if not varying:
        model.invariant_lengths = recorded
        return None
    remaining = [t for t in recorded if t < min(varying)]
    model.invariant_lengths = tuple(remaining) if 1 in remaining else ()
    return (
        f"{entry.source.id}: on this machine logits of passes of {', '.join(map(str, varying))} "
        "tokens are not bitwise equal to those of longer passes "
        f"({_known_cause(entry, model.ops)}; ONNX Runtime {onnxruntime().__version__}), so verify "
        "passes are limited to shorter lengths"
    )


def agrees_with_export(model: OrtModel, entry: ModelEntry) -> bool:
    """Return True if a self-test on the CPU found all lengths that it tests invariant as recorded.

    Single tokens that are padded, and graphs without such lengths, need a test at each load.
    """
    tested = {t for t in entry.parity[model.ops].invariant_lengths if t <= LONGEST}
    return bool(tested) and tested <= {*model.invariant_lengths} and model.min_length == 1


def _varying_at_any_total(
    model: OrtModel, entry: ModelEntry, lengths: list[int], seconds: dict[int, float]
) -> list[int]:
    """Return the lengths whose rows differ from those of the longest pass, ascending."""
    steps = token_steps(entry)
    before = lengths[-1] // 2 + 1  # some passes end at a boundary, and others cross it
    pasts = {0, *(end - before for end in pass_boundaries(entry.states, model.ops))}
    pasts = {past for past in pasts if 0 <= past <= entry.context_length - lengths[-1]}
    varying = _varying_lengths(model, lengths, seconds, steps, pasts)
    # The cause may be the total instead of the length: test shorter passes at all residues.
    for length in [t for t in lengths if varying and t < min(varying)]:
        pair = [length, lengths[-1]]
        varying |= {length} & _varying_lengths(model, pair, seconds, steps, num_ends=NUM_RESIDUES)
    return sorted(varying)


def token_steps(entry: ModelEntry) -> tuple[int, ...]:
    """Return the steps between tokens to test: with step 0, all rows select the same experts."""
    return (STEP, 0) if entry.num_experts else (STEP,)


def longest_invariant_length(model: OrtModel, entry: ModelEntry) -> int:
    """Return the longest pass length up to which rows are bitwise equal here, at least LONGEST.

    Tests recorded lengths beyond those of `verify_cpu_lengths`, for first passes over a prompt
    together with a draft. Empties the cache.
    """
    recorded = entry.parity[model.ops].invariant_lengths
    tested = [t for t in recorded if LONGEST <= t <= entry.context_length]
    if len(tested) < 2 or LONGEST not in model.invariant_lengths:
        return LONGEST
    varying = _varying_lengths(model, tested, {}, token_steps(entry))
    first_varying = min(varying, default=tested[-1] + 1)
    return max((t for t in tested if t < first_varying), default=LONGEST)


def _known_cause(entry: ModelEntry, ops: str) -> str:
    """Return the likely cause of length-dependent rows."""
    installed, oldest = onnxruntime().__version__, OLDEST_ONNXRUNTIME["experts"]
    has_qmoe = (
        entry.num_experts
        and entry.weights_dtype in QUANTIZED_DTYPES
        and attention_ops(ops) == "gqa"
    )
    if has_qmoe and packages.version_numbers(installed) < packages.version_numbers(oldest):
        return EXPERTS
    in_blocks = entry.weights_dtype == "int8" and has_compute_type(ops) and not is_qdq(ops)
    return KNOWN_CAUSES.get(
        "int8-block" if in_blocks else entry.weights_dtype, "as for some kernels"
    )


def _verify_gpu_lengths(
    model: OrtModel, entry: ModelEntry, longest: int, seconds: dict[int, float]
) -> str | None:
    """Test every pass length of requests; rely on all of them if they are invariant."""
    lengths = list(range(1, min(longest, entry.context_length) + 1))
    pasts = {min(past, entry.context_length - lengths[-1]) for past in PASTS}
    varying = sorted(_varying_lengths(model, lengths, seconds, (STEP,), pasts, caches=False))
    if not varying:
        model.invariant_lengths = tuple(lengths)
        return None
    return (
        f"{entry.source.id}: on this device logits of passes of {', '.join(map(str, varying))} "
        f"tokens are not bitwise equal to those of {lengths[-1]}, so text may differ from plain "
        "decoding at near-ties; --exact resolves them"
    )


def _varying_lengths(
    model: OrtModel,
    lengths: list[int],
    seconds: dict[int, float],
    steps: Iterable[int],
    pasts: Iterable[int] = (0,),
    caches: bool = True,
    num_ends: int | None = None,
) -> set[int]:
    """Return the lengths whose rows of logits, or of caches, differ from those of the longest pass.

    Kernels may depend on the number of cache rows after a pass, its total, as well: on Arm, flash
    attention of GroupQueryAttention does (ONNX Runtime 1.30 to 1.32). Passes therefore end at
    different totals.

    Args:
        model: The model.
        lengths: Pass lengths.
        seconds: Receives the seconds of each length.
        steps: Differences of consecutive tokens.
        pasts: Cache rows before the passes.
        caches: Also compare cache rows.
        num_ends: Number of ends of each shorter length, as for `passes_to_compare`.
    """
    varying = set[int]()
    for past, step in itertools.product(pasts, steps):
        longest = past + max(lengths)
        tokens = [step * i % model.vocab_size for i in range(longest)]
        model.truncate(0)
        model.prefill(tokens[:past])
        expected = model.forward(tokens[past:]).array().copy()
        rows = model.cache_rows(past, longest) if caches else []
        for length, end in passes_to_compare(lengths, num_ends):
            start = past + end - length
            model.truncate(start)
            begin = time.perf_counter()
            logits = model.forward(tokens[start : past + end]).array()
            seconds[length] = min(time.perf_counter() - begin, seconds.get(length, math.inf))
            compared = slice(end - length, end)
            is_equal = np.array_equal(logits, expected[compared])
            new_rows = model.cache_rows(start, past + end) if caches else []
            pairs = zip(new_rows, rows, strict=True)
            if not is_equal or not all(np.array_equal(new, old[:, compared]) for new, old in pairs):
                varying.add(length)
    model.truncate(0)
    return varying


def passes_to_compare(
    lengths: Iterable[int], num_ends: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield lengths and ends of passes to compare with one of the longest length.

    Ends descend, and so do starts: no pass reads rows that an earlier one wrote.
    """
    *shorter, longest = sorted(lengths)
    end = longest + 1
    for length in shorter:
        for _ in range(num_ends or (ENDS_PER_LENGTH if 1 < length < LONGEST else 1)):
            end = max(end - 1, length)
            yield length, end
    yield longest, longest


def exact_device(models: Iterable[ModelEntry], device: Device) -> Device:
    """Return the device with options that make int8 products exact for these models.

    Raises:
        DeviceError: No option makes them exact.
    """
    quantized = next((model for model in models if model.weights_dtype in QUANTIZED_DTYPES), None)
    if quantized is None or not device.is_cpu or _products_are_right(device):
        return device
    if _products_are_right(unsigned := replace(device, unsigned=True)):
        return unsigned
    raise DeviceError(
        f"{quantized.source.id} has {quantized.weights_dtype} weights, and ONNX Runtime "
        f"{onnxruntime().__version__} computes wrong int8 products on this processor (AVX2 "
        "without VNNI saturates); upgrade ONNX Runtime, or export the pair with --precision fp32"
    )


@cache
def _products_are_right(device: Device) -> bool:
    """Return True if int8 products of extreme values equal NumPy's."""
    session = device.open(int8_products.PRODUCT_GRAPH)
    with translated_errors("an int8 product"):
        return int8_products.are_exact(lambda x: session.run(None, {"x": x})[0])
