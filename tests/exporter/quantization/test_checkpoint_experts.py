"""Experts that a bundle has as the checkpoint has them."""

import tracemalloc
from itertools import chain

import gguf
import numpy as np
import onnx_ir as ir
import pytest
from gguf import GGMLQuantizationType as Kind

from ggml_rows import random_rows, random_weights
from kept_rows import match_rows
from mixtures import CHOSEN, E, Model, dense, error, run, sparse
from specedge.exporter.checkpoint import ggml_types
from specedge.exporter.checkpoint.quantized_tensors import (
    BlockLayout,
    IntegerBlocks,
    QuantizedTensor,
)
from specedge.exporter.quantization.block_sources import CheckpointMatrix
from specedge.exporter.quantization.checkpoint_experts import ExpertStack, convert
from specedge.exporter.quantization.dequantize_rewriter import DequantizeRewriter
from specedge.exporter.quantization.experts import expert_layers, find_excluded
from specedge.exporter.quantization.integer_rewriter import IntegerRewriter
from specedge.exporter.quantization.kept_schemes import KeptWeights
from specedge.exporter.quantization.weights_writer import WeightsWriter

SIZE = INNER = 256
EXACT = [name for name, layout in ggml_types.LAYOUTS.items() if not layout.has_offsets]
ROUNDED = [name for name, layout in ggml_types.LAYOUTS.items() if layout.has_offsets]
# Types of gate, up and down matrices.
MIXTURES = {
    **{name: (name, name, name) for name in ggml_types.LAYOUTS},
    "Q4_K_M": ("Q4_K", "Q4_K", "Q6_K"),
    "Q2_K and Q3_K": ("Q2_K", "Q2_K", "Q3_K"),
    "4 and 8 bits": ("Q4_0", "Q8_0", "Q4_0"),
    "blocks of 16 and 32": ("Q4_0", "Q4_0", "Q6_K"),
    "zero points and none": ("Q4_1", "Q4_0", "Q8_0"),
}

QUICK = ("Q4_0", "Q4_K_M", "zero points and none")


def packed(name, part, width, size):
    """Return a GGUF's tensor of all experts, whose values are like those of real weights."""
    if name in ("Q4_1", "Q5_1"):
        random = np.random.default_rng([*part.encode()])
        weights = random.normal(0, 0.1, (E * width, size)).astype(np.float32)
        rows = gguf.quants.quantize(weights, Kind[name])
    elif name.endswith(("_K", "_XS")):
        rows = random_weights(name, E * width, size, ord(part[0]))
    else:
        rows = random_rows(name, E * width + ord(part[0]), size)[: E * width]
    return QuantizedTensor(
        f"blk.0.ffn_{part}_exps.weight", name, (E * width, size), rows.nbytes,
        ggml_types.LAYOUTS[name], lambda at: ggml_types.dequantize(rows[at], name),
        lambda at: ggml_types.unpack(rows[at], name),
    )  # fmt: skip


def grouped(part, bits, block_size, expert, width, size, zeros=True, order=None):
    """Return a matrix of one expert in groups, as GPTQ has it."""
    random = np.random.default_rng([*part.encode(), bits, block_size, expert])
    num_blocks, top = size // block_size, 2**bits
    integers = random.integers(0, top, (width, num_blocks, block_size), np.uint8)
    scales = random.uniform(0.5, 1, (width, num_blocks)).astype(np.float32) / top
    points = random.integers(0, top, (width, num_blocks), np.uint8) if zeros else None
    shift = points[..., None] if zeros else top // 2
    whole = ((integers.astype(np.float32) - shift) * scales[..., None]).reshape(width, size)
    return QuantizedTensor(
        f"model.layers.0.mlp.experts.{expert}.{part}_proj", f"int{bits}", (width, size),
        integers.size, BlockLayout(bits, block_size, has_zero_points=zeros), lambda at: whole[at],
        lambda at: IntegerBlocks(integers[at], scales[at], None, points[at] if zeros else None),
        order,
    )  # fmt: skip


def of_types(gate, up, down):
    sizes = ("gate", INNER, SIZE), ("up", INNER, SIZE), ("down", SIZE, INNER)
    tensors = [packed(name, *size) for name, size in zip((gate, up, down), sizes, strict=True)]
    return tensors, stacked(*(t.dequantize(slice(None)) for t in tensors))


def of_groups(bits, block_size, zeros=True, inner_size=INNER):
    parts = ("gate", inner_size, SIZE), ("up", inner_size, SIZE), ("down", SIZE, inner_size)
    tensors = [
        [grouped(part, bits, block_size, e, *shape, zeros) for e in range(E)]
        for part, *shape in parts
    ]
    matrices = [np.concatenate([t.dequantize(slice(None)) for t in some]) for some in tensors]
    return [*chain(*tensors)], stacked(*matrices, inner_size)


def stacked(gate, up, down, inner_size=INNER):
    """Return the matrices as a graph has them."""
    gates, ups = (rows.reshape(E, inner_size, 1, SIZE) for rows in (gate, up))
    random = np.random.default_rng(3)
    return {
        "w1": np.concatenate((gates, ups), 2).reshape(E, 2 * inner_size, SIZE),
        "b1": random.standard_normal((E, 2 * inner_size), np.float32),
        "w2": down.reshape(E, SIZE, inner_size),
        "b2": random.standard_normal((E, SIZE), np.float32),
    }


def dequantized(stack, layout):
    """Return the values of stored matrices, [E, N, K]."""
    matrix, points = stack.blocks(layout)
    values, middle = matrix.values, 2.0 ** (layout.bits - 1)
    points = points if stack.has_zero_points else None
    if layout.bits == 4:
        values = np.stack((values & 15, values >> 4), -1).reshape(*values.shape[:-1], -1)
        points = None if points is None else np.stack((points & 15, points >> 4), -1)
    points = middle if points is None else points.reshape(matrix.scales.shape)[..., None]
    whole = (values.astype(np.float32) - np.float32(points)) * matrix.scales[..., None]
    return whole.reshape(*matrix.scales.shape[:2], -1)


@pytest.fixture
def inputs():
    """Rows x [T, H], and the weights of their experts, [T, E]."""
    random = np.random.default_rng(0)
    scores = random.standard_normal((40, E)).astype(np.float32)
    scores[np.arange(40)[:, None], scores.argsort(1)[:, :-CHOSEN]] = -np.inf
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return random.standard_normal((40, SIZE), np.float32), 0.7 * chances


class Rewritten:
    """Experts of a graph variant, rewritten with those of a checkpoint."""

    def __init__(self, folder, tensors, weights, nodes=sparse, is_float=False):
        folder.mkdir()
        excluded = find_excluded([Model(folder / "float", weights, sparse).graph], E)
        self.model = Model(folder / "float", weights, nodes)
        rows = match_rows(self.model.graph, tensors)
        self.kept = KeptWeights(tensors, rows)
        (layer,) = expert_layers(self.model.graph, excluded)
        scheme = self.kept.select(self.model.graph, excluded)[layer.experts.key]
        self.experts = scheme.experts
        self.model.folder = folder / "kept"
        self.model.folder.mkdir()
        rewriter_class = DequantizeRewriter if is_float else IntegerRewriter
        with WeightsWriter(self.model.folder) as store:
            rewriter = rewriter_class(self.model.graph, store, {})
            rewriter.experts(layer, scheme)
            store.adopt(self.model.graph)
        self.session = self.model.session()

    def stored(self, op_types):
        """Return shapes and types of the stored inputs of these nodes."""
        return [
            [(value.dtype, tuple(value.shape)) for value in node.inputs if value is not None
             and isinstance(value.const_value, ir.ExternalTensor)]
            for node in self.model.graph if node.op_type in op_types
        ]  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_experts_dequantize_to_checkpoint_values(name, tmp_path):
    tensors, weights = of_types(name, name, name)
    experts = Rewritten(tmp_path / "model", tensors, weights).experts
    assert experts.offset_error == 0
    assert np.array_equal(dequantized(experts.stacks[0], experts.layout), weights["w1"])
    assert np.array_equal(dequantized(experts.stacks[1], experts.layout), weights["w2"])


@pytest.mark.parametrize("name", ROUNDED)
def test_offsets_are_rounded_to_a_small_part_of_a_step(name, tmp_path):
    tensors, weights = of_types(name, name, name)
    experts = Rewritten(tmp_path / "model", tensors, weights).experts
    difference = np.abs(dequantized(experts.stacks[1], experts.layout) - weights["w2"])
    blocks = tensors[2].unpack(np.arange(E * SIZE))
    steps = np.abs(blocks.scales).reshape(E, SIZE, -1, 1)
    of_blocks = difference.reshape(*steps.shape[:3], -1)
    assert (of_blocks / np.maximum(steps, 1e-9)).max() <= 1.001 / (2 * 8)
    assert 0 < experts.offset_error < 0.003
    actual = np.linalg.norm(difference) / np.linalg.norm(weights["w2"])
    assert experts.offset_error == pytest.approx(actual, rel=0.2)


@pytest.mark.parametrize("nodes", [sparse, dense])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow(exhaustive=True))
        for name in MIXTURES
    ],
)
def test_expert_layers_match_dequantized_weights(name, nodes, tmp_path, inputs):
    tensors, weights = of_types(*MIXTURES[name])
    rewritten = Rewritten(tmp_path / "int8", tensors, weights, nodes)
    expected = run(Model(tmp_path / "whole", weights, nodes).session(), inputs)
    assert error(run(rewritten.session, inputs), expected) < 0.012  # activations are int8

    session = Rewritten(tmp_path / "float", tensors, weights, nodes, is_float=True).session
    if rewritten.experts.offset_error:
        layout = rewritten.experts.layout
        weights |= {"w1": dequantized(rewritten.experts.stacks[0], layout)}
        weights |= {"w2": dequantized(rewritten.experts.stacks[1], layout)}
        expected = run(Model(tmp_path / "rounded", weights, nodes).session(), inputs)
    assert error(run(session, inputs), expected) < 1e-6


@pytest.mark.parametrize("name", ["Q4_0", "Q3_K", "Q4_K_M", "8 bits, groups of 64"])
def test_experts_are_batch_invariant(name, tmp_path, inputs):
    tensors, weights = of_types(*MIXTURES[name]) if name in MIXTURES else of_groups(8, 64)
    session = Rewritten(tmp_path / "model", tensors, weights).session
    whole = run(session, inputs)
    for length in range(1, 10):
        for start in range(0, 36 - length, length):
            rows = slice(start, start + length)
            assert np.array_equal(run(session, inputs, rows), whole[rows])


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Q4_0", {"Q4_0": 5}),
        ("Q4_K_M", {"Q4_K": 10.5, "Q6_K": 10}),
        ("4 and 8 bits", {"Q4_0": 9, "Q8_0": 9}),
    ],
)
def test_types_report_bits_of_their_layer(name, bits, tmp_path):
    """All matrices of a layer have the most bits and the smallest blocks."""
    tensors, weights = of_types(*MIXTURES[name])
    types = Rewritten(tmp_path / "model", tensors, weights).kept.types()
    assert {name: size.bundle_bits for name, size in types.items()} == bits


def test_modified_experts_stay_in_float(tmp_path):
    tensors, weights = of_types("Q8_0", "Q8_0", "Q8_0")
    weights["w2"][5, 7, 3] += 1e-3
    rewritten = Rewritten(tmp_path / "model", tensors, weights)
    assert rewritten.experts is None
    assert "MoE" in [node.op_type for node in rewritten.model.graph]
    assert {size.bundle_bits for size in rewritten.kept.types().values()} == {32}


def test_zero_scales_and_large_offsets_are_rounded_to_nearest():
    """Cover blocks of equal weights and blocks with scales far smaller than their weights."""
    integers = np.random.default_rng(0).integers(0, 16, (1, 4, 32), np.uint8)
    scales = np.array([[0, 0.01, 1e-5, 0]], np.float32)
    offsets = np.array([[-0.3, 0.02, 0.5, 0]], np.float32)
    blocks = IntegerBlocks(integers, scales, offsets)
    rounded = convert(blocks, BlockLayout(4, 32, has_offsets=True), BlockLayout(8, 32))
    values = (integers - 8.0) * scales[..., None] + offsets[..., None]
    actual = rounded.integers - rounded.zero_points[..., None].astype(float)
    actual = actual * rounded.scales[..., None]
    errors = np.abs(actual - values).max(-1)[0]
    assert np.all(errors <= [1e-7, 0.01 / 16, 0.5 / 254, 0])


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("bits", "block_size"), [(4, 32), (4, 16), (8, 64), (8, 16)])
def test_matrices_of_single_experts_are_kept_exactly(bits, block_size, zeros, tmp_path):
    """Also if a row has an odd number of blocks, which 4-bit zero points do not fit."""
    tensors, weights = of_groups(bits, block_size, zeros, inner_size=3 * max(32, block_size))
    random = np.random.default_rng(0)
    x = random.standard_normal((9, SIZE), np.float32)
    routing = np.eye(E, dtype=np.float32)[:9]
    for nodes in (sparse, dense):
        rewritten = Rewritten(tmp_path / nodes.__name__, tensors, weights, nodes)
        experts = rewritten.experts
        assert experts.layout.bits == bits
        assert np.array_equal(dequantized(experts.stacks[0], experts.layout), weights["w1"])
        assert np.array_equal(dequantized(experts.stacks[1], experts.layout), weights["w2"])
        expected = run(Model(tmp_path / "whole", weights, nodes).session(), (x, routing))
        assert error(run(rewritten.session, (x, routing)), expected) < 0.012  # activations are int8


def test_matrices_are_converted_without_a_float_copy():
    """Peak memory is the stored bytes plus one strip, for any number of experts."""
    num_rows, size = 1024, 1024
    tensor = packed("Q4_K", "gate", num_rows, size)
    experts = np.arange(E * num_rows).reshape(E, 1, num_rows)
    stack = ExpertStack(tuple((CheckpointMatrix(tensor, part),) for (part,) in experts))
    tracemalloc.start()
    matrix, points = stack.blocks(BlockLayout(8, 32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < matrix.values.nbytes + matrix.scales.nbytes + 2 * points.nbytes + 24_000_000
    assert peak < E * num_rows * size * 4 * 0.75
