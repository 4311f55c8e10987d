"""How far a rounded model is from the one that it was made of, on a text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specedge.errors import ExportError
from specedge.op_sets import attention, cached
from specedge.reports import Quantisation

from ..compare import checks
from ..compare.runner import Action, FillNoise, Pass, Rows, Runner
from ..progress import Progress
from . import smoothing
from .choosing import Choice
from .texts import Texts
from .written import Report, Written


def report(
    model: Written,
    folder: Path,
    ops: str,
    texts: Texts,
    choices: Mapping[tuple[int, ...], Choice],
    progress: Progress,
) -> Report:
    """Run an op set that was written, beside what it was made of and in every way that it is used.

    What ONNX Runtime has no kernels for here is loaded alone, as far as that goes. Raises
    ExportError where numbers are beyond the type that they are computed in.
    """
    who, runner = f"{model.role} ({ops})", model.runner(folder, ops)
    if not runner.can_run():
        progress.note(f"{who}: not run, as ONNX Runtime has no {cached(ops)} kernels here")
        return _described(Distance(), texts, choices), ()
    powers = {key: choice.powers for key, choice in choices.items()}
    factors = smoothing.of_caches(ir.load(model.decoder(ops)).graph, powers)
    before = model.runner(model.folder, attention(ops))
    found = distance(before, runner, texts.report, factors, model.head)
    if not math.isfinite(found.loss + found.divergence + found.error):
        raise ExportError(
            f"{who}: some numbers are beyond {cached(ops)}; leave --compute and --cache out, or "
            "compute in another type"
        )
    held, differing = checks.alone(runner, np.concatenate(texts.report))
    if differing:
        progress.note(f"{who}: {', '.join(differing)} give other last bits than decoder")
    return _described(found, texts, choices), held


def _described(
    found: Distance, texts: Texts, choices: Mapping[tuple[int, ...], Choice]
) -> Quantisation:
    made = choices.values()
    count, scored = max(1, found.num_tokens), max(1, found.num_scored)
    return Quantisation(
        text=texts.name,
        num_tokens=found.num_tokens,
        perplexity=float(np.exp(found.loss / scored)),
        original_perplexity=float(np.exp(found.original_loss / scored)),
        agreement=found.num_same / count,
        divergence=max(0.0, found.divergence / count),
        error=found.error,
        num_smoothed=sum(one.powers is not None for one in made),
        num_cut=sum(one.num_parts > 1 for one in made),
        num_left=sum(one.num_parts == 0 for one in made),
        num_in_blocks=sum(one.bits > 0 for one in made),
        product_error=max((one.error for one in made), default=0.0),
        plain_product_error=max((one.plain_error for one in made), default=0.0),
        exceptions=tuple(one.why for one in made if one.why),
    )


@dataclass
class Distance:
    """What two models make of the same tokens, added up over n of them.

    Losses are of the `num_scored` tokens that the logits have a column for. `error` is the largest
    difference of a value of logits or cache, in the largest value.
    """

    loss: float = 0.0  # nats, of the model that is measured
    original_loss: float = 0.0
    divergence: float = 0.0  # Kullback-Leibler, of the original from it
    num_same: int = 0  # likeliest tokens
    num_tokens: int = 0
    num_scored: int = 0
    error: float = 0.0

    def add(
        self, found: np.ndarray, wanted: np.ndarray, tokens: np.ndarray, head: np.ndarray | None
    ) -> None:
        """Count a text's logits, 2 * [T, n], and the tokens that they are of, [T].

        Column j is token head[j], or token j.
        """
        ours, theirs = _log_softmax(found[:-1]), _log_softmax(wanted[:-1])
        rows, columns = np.arange(len(tokens) - 1), tokens[1:]
        if head is not None:
            rows = np.flatnonzero(np.isin(columns, head))
            columns = head.searchsorted(columns[rows])
        places = rows, columns
        self.loss -= float(ours[places].sum())
        self.original_loss -= float(theirs[places].sum())
        self.divergence += float((np.exp(theirs) * (theirs - ours)).sum())
        self.num_same += int((found[:-1].argmax(1) == wanted[:-1].argmax(1)).sum())
        self.num_tokens += len(tokens) - 1
        self.num_scored += len(rows)
        self.compare(found, wanted)

    def compare(self, found: np.ndarray, wanted: np.ndarray) -> None:
        """Keep the largest difference of an output, in its largest value."""
        size = max(1e-30, float(np.abs(wanted).max()))
        # Not `max`, which leaves out what is no number.
        self.error = float(np.maximum(self.error, np.abs(found - wanted).max() / size))


def distance(
    original: Runner,
    found: Runner,
    texts: Sequence[np.ndarray],
    factors: Mapping[str, np.ndarray],
    head: np.ndarray | None = None,
) -> Distance:
    """Run both over texts that begin anew, [T] each; `head` [n] are their columns' tokens.

    `factors` are what caches that were found have to be multiplied by, [H, 1, D], by their names.
    """
    total = Distance()
    names = original.geometry.cache_names()
    results = zip(texts, _run(found, texts), _run(original, texts), strict=True)
    for text, (logits, caches), (wanted, wanted_caches) in results:
        total.add(logits, wanted, text, head)
        for name, ours, theirs in zip(names, caches, wanted_caches, strict=True):
            total.compare(ours * factors.get(name, 1), theirs)
    return total


def logits(runner: Runner, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of texts that begin anew, [T] each. -> [T, V] each"""
    return [found for found, _ in _run(runner, texts)]


def _run(runner: Runner, texts: Sequence[np.ndarray]) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Logits [T, V] and caches [H, T, D] of each text."""
    actions: list[Action] = []
    for text in texts:
        actions += [FillNoise(0, runner.geometry.capacity), Pass("decoder", text, 0)]
        actions.append(Rows(0, len(text)))
    results = runner.run([], through=actions)
    return list(zip(results[1::3], results[2::3], strict=True))


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(1, keepdims=True)))
