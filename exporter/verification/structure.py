"""Structure check in float64, where rounding does not hide faults.

Attention nodes are fused kernels in ONNX Runtime, so each is also compared in isolation with the
operator's definition, on the inputs of this pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx

from specedge.errors import ExportError

from ..graph.nodes import GqaInput
from ..libraries import translate_errors
from ..tracing.hidden_states import HIDDEN_STATES, RETURNED
from .exact_graph import ExactGraph, attributes, cast_arrays, inputs_by_name, visible_inputs
from .exact_nodes import Array
from .reference import Reference, chunk_length
from .row_errors import STRUCTURE, ErrorCheck, float32_error_bounds, row_errors
from .runner import Runner
from .subgraph import NOISE, open_session

ORDERS = 8  # summation orders of attention scores, to measure float32 rounding
FUSED = ("Attention", "GroupQueryAttention")


def check_structure(
    role: str,
    runner: Runner,
    parts: Sequence[Reference],
    tolerance: float | None = None,
) -> tuple[float, float]:
    """Compare the decoder with the model, row by row of logits and of every cache.

    Returns:
        The structure's error, and the largest multiple of float32's own error in a fused node, to
        which `tolerance` applies.

    Raises:
        ParityError: The graph differs from the model.
    """
    graph, geometry = ExactGraph(runner.path("decoder"), runner.lazy), runner.geometry
    size = max(map(math.prod, geometry.cache_shapes()))
    noise = NOISE * np.random.default_rng(0).standard_normal(size)
    error_check = ErrorCheck(role, "the PyTorch model's, both in float64,", multiple=STRUCTURE)
    fused = ErrorCheck(role, "the operator's definition", tolerance)
    for part in parts:
        chunk = chunk_length(geometry)
        for at in range(0, len(part.tokens), chunk):
            rows = slice(at, min(at + chunk, len(part.tokens)))
            first, last = not at and part is parts[0], rows.stop == parts[-1].end - part.start
            node_check = (
                NodeCheck(graph, fused, rows.stop - at, once=not first) if first or last else None
            )
            _check_pass(graph, runner, part, rows, error_check, noise, node_check)
    return error_check.row, fused.ratio


def _check_pass(
    graph: ExactGraph,
    runner: Runner,
    part: Reference,
    rows: slice,
    error_check: ErrorCheck,
    noise: Array,
    node_check: NodeCheck | None,
) -> None:
    """Compare one pass over some tokens of a segment, with noise in all later cache rows."""
    at, geometry = rows.start, runner.geometry
    names, shapes = geometry.cache_names(), geometry.cache_shapes()
    constants = {} if runner.source is None else runner.source.inputs(geometry)

    def input_value(name: str) -> Array:
        if name == "input_ids":
            return part.tokens[None, rows].astype(np.int64)
        if name == "past_length":
            return np.array([part.start + at], np.int64)
        if name == "logits_from":
            return np.zeros(1, np.int64)
        if name == HIDDEN_STATES:
            assert runner.fused is not None
            return runner.fused.rows(part.start + at, len(part.tokens[rows])).astype(np.float64)
        if name in constants:
            return constants[name]
        i = names.index(name)
        buffer = noise[: math.prod(shapes[i])].reshape(shapes[i]).copy()
        buffer[0, :, : part.start] = part.history(i)
        buffer[0, :, part.start : part.start + at] = part.caches[i][:, :at]
        return buffer

    first, end = part.start + at, min(part.start + rows.stop, part.end)
    for name, value in graph.run(input_value, node_check or (lambda node, inputs: None)):
        if name in RETURNED:
            layers = geometry.hidden_layers
            part.compare_hidden_states(error_check, "structure", layers, first, value[0])
            continue
        if name == "logits":
            actual, expected, float32 = value[0], part.logits[rows], part.logits_float32[rows]
        else:
            i = names.index(name.replace("present", "past_key_values"))
            actual = value[0][:, first:end]
            expected, float32 = part.caches[i][:, rows], part.caches_float32[i][:, rows]
        error_check.compare("structure", name, actual, expected, float32, first)


class NodeCheck:
    """Check of a graph's fused nodes: float32 in ONNX Runtime against float64.

    The first `length` tokens are compared; further rows of a node are padding. With `once` one node
    of each type and attributes is checked, as in a long context each takes as long as a layer.
    """

    def __init__(self, graph: ExactGraph, error_check: ErrorCheck, length: int, once: bool) -> None:
        self._graph, self._error_check, self._length, self._once = graph, error_check, length, once
        self._checked: set[str] = set()

    def __call__(self, node: onnx.NodeProto, inputs: list[Array | None]) -> None:
        """Check a node with its inputs."""
        key = f"{node.op_type} {attributes(node)}"
        if node.op_type not in FUSED or (self._once and key in self._checked):
            return
        self._checked.add(key)
        arrays = cast_arrays(inputs, np.float64, np.float32)
        cut = visible_inputs(node, arrays)
        exact = self._graph.node(node, cast_arrays(cut, np.float32, np.float64))[0]
        heads = attributes(node).get("num_heads", 1)
        actual, exact = (
            _split_heads(x, heads)[:, : self._length] for x in (_run_node(node, arrays), exact)
        )
        random = np.random.default_rng(0)
        float32_errors = np.zeros(exact.shape[:2])
        for _ in range(ORDERS):
            rounded = self._graph.node(node, _permute_channels(node, cut, random))[0]
            float32_errors = np.maximum(
                float32_errors, row_errors(_split_heads(rounded, heads)[:, : self._length], exact)
            )
        name = f"{node.op_type} {node.name or node.output[0]}"
        self._error_check.compare(
            "fused", name, actual, exact, float32_error_bounds(float32_errors, exact)
        )


def _permute_channels(
    node: onnx.NodeProto, inputs: list[Array | None], random: np.random.Generator
) -> list[Array | None]:
    """Permute the channels of queries and keys, and so the summation order of scores.

    The rounding error of a score depends on the order of large channels. Channels that rotary
    embedding pairs stay half of the rotated channels apart.
    """
    options, grouped = attributes(node), node.op_type == "GroupQueryAttention"
    keys = inputs[GqaInput.PAST_KEY if grouped else 1]
    assert keys is not None
    size = keys.shape[-1]
    order = random.permutation(size)
    tables: tuple[GqaInput, ...] = ()
    if options.get("do_rotary"):
        tables = (GqaInput.COS_CACHE, GqaInput.SIN_CACHE)
        cosines = inputs[GqaInput.COS_CACHE]
        assert cosines is not None
        width = cosines.shape[-1]
        half, rest = random.permutation(width), random.permutation(size - 2 * width)
        order = np.concatenate((half, half + width, rest + 2 * width))
    reordered = list(inputs)
    for i in (0, 1, GqaInput.PAST_KEY) if grouped else (0, 1):
        if (x := inputs[i]) is not None:
            heads = x.reshape(*x.shape[:-1], -1, size).copy()
            rotated = heads.shape[-2]
            if i == 0 and grouped and inputs[1] is None:  # values follow, which are not permuted
                rotated -= options["kv_num_heads"]
            heads[..., :rotated, :] = heads[..., :rotated, order]
            reordered[i] = heads.reshape(x.shape)
    for i in tables:
        table = inputs[i]
        assert table is not None
        reordered[i] = np.ascontiguousarray(table[:, order[: table.shape[-1]]])
    return reordered


def _split_heads(output: Array, heads: int) -> Array:
    """Split the output by head. [1, T, H D] or [1, H, T, D] -> [H, T, D]"""
    if output.ndim == 4:
        return output[0]
    return output[0].reshape(len(output[0]), heads, -1).transpose(1, 0, 2)


def _run_node(node: onnx.NodeProto, inputs: list[Array | None]) -> Array:
    """Return the first output of a single node in ONNX Runtime."""
    feeds = inputs_by_name(node, inputs)
    values = [
        onnx.helper.make_tensor_value_info(
            n, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape
        )
        for n, x in feeds.items()
    ]
    float_type = onnx.TensorProto.FLOAT
    results = [onnx.helper.make_tensor_value_info(n, float_type, None) for n in node.output if n]
    graph = onnx.helper.make_graph([node], "alone", values, results)
    opsets = [onnx.helper.make_opsetid("", 24), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with translate_errors(ExportError, f"ONNX Runtime cannot run {node.op_type}: "):
        session = open_session(model.SerializeToString())
        return np.asarray(session.run([node.output[0]], feeds)[0])
