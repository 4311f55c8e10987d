"""The story of a quantisation: float graphs in, graphs with integers and a report out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.manifest import File, Model, Quantisation
from specedge.precision import BLOCKS

from ..compare import checks
from ..compare.runner import Runner
from ..graph import graphs
from ..graph.graphs import Length
from ..graph.weights import FILE, drop_unused
from ..progress import Progress
from ..tracing.geometry import Geometry
from . import calibration, choosing, smoothing
from .choosing import Choice
from .matrices import Group, embeddings, groups
from .report import Distance, distance
from .rewriting import Rewriter
from .storing import Store
from .texts import Texts

NAMED = 3  # matrices of a group in a line of the report
Choices = dict[tuple[int, ...], Choice]
Report = tuple[Quantisation, tuple[int, ...]]  # and the T whose rows keep their bits


@dataclass(frozen=True)
class Written:
    """A model that was written and compared, and the folder where it lies.

    `head` [n] are the tokens of its logits where these are not all.
    """

    role: str
    model: Model
    folder: Path
    head: np.ndarray | None = None

    @property
    def geometry(self) -> Geometry:
        model = self.model
        sizes = model.context_length, model.cache.capacity, model.padded_vocab_size
        return Geometry(*sizes, model.cache.layers)

    @property
    def ops(self) -> list[str]:
        return list(self.model.parity)

    @property
    def lengths(self) -> list[Length]:
        """Its files, by what they are called in any op set."""
        return [
            Length(
                graph.name,
                graph.length,
                graph.signature != "caches_alone",
                graph.file.rpartition("/")[2].partition(graph.name)[0],
            )
            for graph in self.model.graphs
            if graph.ops == self.ops[0]
        ]

    def runner(self, folder: Path, ops: str) -> Runner:
        return Runner(folder, self.lengths, self.geometry, ops)


def quantise(
    models: dict[str, Model],
    folder: Path,
    precision: str,
    texts: Texts,
    head: Sequence[int] | None,
    progress: Progress,
) -> tuple[list[Model], File]:
    """Give models that share a folder weights of a quantised precision; the weights' hash, too.

    A second model has the first one's own layers, for which choices are made once. The last one's
    logits are of the tokens `head` alone, if it is given.
    """
    before = folder.with_name(f"{folder.name}.float")
    folder.rename(before)
    folder.mkdir()
    for path in before.iterdir():
        if path.suffix != ".onnx" and path.name != FILE:
            shutil.copy2(path, folder)
    parts = [Written(role, model, before) for role, model in models.items()]
    parts[-1] = replace(parts[-1], head=None if head is None else np.array(head))
    first = parts[0].role
    choices: Choices = {}
    with progress.step(f"Calibrating the {first}"):
        for part in parts:
            choices |= _choices(part, precision, texts, choices)
    with Store(folder) as store, progress.step(f"Quantising the {first}"):
        for part in parts:
            for ops in part.ops:
                _rewrite(part, ops, choices, store, folder)
    made = [_compared(part, folder, precision, texts, choices, progress) for part in parts]
    shutil.rmtree(before)
    return made, store.file


def _compared(
    part: Written, folder: Path, precision: str, texts: Texts, choices: Choices, progress: Progress
) -> Model:
    """A model's manifest with what its quantisation cost, and which rows keep their bits."""
    reports, parity = {}, {}
    for ops, known in part.model.parity.items():
        with progress.step(f"Comparing the {part.role} in {precision} ({ops})"):
            reports[ops], held = _report(part, folder, ops, texts, choices, progress)
        parity[ops] = replace(known, row_independent_lengths=held)
    return replace(part.model, weights_dtype=precision, parity=parity, quantisation=reports)


def _choices(model: Written, precision: str, texts: Texts, known: Choices) -> Choices:
    """How each group that is not known yet is rounded; the same in every op set.

    Experts that are one stored block of matrices, and the head, whose rows a tied embedding reads,
    are in columns whatever the precision: wide and few, they cost the least there.
    """
    ops = model.ops[0]
    decoder = _decoder(model, ops)
    graph = ir.load(decoder).graph
    new = [group for group in groups(graph) if group.key not in known]
    if not new:
        return {}
    inputs = calibration.inputs(decoder, model.geometry, ops, texts.calibration)
    tables = {stored.place for _, stored in embeddings(graph)}
    found: Choices = {}
    for group in new:
        choice = _choice(group, inputs.get(group.key), precision, model.model, tables)
        found[group.key] = replace(choice, why=choice.why and f"{_names(group)}: {choice.why}")
    return found


def _names(group: Group) -> str:
    """The names of its first matrices, and how many more there are."""
    names = [matrix.stored.tensor.name or "" for matrix in group.matrices]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(name[:120] for name in names[:NAMED]) + more


def _choice(
    group: Group, x: np.ndarray | None, precision: str, model: Model, tables: set[int]
) -> Choice:
    """How a group is rounded whose inputs are among others these, [n, K]."""
    if x is None:
        return choosing.as_it_is("it reads a cache")
    if _routes(group, model.num_experts):
        return choosing.as_it_is("it chooses experts")
    shapes = [matrix.stored.numbers().shape for matrix in group.matrices]
    in_layers = all(len(s) == 2 and s[-1] != model.padded_vocab_size for s in shapes)
    if precision in BLOCKS and in_layers:
        return choosing.in_blocks(group, x, BLOCKS[precision])
    tied = bool(tables & {*group.key})
    can_smooth = not tied and smoothing.route(group) is not None
    return choosing.in_columns(group, x, can_smooth, not tied)


def _routes(group: Group, num_experts: int) -> bool:
    """Whether a group has a router, whose choices rounding would turn."""
    return bool(num_experts) and any(
        m.stored.numbers().shape[-1] == num_experts for m in group.matrices
    )


def _decoder(model: Written, ops: str) -> Path:
    (decoder,) = (one for one in model.lengths if one.length is None)
    return model.folder / decoder.file(ops)


def _rewrite(model: Written, ops: str, choices: Choices, store: Store, folder: Path) -> None:
    """Write a model's graphs of an op set, with integers."""
    made = ir.load(_decoder(model, ops))
    graph = made.graph
    tables = dict(embeddings(graph))
    found = groups(graph)
    rounded = {place for g in found if choices[g.key].num_parts for place in g.key}
    places = frozenset(stored.place for stored in tables.values())
    rewriter = Rewriter(graph, store, places)
    for group in found:
        by, way = choices[group.key].powers, smoothing.route(group)
        if by is not None and way is not None:
            rewriter.column_powers |= smoothing.divide(graph, way, by)
    for group in found:
        rewriter.group(group, choices[group.key])
    heads = {place for g in found for place in g.key}
    for node, stored in tables.items():
        if stored.place in rounded or stored.place not in heads:
            rewriter.embedding(node, stored)
    passes.RemoveUnusedNodesPass()(made)
    drop_unused(graph)
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) != folder:
            value.const_value = store.as_it_is(tensor)
    graphs.write(made, folder, model.lengths, ops)


def _report(
    model: Written, folder: Path, ops: str, texts: Texts, choices: Choices, progress: Progress
) -> Report:
    """Run what was written, beside what it was made of and in every way that it is used."""
    runner = model.runner(folder, ops)
    runner.check_files()
    found = distance(model.runner(model.folder, ops), runner, texts.report, model.head)
    held, differing = checks.alone(runner, np.concatenate(texts.report))
    if differing:
        progress.note(
            f"{model.role} ({ops}): {', '.join(differing)} give other last bits than decoder"
        )
    return _described(found, texts, choices), held


def _described(found: Distance, texts: Texts, choices: Choices) -> Quantisation:
    count, scored = max(1, found.num_tokens), max(1, found.num_scored)
    made = choices.values()
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
