"""Selection of a draft model's precision: the fastest that keeps most of the acceptance rate.

Quantization of a draft model affects speed only: the output is the target's with any draft.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from specedge.bundle.manifest import FileEntry, ModelEntry
from specedge.bundle.precision import GPTQ, KEEP

from ..checkpoint.quantized_tensors import QuantizedTensor
from ..progress import Progress
from ..verification.runner import Runner
from ..verification.subgraph import open_session
from .draft_acceptance import acceptance_by_row
from .float_model import FloatModel
from .quantizer import add_variants, quantize
from .report import compute_logits
from .texts import CalibrationTexts

MIN_PARAMETERS = 4_000_000  # below, node overhead dominates the pass time
MIN_KEPT_ACCEPTANCE = 0.9  # fraction of the acceptance rate of the unquantized draft
CANDIDATE_PRECISIONS = ("int4", "int8")
MAX_SECONDS, MAX_PASSES = 2.0, 40  # limits of timing, with all candidates in alternation


@dataclass
class DraftCandidate:
    """Draft model in one precision."""

    precision: str
    folder: Path
    model: ModelEntry
    file: FileEntry
    sampled: float = 0.0  # acceptance rate at temperature 1
    greedy: float = 0.0  # acceptance rate at temperature 0
    seconds: float = 0.0  # time of a single-token pass


def select_draft_precision(
    target: FloatModel,
    draft: ModelEntry,
    file: FileEntry,
    folder: Path,
    texts: CalibrationTexts,
    head: Sequence[int] | None,
    progress: Progress,
    suffixes: Sequence[str] = (),
    rounding: str = GPTQ,
    tensors: Sequence[QuantizedTensor] = (),
) -> tuple[ModelEntry, FileEntry]:
    """Quantize a draft model in each precision and keep the best candidate in `folder`.

    Args:
        target: Float model of the target.
        draft: Entry of the float draft model.
        file: Its weights file.
        folder: Its folder, which the best candidate replaces.
        texts: Texts for calibration and evaluation.
        head: Tokens of the draft's logits if reduced.
        progress: Receives notes and the durations of steps.
        suffixes: Suffixes of further graph variants.
        rounding: One of `specedge.bundle.precision.ROUNDINGS`.
        tensors: Quantized weights of the checkpoint, which may be kept.

    Returns:
        The candidate's entry and weights file.
    """
    candidates = [DraftCandidate("fp32", folder, draft, file)]
    for precision in (*CANDIDATE_PRECISIONS, *([KEEP] if tensors else [])):
        copy = folder.with_name(f"{folder.name}.{precision}")
        shutil.copytree(folder, copy, copy_function=os.link)
        (model,), weights = quantize(
            {"draft": draft}, copy, precision, texts, head, progress, suffixes, rounding,
            tensors=tensors,
        )  # fmt: skip
        candidates.append(DraftCandidate(precision, copy, model, weights))
    with progress.step("Selecting the draft's precision"):
        target_logits = compute_logits(_runner(target), texts.evaluation)
        for candidate in candidates:
            _measure_acceptance(candidate, target_logits, texts, head)
        _measure_times(candidates)
    best = _select(candidates)
    unquantized_seconds = candidates[0].seconds
    summary = "; ".join(
        f"{candidate.precision}: acceptance rate {candidate.sampled:.1%} sampled, "
        f"{candidate.greedy:.1%} greedy, "
        f"{candidate.seconds / unquantized_seconds:.2f} times the pass time"
        for candidate in candidates
    )
    progress.note(f"draft: {best.precision} ({summary}); override with --draft-precision")
    for candidate in candidates:
        if candidate is not best:
            shutil.rmtree(candidate.folder)
    if best is not candidates[0]:
        best.folder.rename(folder)
    elif suffixes:
        (best.model,) = add_variants(suffixes, {"draft": draft}, folder, texts, head, progress)
    return best.model, best.file


def _select(candidates: Sequence[DraftCandidate]) -> DraftCandidate:
    """Return the fastest candidate whose acceptance rate is close to the unquantized one's."""
    unquantized, *quantized = candidates
    acceptable = [
        candidate
        for candidate in quantized
        if candidate.sampled >= MIN_KEPT_ACCEPTANCE * unquantized.sampled
        and candidate.greedy >= MIN_KEPT_ACCEPTANCE * unquantized.greedy
    ]
    return min([unquantized, *acceptable], key=lambda candidate: candidate.seconds)


def _runner(written: FloatModel) -> Runner:
    return written.runner(written.folder, written.ops[-1])


def _measure_acceptance(
    candidate: DraftCandidate,
    target_logits: Sequence[np.ndarray],
    texts: CalibrationTexts,
    head: Sequence[int] | None,
) -> None:
    """Measure a draft's acceptance rates, given the target's logits, [T, V] per text."""
    same, overlaps = [], []
    runner = _runner(FloatModel("draft", candidate.model, candidate.folder))
    draft_logits = compute_logits(runner, texts.evaluation)
    for draft, target in zip(draft_logits, target_logits, strict=True):
        agree, overlap = acceptance_by_row(draft, target, head)
        same.append(agree)
        overlaps.append(overlap)
    candidate.greedy = float(np.concatenate(same).mean())
    candidate.sampled = float(np.concatenate(overlaps).mean())


def _measure_times(candidates: Sequence[DraftCandidate]) -> None:
    """Measure the minimum time of a single-token pass, with interleaved candidates."""
    sessions = []
    for candidate in candidates:
        written = FloatModel("draft", candidate.model, candidate.folder)
        path = candidate.folder / next(
            x.file_name(written.ops[-1]) for x in written.files if x.length == 1
        )
        options = ort.SessionOptions()
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = open_session(path, options)
        values = {i.name: _zeros(i) for i in session.get_inputs()}
        candidate.seconds = float("inf")
        sessions.append((candidate, session, values))
    end = time.perf_counter() + MAX_SECONDS
    for _ in range(MAX_PASSES):
        for candidate, session, values in sessions:
            begin = time.perf_counter()
            session.run(["logits"], values)
            candidate.seconds = min(candidate.seconds, time.perf_counter() - begin)
        if time.perf_counter() > end:
            break


def _zeros(value: ort.NodeArg) -> np.ndarray:
    return np.zeros(value.shape, np.int64 if value.type == "tensor(int64)" else np.float32)


def needs_selection(model: ModelEntry) -> bool:
    """Return True if a draft is large enough for its precision to matter."""
    return model.num_parameters >= MIN_PARAMETERS
