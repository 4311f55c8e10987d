"""Float graphs in a basis in which rounding costs less; they compute the same function.

Where every matrix reads the residual stream through an RMS norm, and only matrices and tables write
to it, the stream is rotated (QuaRot, Ashkboos et al. 2024): norm gains are folded into the matrices
behind them, and the rotation into matrices, tables and biases. That costs no node. What an MLP's
last matrix reads lies behind a nonlinearity: it is rotated in the graph, by a Hadamard matrix for
every block of channels, and back by the matrix. Elsewhere matrices behind RMS norms have such
blocks, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from specedge.errors import ParityError

from ..graph.nodes import add_constant, insert_node, producer
from ..graph.weights import drop_unused
from . import rotation
from .editing import Editor
from .experts import Apart, opened
from .matrices import NORMS, Group, Matrix, Stored, contents, embeddings, groups, stored_in, vector
from .rotation import Rotation
from .storing import Store
from .written import Written

NORM = "RMSNormalization"
PROPERTY = "specedge.rotation"  # of a decoder: size and seed of its residual stream's rotation
SMALLEST_BLOCK = 16  # channels; smaller Hadamard matrices spread little
_STRIP = 1 << 19  # numbers that are rotated at a time: what stays in a cache
_CHECKED = 64  # rows of a matrix that are rotated back to verify it
_BACK = 1e-6  # of a matrix's largest value: what rounding to float32 may cost
_ROWS = ("Cast", "Reshape", "Slice")  # what the residual stream goes through, row by row
_FREE = ("Attention", "GroupQueryAttention", *NORMS)  # behind them matrices can be rotated freely


class NotRotatableError(Exception):
    """A graph whose residual stream has no free basis, and why."""


@dataclass
class Residual:
    """Readers and writers of a graph's residual stream."""

    norms: set[ir.Node] = field(default_factory=set)
    writers: set[ir.Node] = field(default_factory=set)
    tables: set[ir.Node] = field(default_factory=set)
    biases: set[tuple[ir.Node, int]] = field(default_factory=set)


@dataclass(frozen=True)
class Change:
    """Change of one stored matrix: the gain of its input [K] as bytes, whether its input or output
    is the rotated residual stream, and the size of the Hadamard matrices on its input, 0 for none.
    """

    gain: bytes | None
    input: bool
    block: int
    output: bool


@dataclass(frozen=True)
class Basis:
    """Basis that all graphs of a model have in common; `reason` says why it is not rotated."""

    rotation: Rotation | None
    reason: str = ""


def choose(graphs: Iterable[ir.Graph], apart: Set[int]) -> Basis:
    """Return the basis for graphs that share their weights: rotated if each of them can be."""
    size = 0
    try:
        for graph in graphs:
            residual_stream(graph, apart)
            _, table = next(embeddings(graph))
            size = int(table.tensor.shape.numpy()[1])
    except NotRotatableError as error:
        return Basis(None, str(error))
    return Basis(Rotation(size))


def write(parts: Sequence[Written], folder: Path, apart: Apart) -> tuple[list[Written], Basis]:
    """Write the decoders of models that share their weights in a basis, to a folder of their own.

    Raises ParityError where a matrix is not the same matrix in another basis.
    """
    decoders = [(part, ops) for part in parts for ops in part.ops]
    graphs = (opened(part.decoder(ops), apart).graph for part, ops in decoders)
    basis = choose(graphs, apart.places)
    with Store(folder) as store:
        for part, ops in decoders:
            model = opened(part.decoder(ops), apart)
            change(model, basis, apart.places, store)
            ir.save(model, folder / part.decoder(ops).name)
    return [replace(part, folder=folder, original=part.folder) for part in parts], basis


def residual_stream(graph: ir.Graph, apart: Set[int]) -> Residual:
    """Return who reads and writes the residual stream. Raises NotRotatableError."""
    found = Residual()
    foldable = folded_norms(graph, apart)
    products = {matrix.node for group in groups(graph, apart) for matrix in group.matrices}
    tables = [node for node, _ in embeddings(graph)]
    if len(tables) != 1:
        raise NotRotatableError(f"it has {len(tables)} embeddings")
    stream = {tables[0].outputs[0]}
    found.tables.add(tables[0])
    waiting = [tables[0].outputs[0]]
    while waiting:
        value = waiting.pop()
        if value.is_graph_output():
            raise NotRotatableError("the residual stream is an output")
        for node, index in value.uses():
            if node.op_type == NORM and index == 0:
                if node not in foldable:
                    raise NotRotatableError("a norm of the residual stream has other readers")
                found.norms.add(node)
                continue
            if node.op_type in ("Add", "Sum"):
                for other in node.inputs:
                    if other is not None and other not in stream:
                        _written(other, node, products, found)
            elif not _passes(node, index):
                raise NotRotatableError(f"{node.op_type} reads the residual stream")
            if node.outputs[0] not in stream:
                stream.add(node.outputs[0])
                waiting.append(node.outputs[0])
    return found


def _written(value: ir.Value, reader: ir.Node, products: set[ir.Node], found: Residual) -> None:
    """Note what makes a value that is added to the residual stream. Raises NotRotatableError."""
    if any(user is not reader for user, _ in value.uses()):
        raise NotRotatableError("what is added to the residual stream has other readers")
    node = value.producer()
    if node is None:
        raise NotRotatableError("a constant is added to the residual stream")
    if node in products:
        found.writers.add(node)
    elif node.op_type == "Add":
        for index, term in enumerate(node.inputs):
            if vector(term) is not None:
                found.biases.add((node, index))
            elif term is not None:
                _written(term, node, products, found)
    elif _passes(node, 0) and node.inputs[0] is not None:
        _written(node.inputs[0], node, products, found)
    elif node.op_type == "Mul" and _is_scalar(node.inputs[0]) and node.inputs[1] is not None:
        _written(node.inputs[1], node, products, found)
    else:
        kind = "a norm" if node.op_type == NORM else node.op_type
        raise NotRotatableError(f"{kind} writes to the residual stream")


def _passes(node: ir.Node, index: int) -> bool:
    """Return True if a node keeps or scales all channels of its input `index` alike."""
    if node.op_type in ("Mul", "Div"):
        return len(node.inputs) == 2 and _is_scalar(node.inputs[1 - index])
    before, after = node.inputs[0], node.outputs[0]
    if node.op_type not in _ROWS or index or before is None or not before.shape:
        return False
    return bool(after.shape) and before.shape[-1] == after.shape[-1]


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and value.const_value.size == 1


def folded_norms(graph: ir.Graph, apart: Set[int]) -> dict[ir.Node, Group]:
    """Return the RMS norms whose gain can be folded into all that read them, and these."""
    found = {}
    for group in groups(graph, apart):
        norm = producer(group.value, NORM)
        users = {user for user, _ in group.value.uses()}
        if (
            norm is not None
            and users == {matrix.node for matrix in group.matrices}
            and all(len(matrix.stored.order) == 2 for matrix in group.matrices)
            and vector(norm.inputs[1]) is not None
        ):
            found[norm] = group
    return found


def change(model: ir.Model, basis: Basis, apart: Set[int], store: Store) -> None:
    """Rewrite a float graph in a basis; what this changes of its weights goes to `store`."""
    graph = model.graph
    foldable = folded_norms(graph, apart)
    stream = residual_stream(graph, apart) if basis.rotation is not None else Residual()
    tables = {stored.place: node for node, stored in embeddings(graph)}
    editor = Editor(graph, store)
    for group in groups(graph, apart):
        norm = producer(group.value, NORM)
        is_tied = any(matrix.place in tables for matrix in group.matrices)
        gain: np.ndarray | None = None
        if norm is not None and norm in foldable and (norm in stream.norms or not is_tied):
            gain = vector(norm.inputs[1])
            assert gain is not None
            ones = add_constant(graph, np.ones_like(gain), f"{norm.outputs[0].name}.ones")
            norm.replace_input_with(1, ones)
        is_rotated, block = norm in stream.norms, 0
        if not is_rotated and (gain is not None or is_bent(group)):
            block = block_of(group)
            if block:
                _insert_blocks(editor, group, block)
        for matrix in group.matrices:
            is_writer = matrix.node in stream.writers
            if gain is not None or block or is_writer:
                known = None if gain is None else gain.tobytes()
                _replace(editor, matrix, Change(known, is_rotated, block, is_writer), basis)
    if basis.rotation is not None:
        _rotate_others(editor, stream, basis.rotation)
        # Drafters that read hidden states need the model's own basis.
        model.metadata_props[PROPERTY] = json.dumps(asdict(basis.rotation))
    passes.RemoveUnusedNodesPass()(model)
    drop_unused(graph)
    store.adopt(graph)


def is_bent(group: Group) -> bool:
    """Return True if a group reads what a nonlinearity makes: not a norm, attention or a product.

    Hadamard matrices and shapes on the way count as nothing.
    """
    value: ir.Value | None = group.value
    node = value.producer() if value is not None else None
    while node is not None and (
        node.op_type in (*_ROWS, "Transpose")
        or (node.op_type == "MatMul" and stored_in(node.inputs[1]) is None)
    ):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is not None and node.op_type not in (*_FREE, "MatMul")


def block_of(group: Group) -> int:
    """Return the size of the Hadamard matrices for a group's input, 0 for none."""
    shape = group.matrices[0].stored.numbers().shape
    size = min(rotation.BLOCK, shape[-2] & -shape[-2])
    is_plain = all(len(matrix.stored.order) == 2 for matrix in group.matrices)
    return size if is_plain and size >= SMALLEST_BLOCK else 0


def _insert_blocks(editor: Editor, group: Group, block: int) -> None:
    """Multiply every block of channels of a group's input with a Hadamard matrix."""
    value = group.value
    assert value.shape is not None
    size, name = int(value.shape[-1]), f"{value.name}.hadamard"  # type: ignore[call-overload]
    channels, whole = [1, -1, size // block, block], [1, -1, size]
    matrix = editor.constant(f"hadamard{block}", rotation.hadamard(block).float().numpy())
    users = {user for user, _ in value.uses()}
    before = next(node for node in editor.graph if node in users)

    def reshaped(x: ir.Value, dims: list[int], label: str) -> ir.Value:
        shape = editor.constant("x".join(map(str, dims)), np.array(dims, np.int64))
        output = editor.node(before, "Reshape", [x, shape], label, value)
        output.shape = ir.Shape([*value.shape[:-1], *dims[2:]])
        return output

    blocks = reshaped(value, channels, f"{name}.channels")
    mixed = editor.node(before, "MatMul", [blocks, matrix], f"{name}.mixed", blocks)
    mixed = reshaped(mixed, whole, name)
    for one in group.matrices:
        one.node.replace_input_with(0, mixed)


def _replace(editor: Editor, matrix: Matrix, change: Change, basis: Basis) -> None:
    """Let a product read its changed matrix."""
    stored = matrix.stored
    key = ("matrix", stored.place, stored.order, change)
    name = f"{stored.tensor.name}.matrix"
    tensor = editor.store.floats(key, lambda: changed(stored, change, basis), name)
    value = editor.external(tensor)
    if stored.order != (0, 1):
        value = insert_node(matrix.node, "Transpose", [value], f"{name}.turned", perm=[1, 0])
        value.dtype = ir.DataType.FLOAT
    matrix.node.replace_input_with(1, value)


def _rotate_others(editor: Editor, stream: Residual, rotation_: Rotation) -> None:
    """Rotate the tables and biases that are added to the residual stream."""
    for node, stored in embeddings(editor.graph):
        key, name = ("table", stored.place), f"{stored.tensor.name}.table"
        rows = partial(_rotated_rows, stored, rotation_)
        tensor = editor.store.floats(key, rows, name)
        node.replace_input_with(0, editor.external(tensor))
        node.outputs[0].dtype = ir.DataType.FLOAT
    for node, index in stream.biases:
        bias = node.inputs[index]
        array = vector(bias)
        assert array is not None
        assert bias is not None
        turned = rotation_.apply(torch.from_numpy(array).reshape(-1)).float().numpy()
        name = f"{node.outputs[0].name}.bias{index}"
        node.replace_input_with(
            index, add_constant(editor.graph, turned.reshape(array.shape), name)
        )


def _rotated_rows(table: Stored, rotation_: Rotation) -> np.ndarray:
    rows = contents(table.tensor)
    turned = torch.empty(rows.shape)
    for at in _strips(rows):
        turned[at] = rotation_.apply(rows[at])
    some = _some(turned)
    _check_back(rotation_.undo(turned[some]), rows[some].double(), table)
    return turned.numpy()


def changed(stored: Stored, change: Change, basis: Basis) -> np.ndarray:
    """Return a changed matrix in the axes that it is stored in. Raises ParityError."""
    columns = stored.numbers().T  # [N, K]
    gain = (
        1.0
        if change.gain is None
        else torch.from_numpy(np.frombuffer(change.gain, np.float32).copy())
    )
    whole = torch.empty(columns.shape, dtype=torch.float64 if change.output else torch.float32)
    for at in _strips(columns):
        whole[at] = _of_input(columns[at].double() * gain, change, basis)
    some = _some(whole)
    exact = columns[some].double() * gain
    _check_back(_of_input(whole[some], change, basis, undo=True), exact, stored)
    if change.output:
        assert basis.rotation is not None
        before, whole = whole.T, torch.empty(columns.shape)
        for at in _strips(before):
            whole.T[at] = basis.rotation.apply(before[at])
        some = _some(before)
        _check_back(basis.rotation.undo(whole.T[some]), before[some], stored)
    return (whole.T if stored.order == (0, 1) else whole).contiguous().numpy()


def _of_input(rows: torch.Tensor, change: Change, basis: Basis, undo: bool = False) -> torch.Tensor:
    """Return the columns of a matrix, as rows, in the basis of its input, or back."""
    if change.input:
        assert basis.rotation is not None
        return basis.rotation.undo(rows) if undo else basis.rotation.apply(rows)
    return rotation.in_blocks(rows, change.block) if change.block else rows.double()


def _some(rows: torch.Tensor) -> slice:
    """Rows that are evenly apart, by which a change is verified."""
    return slice(None, None, max(1, len(rows) // _CHECKED))


def _check_back(back: torch.Tensor, exact: torch.Tensor, stored: Stored) -> None:
    """Verify in float64 that a changed matrix is the matrix in another basis."""
    error = float((back - exact).abs().max()) / max(1e-30, float(exact.abs().max()))
    if not error <= _BACK:
        raise ParityError(
            f"{stored.tensor.name}: rotated and rotated back it is off by {error:.1e} of its "
            f"largest value, allowed are {_BACK:g}"
        )


def _strips(rows: torch.Tensor) -> list[slice]:
    height = max(1, _STRIP // rows.shape[1])
    return [slice(at, at + height) for at in range(0, len(rows), height)]
