"""How far a rounded model is from the one that it was made of, on a text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from specedge.bundle.op_sets import attention_ops, cache_dtype
from specedge.bundle.reports import QuantizationReport
from specedge.errors import ExportError

from ..progress import Progress
from ..verification import checks
from ..verification.runner import Action, FillNoise, PassAction, ReadRows, RepeatRows, Runner
from . import smoothing
from .choosing import Choice
from .experts import opened
from .texts import Texts
from .written import Report, Written

HELD = 1 << 27  # logits of a model that are held at once
STRIP = 64  # tokens whose distributions are compared at a time
LATE = 64  # tokens of a late window
LATE_TIMES = 3.0  # in that of texts, what its divergence may be;
LATE_LEAST = 0.0001  # and nats more: ALiBi as 16 bits hold it cost 0.0003 in a small model


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
        progress.note(f"{who}: not run, as ONNX Runtime has no {cache_dtype(ops)} kernels here")
        return _described(Distance(), texts, choices), ()
    powers = {key: choice.powers for key, choice in choices.items()}
    factors = smoothing.of_caches(opened(model.decoder(ops)).graph, powers)
    before = model.runner(model.original or model.folder, attention_ops(ops))
    found, late = distances(before, runner, texts.report, factors, model.head)
    numbers = (one.loss + one.divergence + one.error for one in (found, late))
    if not math.isfinite(sum(numbers)):
        raise ExportError(
            f"{who}: some numbers are beyond {cache_dtype(ops)}; leave --compute and --cache out, "
            "or compute in another type"
        )
    held, differing = checks.check_standalone(runner, np.concatenate(texts.report))
    if differing:
        progress.note(f"{who}: {', '.join(differing)} give other last bits than decoder")
    described = _described(found, texts, choices)
    if model.is_self_draft:  # first layers with the last one's head: no language model
        described = replace(described, perplexity=0.0, original_perplexity=0.0)
    if said := _of_late(found, late, before.geometry.context_length):
        described = replace(described, exceptions=(*described.exceptions, said))
        progress.note(f"{who}: {said}")
    return described, held


def _of_late(near: Distance, late: Distance, context_length: int) -> str | None:
    """What to say of late positions that are much farther off than those that texts have."""
    of_near, of_late = (one.divergence / max(1, one.num_tokens) for one in (near, late))
    if not late.num_tokens or of_late <= LATE_TIMES * of_near + LATE_LEAST:
        return None
    return (
        f"near position {context_length} KL is {of_late:.2g}, near the beginning {of_near:.2g}: "
        "what depends on positions is not what it was"
    )


def _described(
    found: Distance, texts: Texts, choices: Mapping[tuple[int, ...], Choice]
) -> QuantizationReport:
    made = choices.values()
    count, scored = max(1, found.num_tokens), max(1, found.num_scored)
    return QuantizationReport(
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
        for at in range(0, len(tokens) - 1, STRIP):
            rows = slice(at, min(at + STRIP, len(tokens) - 1))
            self._add(found[rows], wanted[rows], tokens[rows.start + 1 : rows.stop + 1], head)
        self.compare(found, wanted)

    def _add(
        self, found: np.ndarray, wanted: np.ndarray, columns: np.ndarray, head: np.ndarray | None
    ) -> None:
        """Count some rows, 2 * [t, n], and the tokens that come next, [t]."""
        ours, theirs = _log_softmax(found), _log_softmax(wanted)
        rows = np.arange(len(columns))
        self.num_tokens += len(columns)
        if head is not None:
            rows = np.flatnonzero(np.isin(columns, head))
            columns = head.searchsorted(columns[rows])
        places = rows, columns
        self.loss -= float(ours[places].sum())
        self.original_loss -= float(theirs[places].sum())
        self.divergence += float((np.exp(theirs) * (theirs - ours)).sum())
        self.num_same += int((found.argmax(1) == wanted.argmax(1)).sum())
        self.num_scored += len(rows)

    def compare(self, found: np.ndarray, wanted: np.ndarray) -> None:
        """Keep the largest difference of an output, in its largest value."""
        size = max(1e-30, float(np.abs(wanted).max()))
        # Not `max`, which leaves out what is no number.
        self.error = float(np.maximum(self.error, np.abs(found - wanted).max() / size))


def distances(
    original: Runner,
    found: Runner,
    texts: Sequence[np.ndarray],
    factors: Mapping[str, np.ndarray],
    head: np.ndarray | None = None,
) -> tuple[Distance, Distance]:
    """Run both over texts that begin anew, [T] each; `head` [n] are their columns' tokens.

    The second one is of the context's last positions alone, if the texts do not reach that far.
    `factors` are what caches that were found have to be multiplied by, [H, 1, D], by their names.
    """
    total, late = Distance(), Distance()
    names = original.geometry.cache_names()
    text = texts[-1][:LATE]
    start = original.geometry.context_length - len(text)
    window = Window(text, start) if start >= max(map(len, texts)) else None
    size = max(1, HELD // (original.geometry.padded_vocab_size * max(map(len, texts))))
    for at in range(0, len(texts), size):
        some = texts[at : at + size]
        is_last = at + size >= len(texts)
        ours, theirs = (
            _run(runner, some, window if is_last else None) for runner in (found, original)
        )
        for text, (logits, caches), (wanted, wanted_caches) in zip(
            some, ours, theirs, strict=False
        ):
            total.add(logits, wanted, text, head)
            for name, our, their in zip(names, caches, wanted_caches, strict=True):
                total.compare(our * factors.get(name, 1), their)
        if window is not None and is_last:
            late.add(ours[-1][0], theirs[-1][0], window.text, head)
    return total, late


@dataclass(frozen=True)
class Window:
    """Tokens [T] that are read from a late position on, behind the rows of a text, repeated."""

    text: np.ndarray
    start: int


def logits(runner: Runner, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of texts that begin anew, [T] each. -> [T, V] each"""
    return [found for found, _ in _run(runner, texts)]


def _run(
    runner: Runner, texts: Sequence[np.ndarray], late: Window | None = None
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Logits [T, V] and caches [H, T, D] of each text, and the logits of a late window.

    What stands before the window is each model's own: rows of the last text, whatever a cache
    holds them divided by.
    """
    actions: list[Action] = []
    for text in texts:
        actions += [FillNoise(0, runner.geometry.capacity), PassAction("decoder", text, 0)]
        actions.append(ReadRows(0, len(text)))
    if late is not None:
        actions += [
            RepeatRows(len(texts[-1]), late.start),
            PassAction("decoder", late.text, late.start),
        ]
    results = runner.run([], through=actions)
    whole = results[: 3 * len(texts)]
    found = list(zip(whole[1::3], whole[2::3], strict=True))
    return found if late is None else [*found, (results[-1], [])]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(1, keepdims=True)))
