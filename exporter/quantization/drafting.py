"""The precision of a draft: the fastest that keeps most of its tokens accepted.

Whatever a draft proposes, the text is the target's: how it is rounded is a matter of speed alone.
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
from specedge.bundle.precision import GPTQ

from ..progress import Progress
from ..verification.runner import Runner
from ..verification.subgraph import open_session
from .computing import add_kinds
from .quantising import quantise
from .report import logits
from .texts import Texts
from .written import Written

LEAST_PARAMETERS = 4_000_000  # below, a pass costs what its nodes cost, not its weights
KEPT = 0.9  # of the acceptance that the draft has in its own type
CANDIDATES = ("int4", "int8")
SECONDS, MOST_PASSES = 2.0, 40  # of timing, all candidates in turn


@dataclass
class Candidate:
    """A draft in a precision: its files, and how it does."""

    precision: str
    folder: Path
    model: ModelEntry
    file: FileEntry
    sampled: float = 0.0  # the chance that a drawn token is accepted,
    greedy: float = 0.0  # and a likeliest one
    seconds: float = 0.0  # of a pass over one token


def fastest(
    target: Written,
    draft: ModelEntry,
    file: FileEntry,
    folder: Path,
    texts: Texts,
    head: Sequence[int] | None,
    progress: Progress,
    kinds: Sequence[str] = (),
    rounding: str = GPTQ,
) -> tuple[ModelEntry, FileEntry]:
    """Leave the best draft in `folder`, where it is in its own type; its manifest and weights.

    Its logits are of the tokens `head` alone, if it is given. With `kinds` it has op sets of these,
    too.
    """
    found = [Candidate("fp32", folder, draft, file)]
    for precision in CANDIDATES:
        place = folder.with_name(f"{folder.name}.{precision}")
        shutil.copytree(folder, place, copy_function=os.link)
        (model,), weights = quantise(
            {"draft": draft}, place, precision, texts, head, progress, kinds, rounding
        )
        found.append(Candidate(precision, place, model, weights))
    with progress.step("Choosing the draft's precision"):
        wanted = logits(_runner(target), texts.report)
        for one in found:
            _judge(one, wanted, texts, head)
        _time(found)
    best = _best(found)
    own = found[0].seconds
    said = "; ".join(
        f"{one.precision}: {one.sampled:.1%} of drawn tokens accepted, {one.greedy:.1%} of "
        f"likeliest, a pass {one.seconds / own:.2f} of its own type's"
        for one in found
    )
    progress.note(f"draft: {best.precision} ({said}); --draft-precision takes another")
    for one in found:
        if one is not best:
            shutil.rmtree(one.folder)
    if best is not found[0]:
        best.folder.rename(folder)
    elif kinds:
        (best.model,) = add_kinds(kinds, {"draft": draft}, folder, texts, head, progress)
    return best.model, best.file


def _best(found: Sequence[Candidate]) -> Candidate:
    """The fastest that is accepted nearly as often as the first, which is in its own type."""
    own, *others = found
    good = [
        one
        for one in others
        if one.sampled >= KEPT * own.sampled and one.greedy >= KEPT * own.greedy
    ]
    return min([own, *good], key=lambda one: one.seconds)


def _runner(written: Written) -> Runner:
    return written.runner(written.folder, written.ops[-1])


def _judge(
    one: Candidate, wanted: Sequence[np.ndarray], texts: Texts, head: Sequence[int] | None
) -> None:
    """How often the target's logits, [T, V] for each text, accept the draft's tokens."""
    same, chances = [], []
    runner = _runner(Written("draft", one.model, one.folder))
    for ours, theirs in zip(logits(runner, texts.report), wanted, strict=True):
        size = min(ours.shape[1], theirs.shape[1])
        known = np.arange(size) if head is None else np.array(head)
        same.append(known[ours[:, : len(known)].argmax(1)] == theirs.argmax(1))
        both = np.minimum(_softmax(ours)[:, : len(known)], _softmax(theirs)[:, known])
        chances.append(both.sum(1))
    one.greedy = float(np.concatenate(same).mean())
    one.sampled = float(np.concatenate(chances).mean())


def _softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def _time(found: Sequence[Candidate]) -> None:
    """The least seconds of a pass over one token, each in its turn."""
    sessions = []
    for one in found:
        written = Written("draft", one.model, one.folder)
        path = one.folder / next(x.file(written.ops[-1]) for x in written.lengths if x.length == 1)
        options = ort.SessionOptions()
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = open_session(path, options)
        values = {i.name: _zeros(i) for i in session.get_inputs()}
        one.seconds = float("inf")
        sessions.append((one, session, values))
    end = time.perf_counter() + SECONDS
    for _ in range(MOST_PASSES):
        for one, session, values in sessions:
            begin = time.perf_counter()
            session.run(["logits"], values)
            one.seconds = min(one.seconds, time.perf_counter() - begin)
        if time.perf_counter() > end:
            break


def _zeros(value: ort.NodeArg) -> np.ndarray:
    return np.zeros(value.shape, np.int64 if value.type == "tensor(int64)" else np.float32)


def matters(model: ModelEntry) -> bool:
    """Whether a draft is large enough for its precision to matter."""
    return model.num_parameters >= LEAST_PARAMETERS
