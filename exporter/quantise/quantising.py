"""The story of a quantisation: float graphs in, graphs with integers and a report out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.manifest import File, Model
from specedge.op_sets import attention, is_for_engines, is_typed
from specedge.precision import BLOCKS

from ..graph import sigmoids
from ..graph.weights import FILE, drop_unused
from ..progress import Progress
from . import calibration, choosing, routes, smoothing
from .calibration import Seen
from .choosing import Choice
from .dequantising import Dequantiser
from .matrices import Group, embeddings, groups, others
from .report import report
from .rewriting import Rewriter
from .storing import Store
from .texts import Texts
from .widening import Widener
from .written import Written

NAMED = 3  # matrices of a group in a line of the report
Choices = dict[tuple[int, ...], Choice]
Channels = dict[tuple[int, ...], np.ndarray]  # of the groups that can be smoothed in every graph


def quantise(
    models: dict[str, Model],
    folder: Path,
    precision: str,
    texts: Texts,
    head: Sequence[int] | None,
    progress: Progress,
    kinds: Sequence[str] = (),
) -> tuple[list[Model], File]:
    """Give models that share a folder weights of a quantised precision; the weights' hash, too.

    A second model has the first one's own layers, for which choices are made once. The last one's
    logits are of the tokens `head` alone, if it is given. With `kinds` there are op sets, too,
    that widen the integers to floats of a type, or have caches of one.
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
        channels = routes.shared(_graph(part, ops) for part in parts for ops in part.ops)
        for part in parts:
            choices |= _choices(part, precision, texts, channels, choices)
    with Store(folder) as store, progress.step(f"Quantising the {first}"):
        for part in parts:
            for ops in part.rounded(precision, kinds):
                _rewrite(part, ops, choices, store, folder)
    made = []
    for part in parts:
        reports = {}
        for ops in part.rounded(precision, kinds):
            with progress.step(f"Comparing the {part.role} in {precision} ({ops})"):
                all_ = choices | _others(part, ops)
                reports[ops] = report(part, folder, ops, texts, all_, progress)
        made.append(part.with_reports(reports, precision))
    shutil.rmtree(before)
    return made, store.file


def _choices(
    model: Written, precision: str, texts: Texts, channels: Channels, known: Choices
) -> Choices:
    """How each group that is not known yet is rounded; the same in every op set.

    Experts that are one stored block of matrices, and a head whose rows an embedding reads, are in
    columns whatever the precision; another head is in blocks of 4 bits where that costs little.
    """
    ops = model.ops[0]
    graph = _graph(model, ops)
    new = [group for group in groups(graph) if group.key not in known]
    if not new:
        return {}
    inputs = calibration.inputs(model.decoder(ops), model.geometry, ops, texts.calibration)
    tables = {stored.place for _, stored in embeddings(graph)}
    found: Choices = {}
    for group in new:
        x, own = inputs.get(group.key), channels.get(group.key)
        choice = _choice(group, x, precision, model.model, tables, own)
        names = _names([matrix.stored.tensor for matrix in group.matrices])
        found[group.key] = replace(choice, why=choice.why and f"{names}: {choice.why}")
    return found


def _others(model: Written, ops: str) -> Choices:
    """What stays as it is because no MatMul reads it as it is stored; one says so for all."""
    found: Choices = {}
    for op_type, tensors in others(_graph(model, attention(ops))).items():
        choice = choosing.as_it_is(f"{op_type} nodes read it in another form")
        first = replace(choice, why=f"{_names(tensors)}: {choice.why}")
        of_each = (first, *(replace(choice, why="") for _ in tensors[1:]))
        found |= {(t.offset or 0,): one for t, one in zip(tensors, of_each, strict=True)}
    return found


def _names(tensors: Sequence[ir.ExternalTensor]) -> str:
    """The names of the first tensors, and how many more there are."""
    names = [tensor.name or "" for tensor in tensors]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(name[:120] for name in names[:NAMED]) + more


def _choice(
    group: Group,
    x: Seen | None,
    precision: str,
    model: Model,
    tables: set[int],
    channels: np.ndarray | None,
) -> Choice:
    """How a group is rounded that reads x; `channels` say which have one power, if any can."""
    if x is None:
        return choosing.as_it_is("it reads a cache")
    if _routes(group, model.num_experts):
        return choosing.as_it_is("it chooses experts")
    shapes = [matrix.stored.numbers().shape for matrix in group.matrices]
    in_layers = all(len(s) == 2 and s[-1] != model.padded_vocab_size for s in shapes)
    if precision in BLOCKS and in_layers:
        return choosing.in_blocks(group, x, BLOCKS[precision])
    tied = bool(tables & {*group.key})
    if precision == "int4" and not tied and len(shapes) == 1 and len(shapes[0]) == 2:
        return choosing.of_head(group, x, channels)
    return choosing.in_columns(group, x, channels, tied)


def _routes(group: Group, num_experts: int) -> bool:
    """Whether a group has a router, whose choices rounding would turn."""
    return bool(num_experts) and any(
        m.stored.numbers().shape[-1] == num_experts for m in group.matrices
    )


def _graph(model: Written, ops: str) -> ir.Graph:
    return ir.load(model.decoder(ops)).graph


def _rewrite(model: Written, ops: str, choices: Choices, store: Store, folder: Path) -> None:
    """Write a model's graphs of an op set, with integers."""
    made = ir.load(model.decoder(ops))
    graph = made.graph
    tables = dict(embeddings(graph))
    found = groups(graph)
    rounded = {place for g in found if choices[g.key].num_parts for place in g.key}
    powers = {place: choice.powers for key, choice in choices.items() for place in key}
    places = {stored.place: powers.get(stored.place) for stored in tables.values()}
    kind = Dequantiser if is_for_engines(ops) else Widener if is_typed(ops) else Rewriter
    rewriter = kind(graph, store, places)
    for group in found:
        if (by := choices[group.key].powers) is not None:
            way = routes.route(group)
            assert way is not None
            rewriter.column_powers |= smoothing.divide(graph, way, by)
    for group in found:
        rewriter.group(group, choices[group.key])
    heads = {place for g in found for place in g.key}
    for node, stored in tables.items():
        if stored.place in rounded or stored.place not in heads:
            rewriter.embedding(node, stored)
    sigmoids.shorten(made)
    passes.RemoveUnusedNodesPass()(made)
    drop_unused(graph)
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) != folder:
            value.const_value = store.as_it_is(tensor)
    model.write(made, folder, ops)
