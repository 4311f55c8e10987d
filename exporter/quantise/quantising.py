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
from .experts import NOTHING, Apart, apart, mixtures, opened
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
        graphs = (_opened(part, ops).graph for part in parts for ops in part.ops)
        known = apart(graphs, parts[0].model.num_experts)
        graphs = (_opened(part, ops, known).graph for part in parts for ops in part.ops)
        channels = routes.shared(graphs, known.places)
        for part in parts:
            choices |= _choices(part, precision, texts, channels, choices, known)
    with Store(folder) as store, progress.step(f"Quantising the {first}"):
        for part in parts:
            for ops in part.rounded(precision, kinds):
                _rewrite(part, ops, choices, known, store, folder)
    made = []
    for part in parts:
        reports = {}
        for ops in part.rounded(precision, kinds):
            with progress.step(f"Comparing the {part.role} in {precision} ({ops})"):
                all_ = choices | _others(part, ops, known)
                reports[ops] = report(part, folder, ops, texts, all_, progress)
        made.append(part.with_reports(reports, precision))
    shutil.rmtree(before)
    return made, store.file


def _choices(
    model: Written, precision: str, texts: Texts, channels: Channels, made: Choices, known: Apart
) -> Choices:
    """How each group that no choice is made for yet is rounded; the same in every op set.

    Experts that a MoE node reads are in blocks whatever the precision, others that are one stored
    block of matrices in columns, as is a head whose rows an embedding reads; another head is in
    blocks of 4 bits where that costs little.
    """
    ops = model.ops[0]
    graph = _opened(model, ops, known).graph
    new = [group for group in groups(graph, known.places) if group.key not in made]
    layers = [one.experts for one in mixtures(graph, known) if one.experts.key not in made]
    if not new and not layers:
        return {}
    decoder, geometry = model.decoder(ops), model.geometry
    inputs = calibration.inputs(decoder, geometry, ops, texts.calibration, known)
    tables = {stored.place for _, stored in embeddings(graph)}
    found: Choices = {}
    for group in new:
        x, own = inputs.get(group.key), channels.get(group.key)
        choice = _choice(group, x, precision, model.model, tables, own)
        found[group.key] = _named(choice, [matrix.stored.tensor for matrix in group.matrices])
    for experts in layers:
        choice = choosing.of_experts(experts, inputs[experts.key], BLOCKS.get(precision, 8))
        found[experts.key] = _named(choice, experts.names)
    return found


def _named(choice: Choice, tensors: Sequence[ir.ExternalTensor]) -> Choice:
    return replace(choice, why=choice.why and f"{_names(tensors)}: {choice.why}")


def _others(model: Written, ops: str, known: Apart) -> Choices:
    """What stays as it is because no MatMul reads it as it is stored; one says so for all."""
    found: Choices = {}
    rounded = {place for experts in known.experts for place in experts.key}
    graph = _opened(model, attention(ops), known).graph
    for op_type, tensors in others(graph, known.places, rounded).items():
        for routes_, reason in (
            (True, "it chooses experts"),
            (False, f"{op_type} nodes read it in another form"),
        ):
            some = [t for t in tensors if (t.offset in known.routers) == routes_]
            if some:
                of_each = [_named(choosing.as_it_is(reason), some)]
                of_each += [replace(of_each[0], why="") for _ in some[1:]]
                found |= {(t.offset or 0,): one for t, one in zip(some, of_each, strict=True)}
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
    shapes = [matrix.stored.numbers().shape for matrix in group.matrices]
    in_layers = all(len(s) == 2 and s[-1] != model.padded_vocab_size for s in shapes)
    if precision in BLOCKS and in_layers:
        return choosing.in_blocks(group, x, BLOCKS[precision])
    tied = bool(tables & {*group.key})
    if precision == "int4" and not tied and len(shapes) == 1 and len(shapes[0]) == 2:
        return choosing.of_head(group, x, channels)
    return choosing.in_columns(group, x, channels, tied)


def _opened(model: Written, ops: str, known: Apart = NOTHING) -> ir.Model:
    return opened(model.decoder(ops), known)


def _rewrite(
    model: Written, ops: str, choices: Choices, known: Apart, store: Store, folder: Path
) -> None:
    """Write a model's graphs of an op set, with integers."""
    made = _opened(model, ops, known)
    graph = made.graph
    tables = dict(embeddings(graph))
    found = groups(graph, known.places)
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
    for mixture in mixtures(graph, known):
        rewriter.experts(mixture, choices[mixture.experts.key])
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
