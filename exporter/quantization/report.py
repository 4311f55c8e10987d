"""How far a rounded model is from the one that it was made of, on a text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from specedge.bundle.op_sets import attention_ops, cache_dtype
from specedge.bundle.reports import FormatQuality, QuantizationReport
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
SAMPLE = 96  # tokens of op sets that have the integers of one that is measured on all texts
LATE = 64  # tokens of a late window
LATE_TIMES = 3.0  # in that of texts, what its divergence may be;
LATE_LEAST = 0.0001  # and nats more: ALiBi as 16 bits hold it cost 0.0003 in a small model

Choices = Mapping[tuple[int, ...], Choice]


@dataclass(frozen=True)
class Candidate:
    """A rounded graph to measure; its caches are to be multiplied by `factors`, [H, 1, D]."""

    runner: Runner
    factors: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Distances from the float graph on texts, and at the context's last positions alone."""

    near: Distance
    late: Distance


def reports(
    model: Written,
    folder: Path,
    op_sets: Mapping[str, Choices],
    texts: Texts,
    progress: Progress,
    formats: Mapping[str, Runner] | None = None,
) -> dict[str, Report]:
    """Compare op sets that were written with the float graph, in every way that they are used.

    Of op sets that compute in one type the first one that ONNX Runtime runs, GroupQueryAttention
    before standard ONNX, is measured on all texts, the others on `SAMPLE` tokens: their integers
    are the same. What ONNX Runtime has no kernels for here is loaded alone, as far as that goes.

    Args:
        model: The float model.
        folder: Folder of the rounded graphs.
        op_sets: Names, and how each group is rounded.
        texts: Texts to compare on.
        progress: Takes notes.
        formats: Graphs of the same weights in formats of llama.cpp, to compare with.

    Raises:
        ExportError: If numbers are beyond the type that they are computed in.
    """
    candidates: dict[str, Candidate] = {}
    described: dict[str, Report] = {}
    for ops, choices in op_sets.items():
        runner = model.runner(folder, ops)
        if runner.can_run():
            powers = {key: choice.powers for key, choice in choices.items()}
            factors = smoothing.of_caches(opened(model.decoder(ops)).graph, powers)
            candidates[ops] = Candidate(runner, factors)
        else:
            progress.note(
                f"{model.role} ({ops}): not run, as ONNX Runtime has no {cache_dtype(ops)} "
                "kernels here"
            )
            described[ops] = _described(Distance(), texts, choices), ()
    primary = _primary(candidates)
    measured = _measured(model, candidates, primary, texts, formats or {})
    qualities = {name: _quality(measured[name].near) for name in formats or {}}
    for ops, candidate in candidates.items():
        distances = measured[ops]
        if ops not in primary:
            first = measured[next(one for one in primary if _type(one) == _type(ops))]
            distances.near.error = max(distances.near.error, first.near.error)
        described[ops] = _report(
            model, ops, candidate.runner, distances, texts, op_sets[ops], progress
        )
        if ops == next(iter(primary)):
            quality = replace(described[ops][0], formats=qualities)
            described[ops] = quality, described[ops][1]
    return {ops: described[ops] for ops in op_sets}


def _type(ops: str) -> str:
    """Return what an op set's name says of types."""
    return ops.removeprefix(attention_ops(ops))


def _primary(op_sets: Iterable[str]) -> list[str]:
    """Return an op set of each type, which is measured on all texts."""
    chosen: dict[str, str] = {}
    for ops in op_sets:
        if _type(ops) not in chosen or attention_ops(ops) == "gqa":
            chosen[_type(ops)] = ops
    return list(chosen.values())


def _measured(
    model: Written,
    candidates: Mapping[str, Candidate],
    primary: Sequence[str],
    texts: Texts,
    formats: Mapping[str, Runner],
) -> dict[str, Measured]:
    """Measure op sets, and formats by their names."""
    original = replace(model, folder=model.original or model.folder)
    reference = original.decoder_runner(model.ops[-1])
    whole = {ops: candidates[ops] for ops in primary}
    whole |= {name: Candidate(runner) for name, runner in formats.items()}
    rest = {ops: one for ops, one in candidates.items() if ops not in primary}
    sample = [texts.report[0][:SAMPLE]]
    return measure(reference, whole, texts.report, model.head) | measure(
        reference, rest, sample, model.head
    )


def _report(
    model: Written,
    ops: str,
    runner: Runner,
    measured: Measured,
    texts: Texts,
    choices: Choices,
    progress: Progress,
) -> Report:
    """Describe a measured op set, and ask it of which pass lengths it is independent."""
    who, near, late = f"{model.role} ({ops})", measured.near, measured.late
    numbers = (one.loss + one.divergence + one.error for one in (near, late))
    if not math.isfinite(sum(numbers)):
        raise ExportError(
            f"{who}: some numbers are beyond {cache_dtype(ops)}; leave --compute and --cache out, "
            "or compute in another type"
        )
    invariant, differing = checks.check_standalone(runner, np.concatenate(texts.report))
    if differing:
        progress.note(f"{who}: {', '.join(differing)} give other last bits than decoder")
    described = _described(near, texts, choices)
    if model.is_self_draft:  # first layers with the last one's head: no language model
        described = replace(described, perplexity=0.0, original_perplexity=0.0)
    if said := _of_late(near, late, runner.geometry.context_length):
        described = replace(described, exceptions=(*described.exceptions, said))
        progress.note(f"{who}: {said}")
    return described, invariant


def _quality(near: Distance) -> FormatQuality:
    count, scored = max(1, near.num_tokens), max(1, near.num_scored)
    return FormatQuality(
        max(0.0, near.divergence / count), near.num_same / count, float(np.exp(near.loss / scored))
    )


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


def measure(
    original: Runner,
    candidates: Mapping[str, Candidate],
    texts: Sequence[np.ndarray],
    head: np.ndarray | None = None,
) -> dict[str, Measured]:
    """Run a float graph and candidates over texts that begin anew, [T] each.

    Late positions are compared if the texts do not reach the context's end. `head` [n] are the
    tokens of the logits' columns.
    """
    totals = {name: Measured(Distance(), Distance()) for name in candidates}
    if not candidates:
        return totals
    names = original.geometry.cache_names()
    text = texts[-1][:LATE]
    start = original.geometry.context_length - len(text)
    window = Window(text, start) if start >= max(map(len, texts)) else None
    size = max(1, HELD // (original.geometry.padded_vocab_size * max(map(len, texts))))
    for at in range(0, len(texts), size):
        part = texts[at : at + size]
        late = window if at + size >= len(texts) else None
        wanted = _run(original, part, late)
        for name, candidate in candidates.items():
            total, results = totals[name], _run(candidate.runner, part, late)
            for text, (logits, caches), (exact, exact_caches) in zip(
                part, results, wanted, strict=False
            ):
                total.near.add(logits, exact, text, head)
                for cache, our, their in zip(names, caches, exact_caches, strict=True):
                    total.near.compare(our * candidate.factors.get(cache, 1), their)
            if late is not None:
                total.late.add(results[-1][0], wanted[-1][0], late.text, head)
    return totals


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
    holds them divided by. Weights are packed as in a host's session: without that ONNX Runtime
    multiplies blocks of integers by inputs that it does not quantize.
    """
    actions: list[Action] = []
    for text in texts:
        actions += [
            FillNoise(0, runner.geometry.capacity),
            PassAction("decoder", text, 0, packed=True),
        ]
        actions.append(ReadRows(0, len(text)))
    if late is not None:
        actions += [
            RepeatRows(len(texts[-1]), late.start),
            PassAction("decoder", late.text, late.start, packed=True),
        ]
    results = runner.run([], through=actions)
    whole = results[: 3 * len(texts)]
    found = list(zip(whole[1::3], whole[2::3], strict=True))
    return found if late is None else [*found, (results[-1], [])]


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(1, keepdims=True)))
