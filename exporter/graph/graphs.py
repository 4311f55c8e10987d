"""Graph files of a model: one for any pass length T, and fixed-shape graphs derived from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer

from specedge.bundle.graph_variants import attention_ops, cache_dtype
from specedge.bundle.manifest import (
    ENCODER,
    FUSE,
    OPEN,
    PREFILL_LENGTH,
    GraphEntry,
    ModelEntry,
    signature_name,
)
from specedge.bundle.precision import DTYPE
from specedge.bundle.signature import Signature
from specedge.errors import ExportError

from ..internals import describe_versions
from . import fusion
from .lm_head import remove_logits_from
from .nodes import add_constant, insert_node, producer
from .opset import save_graph
from .repeated_rows import remove_repeated_rows

UNCACHED = (ENCODER, OPEN, FUSE)  # graphs without caches
SOURCE = "source"  # file name, during an export, of a graph before fusion
# Shape arithmetic runs on the CPU, and control flow prevents CUDA graph capture.
FORBIDDEN = {"Shape", "Size", "Range", "NonZero", "If", "Loop"}


@dataclass(frozen=True)
class GraphFile:
    """Graph file of a model.

    Attributes:
        name: Name of the graph.
        length: T of a fixed-shape graph; None for any pass length.
        logits: True if the graph returns logits.
        prefix: Prefix of the file name.
        is_source: True for the graph before fusion, from which other graphs are derived.
    """

    name: str
    length: int | None
    logits: bool = True
    prefix: str = ""
    is_source: bool = False

    def file_name(self, ops: str) -> str:
        """Return the file's name in a graph variant."""
        name = SOURCE if self.is_source and fusion.is_fused(ops) else self.name
        return f"{self.prefix}{name}{'' if ops == 'onnx' else f'-{ops}'}.onnx"

    @property
    def source(self) -> GraphFile:
        """The same graph before fusion."""
        return replace(self, is_source=True)

    def entry(self, folder: str, ops: str) -> GraphEntry:
        """Return the manifest's entry."""
        file = f"{folder}/{self.file_name(ops)}"
        signature = variant_signature(signature_name(self.name), ops)
        return GraphEntry(self.name, ops, self.length, signature, file)


def variant_signature(base: str, ops: str) -> str:
    """Return the name of a signature in a graph variant, with its cache type unless float32."""
    dtype = cache_dtype(ops)
    return base if dtype == DTYPE else f"{base}_{dtype}"


def add_graph(
    model: ModelEntry,
    folder: Path,
    ops: str,
    name: str,
    base: str,
    signature: Signature,
    graph: ir.Model,
) -> ModelEntry:
    """Write a graph that is derived from the decoder next to it, and return the model's new entry.

    `base` is the name of its signature, without a cache type; `folder` is the bundle's.
    """
    file = model.graph("decoder", ops).file.replace("decoder", name)
    save_graph(graph, folder / file)
    key = variant_signature(base, ops)
    return replace(
        model,
        graphs=(*model.graphs, GraphEntry(name, ops, None, key, file)),
        signatures={**model.signatures, key: signature},
    )


def graph_files(num_draft_tokens: int, context_length: int, prefix: str = "") -> list[GraphFile]:
    """Return all graph files of a model; `prefix` separates models that share a folder."""
    files = [
        GraphFile("decoder", None),
        GraphFile("step", 1),
        GraphFile("catchup", 2),
        GraphFile("verify", num_draft_tokens + 1),
        GraphFile("prefill", min(PREFILL_LENGTH, context_length), logits=False),
    ]
    return [replace(file, prefix=prefix) for file in files]


def strip_metadata(model: ir.Model) -> None:
    """Remove metadata from the graph, and name its symbolic dimension T."""
    passes.ClearMetadataAndDocStringPass()(model)
    model.graph.doc_string = None
    model.graph.name = "decoder"
    model.producer_name, model.producer_version = "specedge", None
    model.metadata_props.clear()
    symbol = str(model.graph.inputs[0].shape[1])  # type: ignore[index]
    for value in _values(model.graph):
        value.metadata_props.clear()
        if value.shape is not None:
            dims = [
                d if isinstance(d, int) else _rename_dimension(str(d), symbol) for d in value.shape
            ]
            value.shape = ir.Shape(dims)


def expand_biases(graph: ir.Graph) -> None:
    """Give biases the rank of the values that they are added to. [N] -> [1, 1, N]

    ONNX Runtime fuses MatMul and Add into Gemm if T is fixed and the bias is a vector, which is no
    faster (measured) and not bitwise equal to the graph for any pass length.
    """
    for node in graph:
        if node.op_type != "Add" or not any(producer(x, "MatMul") for x in node.inputs):
            continue
        for value in node.inputs:
            if value is None or not value.is_initializer() or value.const_value is None:
                continue
            if len(value.const_value.shape) == 1 and all(
                user.op_type == "Add" and any(producer(x, "MatMul") for x in user.inputs)
                for user, _ in value.uses()
            ):
                array = value.const_value.numpy()[None, None]
                value.const_value = ir.tensor(array, name=value.name)
                value.shape = value.const_value.shape  # type: ignore[assignment]


def replace_shape_fills(model: ir.Model) -> None:
    """Compute constants of T rows from the input ids, as Shape nodes would run on the CPU.

    Replaces Expand and ConstantOfShape of the shape of a value with one dimension T.
    """
    graph = model.graph
    for node in [n for n in graph if n.op_type == "Shape"]:
        for user, _ in list(node.outputs[0].uses()):
            value, output = _fill_value(user), user.outputs[0]
            shape = node.inputs[0].shape if node.inputs[0] is not None else None
            if value is None or shape is None or output.dtype is None:
                continue
            output.shape = shape
            dims = [d if isinstance(d, int) else 1 for d in shape]
            pattern = [1 if isinstance(d, int) else -1 for d in shape]
            if pattern.count(-1) != 1:
                continue
            rows = _zeros_along(graph, user, pattern, output.dtype)
            fill = np.full(dims, value, output.dtype.numpy())
            filled = [rows, add_constant(graph, fill, f"{output.name}.fill")]
            total = insert_node(user, "Add", filled, f"{output.name}.filled", output)
            output.replace_all_uses_with(total)
    passes.RemoveUnusedNodesPass()(model)


def _fill_value(node: ir.Node) -> float | None:
    """Return the scalar constant that a node fills a shape with, if any."""
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        return float(value.as_tensor().numpy().item()) if value else 0.0
    source = node.inputs[0].const_value if node.op_type == "Expand" and node.inputs[0] else None
    return float(source.numpy().item()) if source is not None and source.size == 1 else None


def _zeros_along(
    graph: ir.Graph, before: ir.Node, pattern: list[int], dtype: ir.DataType
) -> ir.Value:
    """Return T zeros along the dimension that is -1 in `pattern`."""
    name = before.outputs[0].name
    zero = add_constant(graph, np.zeros(1, np.int64), f"{name}.zero")
    dims = add_constant(graph, np.array(pattern, np.int64), f"{name}.dims")
    ids = graph.inputs[0]
    zeros = insert_node(before, "Mul", [ids, zero], f"{name}.zeros", ids)
    rows = insert_node(before, "Reshape", [zeros, dims], f"{name}.rows")
    return insert_node(before, "Cast", [rows], f"{name}.cast", to=dtype)


def isolate_norm_sums(graph: ir.Graph) -> None:
    """Replace Add before a norm by Sum, which ONNX Runtime does not fuse with the norm.

    It fuses Add if the sum has no other reader, which depends on the file, so that logits of
    different files would not be bitwise equal.
    """
    for node in graph:
        add = producer(node.inputs[0], "Add") if node.op_type.endswith("Normalization") else None
        if add is not None and len(add.outputs[0].uses()) == 1:
            add.op_type = "Sum"


def check_devices(model: ir.Model) -> None:
    """Reject nodes that some devices cannot run efficiently. Raises ExportError."""
    for node in model.graph:
        if node.op_type in FORBIDDEN or any(
            a.type == ir.AttributeType.GRAPH for a in node.attributes.values()
        ):
            raise ExportError(
                f"the traced graph has a {node.op_type} node, which cannot run on a GPU "
                f"({describe_versions()})"
            )
        if any(o.dtype == ir.DataType.DOUBLE for o in node.outputs):
            raise ExportError(f"the traced graph has a {node.op_type} node in double precision")


def write_graphs(model: ir.Model, folder: Path, files: list[GraphFile], ops: str) -> None:
    """Write the graph files of a graph variant next to their weights file.

    The graph is fused in place if its variant allows that. Raises ExportError.
    """
    if fusion.is_fused(ops):
        fusion.fuse(model)
    for file in files:
        variant = model.clone() if file.length is None else _fix_length(model, file, ops)
        isolate_norm_sums(variant.graph)
        check_devices(variant)
        save_graph(variant, folder / file.file_name(ops))


def _fix_length(model: ir.Model, file: GraphFile, ops: str) -> ir.Model:
    assert file.length is not None
    model = model.clone()
    graph, length = model.graph, file.length
    remove_logits_from(graph)
    if length > 1 and attention_ops(ops) == "gqa":
        remove_repeated_rows(graph)
    if not file.logits:
        graph.outputs[:] = graph.outputs[1:]
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape([_dimension_at(d, length) for d in value.shape])
    graph.inputs[0].shape = ir.Shape([1, length])
    _fold_positions(graph, length)
    # Nodes over external weights are excluded: folding would copy the weights into the graph.
    onnxscript.optimizer.fold_constants(
        model, onnx_shape_inference=False, should_fold=lambda n: None if _is_small(n) else False
    )
    passes.RemoveUnusedNodesPass()(model)
    strip_metadata(model)
    return model


def _fold_positions(graph: ir.Graph, length: int) -> None:
    """Replace the count 1, 2 ... T along the input, which depends only on T, by a constant.

    It is the first CumSum: `TraceableModel` counts first, and torch 2.13 with onnxscript 0.7.2
    keeps that order.
    """
    count = next((n for n in graph if n.op_type == "CumSum"), None)
    if count is None:
        raise ExportError(
            f"the traced graph does not compute its positions ({describe_versions()})"
        )
    numbers = np.arange(1, length + 1, dtype=np.int64)[None]
    count.outputs[0].replace_all_uses_with(add_constant(graph, numbers, "count"))


def _is_small(node: ir.Node) -> bool:
    return not any(
        isinstance(x.const_value, ir.ExternalTensor) for x in node.inputs if x is not None
    )


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *(value for node in graph for value in node.outputs)]


def _rename_dimension(dim: str, symbol: str) -> str | None:
    """Rename the dimensions T and T + 1, which ONNX Runtime's fusions compare; drop others.

    The spelling of sums is that of torch 2.13 with onnxscript 0.7.2 and onnx-ir 1.0 to 1.1.
    """
    return dim.replace(symbol, "T") if dim in (symbol, f"{symbol} + 1") else None


def _dimension_at(dim: int | ir.SymbolicDim, length: int) -> int | None:
    lengths = {"T": length, "T + 1": length + 1, "R": length}
    return dim if isinstance(dim, int) else lengths.get(str(dim))
