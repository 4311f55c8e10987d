"""The story of a quantisation: float graphs in, graphs with integers and a report out."""

from __future__ import annotations

import shutil
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from specedge.bundle.manifest import FileEntry, ModelEntry
from specedge.bundle.op_sets import attention_ops, has_compute_type, is_qdq
from specedge.bundle.precision import BLOCK_BITS, GPTQ, NEAREST
from specedge.bundle.reports import QuantizationReport
from specedge.errors import ParityError

from ..graph import rewrites
from ..graph.weights import FILE, drop_unused
from ..progress import Progress
from ..verification.runner import Runner
from . import (
    basis,
    calibration,
    choosing,
    equivalence,
    gptq,
    llama_cpp,
    prediction,
    routes,
    smoothing,
)
from .calibration import Seen
from .choosing import Choice
from .dequantising import Dequantiser
from .experts import NOTHING, Apart, apart, mixtures, opened
from .matrices import Group, embeddings, groups, others
from .report import reports
from .rewriting import Rewriter, width_of
from .rounding import BLOCK, Blocks, Integers
from .storing import Store
from .texts import Texts
from .widening import Widener
from .written import Written

ROTATED = ("int8", "int4")  # the precisions whose rounding a rotation makes better
COPIED = 300_000_000  # parameters of models that may be copied to float32 as a whole
NAMED = 3  # matrices of a group in a line of the report
Choices = dict[tuple[int, ...], Choice]
Channels = dict[tuple[int, ...], np.ndarray]  # of the groups that can be smoothed in every graph


def quantise(
    models: dict[str, ModelEntry],
    folder: Path,
    precision: str,
    texts: Texts,
    head: Sequence[int] | None,
    progress: Progress,
    kinds: Sequence[str] = (),
    rounding: str = GPTQ,
    bits: float = 4.0,
) -> tuple[list[ModelEntry], FileEntry]:
    """Give models that share a folder weights of a quantised precision; the weights' hash, too.

    A second model has the first one's own layers, for which choices are made once. The last one's
    logits are of the tokens `head` alone, if it is given. With `kinds` there are op sets, too,
    that widen the integers to floats of a type, or have caches of one. `rounding` is one of
    `specedge.bundle.precision.ROUNDINGS`, of which int8-block has the nearest by either; `bits`
    is what int4's weights in layers may have on average.
    """
    before = folder.with_name(f"{folder.name}.float")
    folder.rename(before)
    folder.mkdir()
    for path in before.iterdir():
        if path.suffix != ".onnx" and path.name != FILE:
            shutil.copy2(path, folder)
    parts = [
        Written(role, model, before, is_self_draft=i > 0)
        for i, (role, model) in enumerate(models.items())
    ]
    parts[-1] = replace(parts[-1], head=None if head is None else np.array(head))
    first = parts[0].role
    choices: Choices = {}
    work = folder.with_name(f"{folder.name}.basis")
    work.mkdir()
    graphs = (_opened(part, ops).graph for part in parts for ops in part.ops)
    known = apart(graphs, parts[0].model.num_experts)
    if precision in ROTATED and parts[0].model.num_experts:
        progress.note(f"{first}: it chooses among experts, so its weights keep their basis")
    elif precision in ROTATED:
        with progress.step(f"Rotating the {first}"):
            parts, reason = _in_basis(parts, work, known)
        if reason:
            progress.note(f"{first}: {reason}")
            graphs = (_opened(part, ops).graph for part in parts for ops in part.ops)
            known = apart(graphs, parts[0].model.num_experts)
    if precision == "int8-block":
        rounding = NEAREST
    if rounding == GPTQ and texts.prompts and _can_answer(parts[0]):
        with progress.step(f"Answering prompts with the {first}"):
            own = calibration.answers(
                parts[0].decoder(parts[0].ops[-1]), parts[0].geometry, texts.prompts,
                texts.end_tokens,
            )  # fmt: skip
        texts = replace(texts, calibration=[*texts.calibration, *own])
    minutes = max(1, round(prediction.seconds(parts[0], texts, rounding) / 60))
    with progress.step(f"Calibrating the {first} (about {minutes} min up to its report)"):
        graphs = (_opened(part, ops, known).graph for part in parts for ops in part.ops)
        channels = routes.shared(graphs, known.places)
        chooser = Chooser(precision, rounding, bits, texts, channels, known, work)
        for part in parts:
            choices |= chooser.choices(part, choices)
    with Store(folder) as store, progress.step(f"Quantising the {first}"):
        for part in parts:
            for ops in part.rounded(precision, kinds):
                _rewrite(part, ops, precision, choices, known, store, folder)
    made = []
    bits_per_weight = 8 * store.file.size / parts[0].model.num_parameters
    for part in parts:
        with progress.step(f"Comparing the {part.role} in {precision}"):
            formats = _formats(part, work) if part is parts[0] else {}
            op_sets = {
                ops: choices | _others(part, ops, known) for ops in part.rounded(precision, kinds)
            }
            measured = reports(part, folder, op_sets, texts, progress, formats)
        described = {
            ops: (replace(quality, bits_per_weight=bits_per_weight), invariant)
            for ops, (quality, invariant) in measured.items()
        }
        for quality, _ in described.values():
            _warn(part.role, precision, quality, progress)
        made.append(part.with_reports(described, precision))
    shutil.rmtree(work)
    shutil.rmtree(before)
    return made, store.file


def _can_answer(model: Written) -> bool:
    """Return True if the whole float graph runs without a float32 copy of a large model."""
    is_float32 = model.original is not None or model.model.weights_dtype == "float32"
    return is_float32 or model.model.num_parameters <= COPIED


def _in_basis(parts: list[Written], work: Path, known: Apart) -> tuple[list[Written], str | None]:
    """Return the models in a basis that suits integers, and why the basis is not rotated, if so.

    Models that do not pass the comparison with their own graphs stay as they are.
    """
    try:
        changed, chosen = basis.write(parts, work, known)
        for own, rotated in zip(parts, changed, strict=True):
            equivalence.check(own, rotated)
    except ParityError as error:
        return parts, f"its weights keep their own basis, because a rotated graph differs ({error})"
    if chosen.reason:
        return changed, f"its residual stream is not rotated, because {chosen.reason}"
    return changed, None


def _formats(model: Written, work: Path) -> dict[str, Runner]:
    """Round a target's weights as formats of llama.cpp do; return the graphs by format."""
    if model.role != "target" or model.model.num_experts:
        return {}
    original, ops = replace(model, folder=model.original or model.folder), model.ops[-1]
    folders = {name: work / name for name in llama_cpp.FORMATS}
    for folder in folders.values():
        folder.mkdir()
    choices = {group.key: llama_cpp.q8_0(group) for group in groups(_opened(original, ops).graph)}
    with Store(folders["Q8_0"]) as store:
        _rewrite(original, ops, "int8-block", choices, NOTHING, store, folders["Q8_0"])
    llama_cpp.write_q4_k(original, ops, folders["Q4_K"])
    return {
        "Q8_0": original.runner(folders["Q8_0"], ops),
        "Q4_K": replace(original, folder=folders["Q4_K"]).decoder_runner(ops),
    }


def _warn(role: str, precision: str, quality: QuantizationReport, progress: Progress) -> None:
    """Note a precision that is less accurate than the format of llama.cpp of its size."""
    name = llama_cpp.CLASSES[precision]
    if name in quality.formats and quality.divergence > quality.formats[name].divergence:
        progress.note(
            f"warning: {role} in {precision} has KL {quality.divergence:.2g}, the same weights as "
            f"{name} {quality.formats[name].divergence:.2g}"
        )


@dataclass(frozen=True)
class Chooser:
    """Chooses how groups are rounded, the same in every op set, by what they read of a text.

    Experts that a MoE node reads are in blocks whatever the precision, others that are one stored
    block of matrices in columns, as is a head whose rows an embedding reads; another head is in
    blocks of 4 bits where that costs little. Integers that GPTQ rounds are kept in `folder`.
    """

    precision: str
    rounding: str
    bits: float
    texts: Texts
    channels: Channels
    apart: Apart
    folder: Path

    def choices(self, model: Written, known: Container[tuple[int, ...]]) -> Choices:
        """Return the choices for a model's groups but those that are known."""
        ops, places = model.ops[0], self.apart.places
        graph = _opened(model, ops, self.apart).graph
        new = {group.key: group for group in groups(graph, places) if group.key not in known}
        layers = {
            one.experts.key: one.experts
            for one in mixtures(graph, self.apart)
            if one.experts.key not in known
        }
        if not new and not layers:
            return {}
        tables = {stored.place for _, stored in embeddings(graph)}
        made: Choices = {key: choosing.as_it_is("it reads a cache") for key in new}
        in_eight_bits = self._in_eight_bits(list(new.values()), model.model)

        def visit(key: tuple[int, ...], x: Seen) -> None:
            if key in layers:
                choice = choosing.of_experts(layers[key], x, BLOCK_BITS.get(self.precision, 8))
                made[key] = _named(choice, layers[key].names)
                return
            group = new[key]
            is_tied = bool(tables & {*key})
            precision = "int8-block" if key in in_eight_bits else self.precision
            choice = _choice(group, x, precision, model.model, is_tied, self.channels.get(key))
            if x.hessian is not None and not is_tied:
                choice = replace(choice, rounded=self._rounded(group, x.hessian, choice))
            made[key] = _named(choice, [matrix.stored.tensor for matrix in group.matrices])

        calibration.visit_inputs(
            model.decoder(ops), model.geometry, ops, self.texts.calibration, visit, self.apart,
            self.rounding == GPTQ, new.keys() | layers.keys(),
        )  # fmt: skip
        return made

    def _in_eight_bits(self, found: list[Group], model: ModelEntry) -> set[tuple[int, ...]]:
        """Return the groups that int4 has in 8 bits: last matrices of MLPs, evenly over the layers.

        As many as leave the weights in layers `bits` on average.
        """
        if self.precision != "int4":
            return set()
        sizes = {
            group.key: sum(matrix.stored.tensor.size for matrix in group.matrices)
            for group in found
            if all(width_of(matrix) != model.padded_vocab_size for matrix in group.matrices)
        }
        last = [group.key for group in found if group.key in sizes and basis.is_bent(group)]
        room = (self.bits - 4) / 4 * sum(sizes.values())
        count = int(min(len(last), room / max(1, max((sizes[key] for key in last), default=1))))
        return {last[i * len(last) // count] for i in range(count)}

    def _rounded(
        self, group: Group, hessian: torch.Tensor, choice: Choice
    ) -> dict[int, Integers | Blocks]:
        """Round a group's matrices by GPTQ where that applies: in columns, or in blocks of 4 bits.

        One after another, as memory maps.
        """
        if choice.num_parts != 1 or choice.bits == 8:
            return {}
        made: dict[int, Integers | Blocks] = {}
        factor = gptq.factor(hessian, choice.powers)
        for matrix in group.matrices:
            weights = matrix.stored.numbers()
            if weights.ndim == 2 and choice.bits:
                blocks = gptq.blocks(weights, factor, choice.bits)
                made[matrix.place] = Blocks(*self._kept(matrix.place, blocks))
            elif weights.ndim == 2:
                columns = gptq.columns(weights, factor, choice.powers)
                made[matrix.place] = Integers(*self._kept(matrix.place, columns))
        return made

    def _kept(self, place: int, integers: Integers | Blocks) -> tuple[np.ndarray, np.ndarray]:
        path = self.folder / f"{place}.npy"
        np.save(path, integers.values)
        return np.load(path, mmap_mode="c"), integers.scales


def _named(choice: Choice, tensors: Sequence[ir.ExternalTensor]) -> Choice:
    return replace(choice, why=choice.why and f"{_names(tensors)}: {choice.why}")


def _others(model: Written, ops: str, known: Apart) -> Choices:
    """What stays as it is because no MatMul reads it as it is stored; one says so for all."""
    found: Choices = {}
    rounded = {place for experts in known.experts for place in experts.key}
    graph = _opened(model, attention_ops(ops), known).graph
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
    x: Seen,
    precision: str,
    model: ModelEntry,
    is_tied: bool,
    channels: np.ndarray | None,
) -> Choice:
    """How a group is rounded that reads x; `channels` say which have one power, if any can."""
    shapes = [matrix.stored.numbers().shape for matrix in group.matrices]
    is_plain = all(len(shape) == 2 for shape in shapes)
    in_layers = is_plain and all(shape[-1] != model.padded_vocab_size for shape in shapes)
    if precision in BLOCK_BITS and in_layers:
        return choosing.in_blocks(group, x, BLOCK_BITS[precision])
    if precision == "int8-block" and is_plain and shapes[0][0] % BLOCK == 0:
        return choosing.in_blocks(group, x, 8)
    if precision == "int4" and not is_tied and len(shapes) == 1 and len(shapes[0]) == 2:
        return choosing.of_head(group, x, channels)
    return choosing.in_columns(group, x, channels, is_tied)


def _opened(model: Written, ops: str, known: Apart = NOTHING) -> ir.Model:
    return opened(model.decoder(ops), known)


def _rewrite(
    model: Written,
    ops: str,
    precision: str,
    choices: Choices,
    known: Apart,
    store: Store,
    folder: Path,
) -> None:
    """Write a model's graphs of an op set, with integers."""
    made = _opened(model, ops, known)
    graph = made.graph
    tables = dict(embeddings(graph))
    found = groups(graph, known.places)
    rounded = {place for g in found if choices[g.key].num_parts for place in g.key}
    powers = {place: choice.powers for key, choice in choices.items() for place in key}
    places = {stored.place: powers.get(stored.place) for stored in tables.values()}
    kind = Dequantiser if is_qdq(ops) else Widener if has_compute_type(ops) else Rewriter
    blocks = {p for g in found if choices[g.key].bits == 8 for p in g.key}
    if precision == "int8-block":
        blocks |= {one.place for one in tables.values() if one.tensor.shape.numpy()[1] % BLOCK == 0}
    rewriter = kind(graph, store, places, blocks & {*places})
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
    rewrites.fuse_sigmoids(made)
    passes.RemoveUnusedNodesPass()(made)
    drop_unused(graph)
    store.adopt(graph)
    model.write(made, folder, ops)
