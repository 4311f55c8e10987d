"""Change of basis of float graphs, in which quantization is more accurate.

The residual stream is rotated (QuaRot, Ashkboos et al. 2024) if only RMS norms read it and only
matrices and embeddings write it: norm gains are folded into the following matrices, and the
rotation into matrices, embeddings and biases, at no cost at run time. The input of a down
projection follows a nonlinearity and gets an online block-diagonal Hadamard transform, whose
inverse is folded into the matrix, and so do the inputs of matrices after other RMS norms. A tied
embedding after such a norm is stored in the transformed basis, and lookups are transformed back.
Hidden states that passes return are transformed back as well, as draft models apply norms to them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from specedge.errors import ParityError

from ..checkpoint.lazy_tensors import LazyTensor
from ..graph.external_data import TORCH_TYPES, WeightsFile, WeightTensor
from ..graph.nodes import (
    GraphBuilder,
    add_constant,
    hidden_states_node,
    insert_node,
    operand,
    producer,
)
from ..verification import runner
from ..verification.runner import Action, FillNoise, PassAction, ReadHiddenStates, ReadRows
from . import rotation
from .experts import ExcludedWeights
from .float_model import FloatModel
from .graph_editor import NodeEditor
from .matrices import (
    NORMS,
    Matrix,
    MatrixGroup,
    StoredTensor,
    constant_vector,
    embeddings,
    matrix_groups,
    stored_tensor,
    stored_values,
    tensor_data,
)
from .rotation import Rotation

RMS_NORM = "RMSNormalization"
MIN_HADAMARD_SIZE = 16  # channels; smaller Hadamard matrices hardly reduce outliers
_STRIP_SIZE = 1 << 19  # elements that are rotated at a time, to stay in the CPU's cache
_NUM_CHECKED_TOKENS = 24  # tokens of the comparison of a rotated model
_NUM_CHECKED_ROWS = 64  # rows of a matrix that are rotated back to verify it
_MAX_ERROR_RATIO = 32.0  # error of a rotated graph relative to float32's own
_MAX_ROTATION_ERROR = 1e-6  # relative to a matrix's largest value; above float32 rounding
_ROW_OPS = ("Cast", "Reshape", "Slice")  # operators that may keep the channels of each row
# Matrices after these operators and products need no online transform.
_ROTATABLE_INPUTS = ("Attention", "GroupQueryAttention", *NORMS)


class NotRotatableError(Exception):
    """Reason why a graph's residual stream cannot be rotated."""


@dataclass
class ResidualStream:
    """Nodes that read and write a graph's residual stream."""

    norms: set[ir.Node] = field(default_factory=set)
    writers: set[ir.Node] = field(default_factory=set)
    tables: set[ir.Node] = field(default_factory=set)
    biases: set[tuple[ir.Node, int]] = field(default_factory=set)


@dataclass
class RotationEditor(NodeEditor):
    """Editor of a graph in another basis, whose weights go to `file`."""

    file: WeightsFile

    def computed(
        self,
        key: Hashable,
        stored: StoredTensor,
        compute: Callable[[], torch.Tensor],
        name: str,
    ) -> ir.Value:
        """Return the initializer of a changed tensor, in float32 with the original's shape."""
        like = torch.empty(tuple(stored.tensor.shape), device="meta")
        return self.external(self.file.add(key, LazyTensor(like, compute), torch.float32, name))


@dataclass(frozen=True)
class MatrixChange:
    """Change of one stored matrix.

    Attributes:
        gain: Norm gain that is folded into it, [K], as bytes.
        input: True if its input is the rotated residual stream.
        block: Size of the Hadamard matrices applied to its input, 0 for none.
        output: True if its output is added to the rotated residual stream.
    """

    gain: bytes | None
    input: bool
    block: int
    output: bool


@dataclass(frozen=True)
class ChannelTransforms:
    """ChannelTransforms that all graphs of a model share.

    Attributes:
        rotation: Rotation of the residual stream; None if it cannot be rotated.
        reason: Reason why it cannot be rotated.
        tied_blocks: Hadamard block size of tied embeddings by offset, without a rotation.
    """

    rotation: Rotation | None
    reason: str = ""
    tied_blocks: Mapping[int, int] = field(default_factory=dict)


def choose_transforms(graphs: Iterable[ir.Graph], excluded: Set[int]) -> ChannelTransforms:
    """Return the basis of graphs that share their weights: rotated if all can be rotated."""
    size, graphs = 0, list(graphs)
    try:
        for graph in graphs:
            residual_stream(graph, excluded)
            _, table = next(embeddings(graph))
            size = int(table.tensor.shape.numpy()[1])
    except NotRotatableError as error:
        tied_blocks: dict[int, int] = {}
        for graph in graphs:
            tied_blocks |= _tied_blocks(graph, excluded)
        return ChannelTransforms(None, str(error), tied_blocks)
    return ChannelTransforms(Rotation(size))


def write_models(
    parts: Sequence[FloatModel], folder: Path, excluded: ExcludedWeights
) -> tuple[list[FloatModel], ChannelTransforms]:
    """Write the decoders of models that share their weights in a new basis.

    Changed weights of large models are computed when they are read, which raises ParityError if
    transforming a changed matrix back does not restore it.
    """
    decoders = [(part, ops) for part in parts for ops in part.ops]
    graphs = (part.load(ops, excluded).graph for part, ops in decoders)
    transforms = choose_transforms(graphs, excluded.offsets)
    lazy = dict[int, WeightTensor]()
    with WeightsFile(folder, "float32", lazy) as file:
        for part, ops in decoders:
            model = part.load(ops, excluded)
            transform_graph(model, transforms, excluded.offsets, file)
            ir.save(model, folder / part.decoder(ops).name)
        file.finish(is_sparse=file.size > runner.WHOLE_BYTES)
    return [replace(part, folder=folder, original=part, lazy=lazy) for part in parts], transforms


def equivalence_actions(model: FloatModel) -> list[Action]:
    """Return the actions whose results `check_outputs` compares: a pass, and its cache rows."""
    tokens = np.random.default_rng(0).integers(0, model.model.vocab_size, _NUM_CHECKED_TOKENS)
    tokens = tokens[: model.model.context_length]
    noise = FillNoise(0, model.geometry.capacity)
    hidden = [] if model.model.hidden is None else [ReadHiddenStates()]
    return [noise, PassAction("decoder", tokens, 0), ReadRows(0, len(tokens)), *hidden]


def check_outputs(model: FloatModel, ops: str, results: Sequence[Any]) -> None:
    """Compare a model with its original in float32, with the error of the original as bound.

    Args:
        model: Model in another basis.
        ops: Graph variant.
        results: Those of its `equivalence_actions`.

    Raises:
        ParityError: The models differ.
    """
    assert model.original is not None
    report = model.model.parity[ops]
    limit = _MAX_ERROR_RATIO * max(report.float32_logits_error, report.float32_cache_error)
    original = model.original.decoder_runner(ops).run(equivalence_actions(model))
    num_layers = len(model.geometry.hidden_layers)
    outputs, expected_outputs = (
        (logits, *rows, *(layer for x in hidden for layer in np.split(x, num_layers, -1)))
        for _, logits, rows, *hidden in (results, original)
    )
    names = [name.replace("past_key_values", "present") for name in model.geometry.cache_names()]
    names += ["hidden states"] * num_layers
    pairs = zip(outputs, expected_outputs, strict=True)
    for name, (values, expected) in zip(("logits", *names), pairs, strict=True):
        error = np.abs(values - expected).max() / max(1e-30, np.abs(expected).max())
        if not error <= limit:
            raise ParityError(
                f"{model.role}: {name} differs from the original by {error:.1e} of its largest "
                f"value, the limit is {limit:.1e}"
            )


def residual_stream(graph: ir.Graph, excluded: Set[int]) -> ResidualStream:
    """Return the readers and writers of the residual stream.

    Raises:
        NotRotatableError: The stream cannot be rotated.
    """
    stream_nodes = ResidualStream()
    foldable = folded_norms(graph, excluded)
    products = {
        matrix.node for group in matrix_groups(graph, excluded) for matrix in group.matrices
    }
    tables, join = [node for node, _ in embeddings(graph)], hidden_states_node(graph)
    if len(tables) != 1:
        raise NotRotatableError(f"it has {len(tables)} embeddings")
    stream = {tables[0].outputs[0]}
    stream_nodes.tables.add(tables[0])
    pending = [tables[0].outputs[0]]
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            raise NotRotatableError("the residual stream is an output")
        for node, index in value.uses():
            if node is join:
                continue
            if node.op_type == RMS_NORM and index == 0:
                if node not in foldable:
                    raise NotRotatableError(
                        "a norm of the residual stream is also read by other nodes"
                    )
                stream_nodes.norms.add(node)
                continue
            if node.op_type in ("Add", "Sum"):
                for other in node.inputs:
                    if other is not None and other not in stream:
                        _add_writer(other, node, products, stream_nodes)
            elif not _keeps_channels(node, index):
                raise NotRotatableError(f"{node.op_type} reads the residual stream")
            if node.outputs[0] not in stream:
                stream.add(node.outputs[0])
                pending.append(node.outputs[0])
    for value in () if join is None else filter(None, join.inputs):
        if value not in stream and value.producer() not in stream_nodes.norms:
            raise NotRotatableError("a hidden state is not that of the residual stream")
    return stream_nodes


def _add_writer(
    value: ir.Value, reader: ir.Node, products: set[ir.Node], stream_nodes: ResidualStream
) -> None:
    """Record the nodes whose output is added to the residual stream."""
    if any(user is not reader for user, _ in value.uses()):
        raise NotRotatableError("a summand of the residual stream is also read by other nodes")
    node = value.producer()
    if node is None:
        raise NotRotatableError("a constant is added to the residual stream")
    if node in products:
        stream_nodes.writers.add(node)
    elif node.op_type == "Add":
        for index, term in enumerate(node.inputs):
            if constant_vector(term) is not None:
                stream_nodes.biases.add((node, index))
            elif term is not None:
                _add_writer(term, node, products, stream_nodes)
    elif _keeps_channels(node, 0) and node.inputs[0] is not None:
        _add_writer(node.inputs[0], node, products, stream_nodes)
    elif node.op_type == "Mul" and _is_scalar(node.inputs[0]) and node.inputs[1] is not None:
        _add_writer(node.inputs[1], node, products, stream_nodes)
    else:
        writer = "a norm" if node.op_type == RMS_NORM else node.op_type
        raise NotRotatableError(f"{writer} writes to the residual stream")


def _tied_blocks(graph: ir.Graph, excluded: Set[int]) -> dict[int, int]:
    """Return the Hadamard block size of each tied embedding after an RMS norm, by offset."""
    tables = {stored.offset for _, stored in embeddings(graph)}
    return {
        group.key[0]: block
        for group in matrix_groups(graph, excluded)
        if len(group.key) == 1 and group.key[0] in tables and producer(group.value, RMS_NORM)
        if (block := hadamard_size(group))
    }


def _keeps_channels(node: ir.Node, index: int) -> bool:
    """Return True if a node keeps the channels of its input `index`, or scales them uniformly."""
    if node.op_type in ("Mul", "Div"):
        return len(node.inputs) == 2 and _is_scalar(node.inputs[1 - index])
    before, after = node.inputs[0], node.outputs[0]
    if node.op_type not in _ROW_OPS or index or before is None or not before.shape:
        return False
    return bool(after.shape) and before.shape[-1] == after.shape[-1]


def _is_scalar(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None and value.const_value.size == 1


def folded_norms(graph: ir.Graph, excluded: Set[int]) -> dict[ir.Node, MatrixGroup]:
    """Return the RMS norms whose gain can be folded into all their readers, with the readers.

    Hidden states that passes return have the gain in any case.
    """
    foldable: dict[ir.Node, MatrixGroup] = {}
    join = hidden_states_node(graph)
    for group in matrix_groups(graph, excluded):
        norm, users = _norm_before(group.value), {user for user, _ in group.value.uses()}
        if norm is not None and (rows := norm.outputs[0]) is not group.value:
            users |= {user for user, _ in rows.uses()} - {group.value.producer()}
        users.discard(join)
        if (
            norm is not None
            and users == {matrix.node for matrix in group.matrices}
            and all(len(matrix.stored.order) == 2 for matrix in group.matrices)
            and constant_vector(norm.inputs[1]) is not None
        ):
            foldable[norm] = group
    return foldable


def _norm_before(value: ir.Value) -> ir.Node | None:
    """Return the RMS norm that computes a value, or the rows of which it has some."""
    rows = producer(value, "Slice")
    is_selection = rows is not None and _keeps_channels(rows, 0)
    return producer(operand(rows, 0) if rows is not None and is_selection else value, RMS_NORM)


def transform_graph(
    model: ir.Model, transforms: ChannelTransforms, excluded: Set[int], file: WeightsFile
) -> None:
    """Rewrite a float graph in a basis; its weights go to `file`."""
    graph = model.graph
    foldable = folded_norms(graph, excluded)
    stream = (
        residual_stream(graph, excluded) if transforms.rotation is not None else ResidualStream()
    )
    editor = RotationEditor(graph, file)
    gains: dict[ir.Value, np.ndarray] = {}
    for group in matrix_groups(graph, excluded):
        norm = _norm_before(group.value)
        is_rotated, block = norm in stream.norms, 0
        gain: np.ndarray | None = None
        if norm is not None and is_rotated:
            gain = constant_vector(norm.inputs[1])
            assert gain is not None
            gains[norm.outputs[0]] = gain
            ones = add_constant(graph, np.ones_like(gain), f"{norm.outputs[0].name}.ones")
            norm.replace_input_with(1, ones)
        if group.key[0] in transforms.tied_blocks:
            _mix_tied_head(editor, group, transforms)
            continue
        # Other norms keep their gain, which reduces the outlier channels of Gemma.
        if not is_rotated and (norm in foldable or reads_nonlinearity(group)):
            block = hadamard_size(group)
            if block:
                _mix_input(editor, group, block)
        for matrix in group.matrices:
            is_writer = matrix.node in stream.writers
            if gain is not None or block or is_writer:
                gain_bytes = None if gain is None else gain.tobytes()
                _replace_matrix(
                    editor,
                    matrix,
                    MatrixChange(gain_bytes, is_rotated, block, is_writer),
                    transforms,
                )
    _restore_lookups(editor, transforms)
    if transforms.rotation is not None:
        _rotate_tables_and_biases(editor, stream, transforms.rotation)
        _restore_hidden_states(graph, transforms.rotation, gains)
    passes.RemoveUnusedNodesPass()(model)
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) != file.folder:
            key = ("unchanged", tensor.offset, tuple(tensor.shape))
            data, dtype = stored_values(tensor), TORCH_TYPES[tensor.dtype.value]
            value.const_value = file.add(key, data, dtype, tensor.name or "")


def reads_nonlinearity(group: MatrixGroup) -> bool:
    """Return True if a group reads a nonlinearity, and not a norm, attention or a product.

    Hadamard transforms and shape operators in between are ignored.
    """
    value: ir.Value | None = group.value
    node = value.producer() if value is not None else None
    while node is not None and (
        node.op_type in (*_ROW_OPS, "Transpose")
        or (node.op_type == "MatMul" and stored_tensor(node.inputs[1]) is None)
    ):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is not None and node.op_type not in (*_ROTATABLE_INPUTS, "MatMul")


def hadamard_size(group: MatrixGroup) -> int:
    """Return the size of the Hadamard matrices for a group's input, 0 for none."""
    shape = group.matrices[0].stored.shape
    size = min(rotation.HADAMARD_SIZE, shape[-2] & -shape[-2])
    is_plain = all(len(matrix.stored.order) == 2 for matrix in group.matrices)
    return size if is_plain and size >= MIN_HADAMARD_SIZE else 0


def _mix_input(editor: RotationEditor, group: MatrixGroup, block: int) -> None:
    """Multiply each block of channels of a group's input by a Hadamard matrix."""
    mixed = _insert_hadamard(editor, group.value, block)
    for matrix in group.matrices:
        matrix.node.replace_input_with(0, mixed)


def _mix_tied_head(
    editor: RotationEditor, group: MatrixGroup, transforms: ChannelTransforms
) -> None:
    """Multiply an LM head's input by Hadamard matrices, and let it read the changed table."""
    _mix_input(editor, group, hadamard_size(group))
    for matrix in group.matrices:
        table = _mixed_table(editor, matrix.stored, transforms)
        name = f"{matrix.node.outputs[0].name}.table"
        turned = insert_node(matrix.node, "Transpose", [table], name, perm=[1, 0])
        turned.dtype = ir.DataType.FLOAT
        matrix.node.replace_input_with(1, turned)


def _restore_lookups(editor: RotationEditor, transforms: ChannelTransforms) -> None:
    """Redirect lookups to transformed tables, and transform the rows back."""
    for node, stored in list(embeddings(editor.graph)):
        if stored.offset not in transforms.tied_blocks:
            continue
        node.replace_input_with(0, _mixed_table(editor, stored, transforms))
        output = node.outputs[0]
        output.dtype, users = ir.DataType.FLOAT, list(output.uses())
        restored = _insert_hadamard(editor, output, transforms.tied_blocks[stored.offset])
        for user, index in users:
            user.replace_input_with(index, restored)


def _restore_hidden_states(
    graph: ir.Graph, rotation_: Rotation, gains: Mapping[ir.Value, np.ndarray]
) -> None:
    """Rotate returned hidden states back, and multiply those of norms by the gains of `gains`.

    Factors of the rotation take 22 us for 5 tokens and 3 * 576 channels, 155 us for 3 * 4096.
    """
    node = hidden_states_node(graph)
    if node is None:
        return
    (joined,) = node.outputs
    assert joined.shape is not None
    nodes, value, inner = GraphBuilder("hidden.restored", graph), joined, rotation_.size
    for factor in rotation_.factors:
        matrix, size = factor.float().numpy(), len(factor)
        inner //= size
        if inner > 1:
            value = nodes("MatMul", matrix, nodes("Reshape", value, [-1, size, inner]))
        else:
            value = nodes("MatMul", nodes("Reshape", value, [-1, size]), matrix)
    signs, ones = rotation_.signs.float().numpy(), np.ones(rotation_.size, np.float32)
    scales = [signs * gains.get(x, ones) for x in node.inputs if x is not None]
    shape = [1, -1, rotation_.size * len(scales)]
    restored = nodes("Mul", nodes("Reshape", value, shape), np.concatenate(scales))
    restored.name, joined.name = joined.name, f"{joined.name}.rotated"
    restored.shape, restored.dtype = joined.shape, joined.dtype
    graph.outputs[graph.outputs.index(joined)] = restored


def _mixed_table(
    editor: RotationEditor, stored: StoredTensor, transforms: ChannelTransforms
) -> ir.Value:
    apply = partial(rotation.apply_hadamard, block=transforms.tied_blocks[stored.offset])
    rows = partial(_change_table, stored, apply, undo=apply)
    return editor.computed(("mixed", stored.offset), stored, rows, f"{stored.tensor.name}.mixed")


def _insert_hadamard(editor: RotationEditor, value: ir.Value, block: int) -> ir.Value:
    """Insert a block-diagonal Hadamard transform of a value before all readers."""
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
    return reshaped(mixed, whole, name)


def _replace_matrix(
    editor: RotationEditor, matrix: Matrix, change: MatrixChange, transforms: ChannelTransforms
) -> None:
    """Replace the matrix of a product by its changed form."""
    stored = matrix.stored
    key = ("matrix", stored.offset, stored.order, change)
    name = f"{stored.tensor.name}.matrix"
    value = editor.computed(key, stored, partial(change_matrix, stored, change, transforms), name)
    if stored.order != (0, 1):
        value = insert_node(matrix.node, "Transpose", [value], f"{name}.turned", perm=[1, 0])
        value.dtype = ir.DataType.FLOAT
    matrix.node.replace_input_with(1, value)


def _rotate_tables_and_biases(
    editor: RotationEditor, stream: ResidualStream, rotation_: Rotation
) -> None:
    """Rotate embeddings, and biases that are added to the residual stream."""
    for node, stored in embeddings(editor.graph):
        key, name = ("table", stored.offset), f"{stored.tensor.name}.table"
        rows = partial(_change_table, stored, rotation_.apply, rotation_.undo)
        node.replace_input_with(0, editor.computed(key, stored, rows, name))
        node.outputs[0].dtype = ir.DataType.FLOAT
    for node, index in stream.biases:
        bias = node.inputs[index]
        array = constant_vector(bias)
        assert array is not None
        assert bias is not None
        turned = rotation_.apply(torch.from_numpy(array).reshape(-1)).numpy()
        name = f"{node.outputs[0].name}.bias{index}"
        node.replace_input_with(
            index, add_constant(editor.graph, turned.reshape(array.shape), name)
        )


def _change_table(
    table: StoredTensor,
    apply: Callable[[torch.Tensor], torch.Tensor],
    undo: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return a table with transformed rows. Raises ParityError if `undo` does not restore them."""
    rows = tensor_data(table.tensor)
    changed = torch.empty(rows.shape)
    for at in _row_strips(rows):
        changed[at] = apply(rows[at].float())
    some = _sampled_rows(changed)
    _check_inverse(undo(changed[some].double()), rows[some].double(), table)
    return changed


def change_matrix(
    stored: StoredTensor, change: MatrixChange, transforms: ChannelTransforms
) -> torch.Tensor:
    """Return a changed matrix in its stored layout, computed in float32.

    Raises:
        ParityError: The inverse change, in float64, does not restore it.
    """
    columns = stored.data().T  # [N, K]
    gain: float | torch.Tensor = 1.0
    if change.gain is not None:
        gain = torch.from_numpy(np.frombuffer(change.gain, np.float32).copy())
    whole = torch.empty(columns.shape)
    for at in _row_strips(columns):
        whole[at] = _transform_input(columns[at].float() * gain, change, transforms)
    some = _sampled_rows(whole)
    restored = _transform_input(whole[some].double(), change, transforms, undo=True)
    _check_inverse(restored, columns[some].double() * gain, stored)
    if change.output:
        assert transforms.rotation is not None
        some = _sampled_rows(whole.T)
        before = whole[:, some].double()
        for at in _row_strips(whole.T):
            whole[:, at] = transforms.rotation.apply(whole[:, at], axis=0)
        restored = transforms.rotation.undo(whole[:, some].double(), axis=0)
        _check_inverse(restored, before, stored)
    return (whole.T if stored.order == (0, 1) else whole).contiguous()


def _transform_input(
    rows: torch.Tensor, change: MatrixChange, transforms: ChannelTransforms, undo: bool = False
) -> torch.Tensor:
    """Transform the columns of a matrix, given as rows, to the basis of its input, or back."""
    if change.input:
        assert transforms.rotation is not None
        return transforms.rotation.undo(rows) if undo else transforms.rotation.apply(rows)
    return rotation.apply_hadamard(rows, change.block) if change.block else rows


def _sampled_rows(rows: torch.Tensor) -> slice:
    """Return a slice of evenly spaced rows, on which a change is verified."""
    return slice(None, None, max(1, len(rows) // _NUM_CHECKED_ROWS))


def _check_inverse(back: torch.Tensor, exact: torch.Tensor, stored: StoredTensor) -> None:
    """Verify in float64 that the inverse change restores a matrix."""
    error = float((back - exact).abs().max()) / max(1e-30, float(exact.abs().max()))
    if not error <= _MAX_ROTATION_ERROR:
        raise ParityError(
            f"{stored.tensor.name}: after rotation and inverse rotation, it differs by "
            f"{error:.1e} of its largest value, the limit is {_MAX_ROTATION_ERROR:g}"
        )


def _row_strips(rows: torch.Tensor) -> list[slice]:
    height = max(1, _STRIP_SIZE // rows.shape[1])
    return [slice(at, at + height) for at in range(0, len(rows), height)]
