"""Quantized weights that a bundle has exactly as the checkpoint has them."""

import gguf
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from onnx import TensorProto, helper

from ggml_rows import random_rows, random_weights
from kept_rows import match_rows
from specedge.exporter.checkpoint import ggml_types
from specedge.exporter.checkpoint.lazy_tensors import LazyTensor, as_lazy, lazy_rows
from specedge.exporter.checkpoint.quantized_rows import find_rows
from specedge.exporter.checkpoint.quantized_tensors import (
    BlockLayout,
    IntegerBlocks,
    QuantizedTensor,
)
from specedge.exporter.graph.half_precision import convert_graph
from specedge.exporter.quantization import rounding
from specedge.exporter.quantization.block_sources import CheckpointMatrix, find_matrix
from specedge.exporter.quantization.dequantize_rewriter import DequantizeRewriter
from specedge.exporter.quantization.experts import NO_EXCLUSIONS
from specedge.exporter.quantization.integer_rewriter import IntegerRewriter
from specedge.exporter.quantization.kept_schemes import KeptWeights
from specedge.exporter.quantization.matrices import embeddings, matrix_groups
from specedge.exporter.quantization.weights_writer import WeightsWriter
from specedge.exporter.verification.subgraph import open_session

K, N, V = 256, 24, 40


def quantized(name, num_rows=N, label="", size=K):
    return packed_tensor(name, random_rows(name, num_rows, size), f"{name}{label}", size)


def packed_tensor(name, rows, label, size=K):
    return QuantizedTensor(
        label,
        name,
        (len(rows), size),
        rows.nbytes,
        ggml_types.LAYOUTS.get(name),
        lambda at: gguf.quants.dequantize(rows[at], Kind[name]),
        lambda at: ggml_types.unpack(rows[at], name),
    )


def grouped(bits, block_size, num_rows=N, order=None, zeros=True, size=K):
    """A matrix with zero points, whose blocks may have their inputs in another order."""
    random = np.random.default_rng([bits, block_size, num_rows])
    num_blocks, top = size // block_size, 2**bits
    integers = random.integers(0, top, (num_rows, num_blocks, block_size), np.uint8)
    scales = random.uniform(0.01, 0.02, (num_rows, num_blocks)).astype(np.float32)
    points = random.integers(0, top, (num_rows, num_blocks), np.uint8) if zeros else None
    shift = points[..., None] if zeros else top // 2
    ordered = ((integers.astype(np.float32) - shift) * scales[..., None]).reshape(num_rows, size)
    whole = np.empty_like(ordered)
    whole[:, slice(None) if order is None else order] = ordered
    return QuantizedTensor(
        f"int{bits} in {block_size}", f"int{bits}", (num_rows, size), integers.size,
        BlockLayout(bits, block_size, has_zero_points=zeros), lambda at: whole[at],
        lambda at: IntegerBlocks(integers[at], scales[at], None, points[at] if zeros else None),
        order,
    )  # fmt: skip


def values(tensor):
    return tensor.dequantize(slice(None))


def write_float(folder, table, matrices, last=None):
    """Write ids [1, T] -> rows of a table -> a product with each matrix [N, K], and the table's.

    The first product is multiplied by `last`, [N', N].
    """
    folder.mkdir()
    tensors = {"table": values(table)}
    tensors |= {f"w{i}": np.ascontiguousarray(w.T) for i, w in enumerate(matrices)}
    if last is not None:
        tensors["last"] = np.ascontiguousarray(last.T)
    initializers, offset = [], 0
    with (folder / "weights.bin").open("wb") as file:
        for name, array in tensors.items():
            file.write(array.tobytes())
            proto = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=array.shape)
            proto.data_location = TensorProto.EXTERNAL
            where = {"location": "weights.bin", "offset": offset, "length": array.nbytes}
            for key, value in where.items():
                proto.external_data.add(key=key, value=str(value))
            initializers.append(proto)
            offset += array.nbytes
    outputs = [*(f"y{i}" for i in range(len(matrices))), "logits"]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("Transpose", ["table"], ["head"], perm=[1, 0]),
        *(helper.make_node("MatMul", ["x", f"w{i}"], [f"y{i}"]) for i in range(len(matrices))),
        helper.make_node("MatMul", ["x", "head"], ["logits"]),
    ]
    tensor = helper.make_tensor_value_info
    widths = [*(len(w) for w in matrices), V]
    if last is not None:
        nodes.append(helper.make_node("MatMul", ["y0", "last"], ["z"]))
        outputs, widths = [*outputs, "z"], [*widths, len(last)]
    graph = helper.make_graph(
        nodes,
        "decoder",
        [tensor("ids", TensorProto.INT64, [1, "T"])],
        [
            tensor(name, TensorProto.FLOAT, [1, "T", width])
            for name, width in zip(outputs, widths, strict=True)
        ],
        initializers,
        value_info=[tensor("x", TensorProto.FLOAT, [1, "T", table.shape[1]])],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    path = folder / "decoder.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def rewrite(path, folder, tensors, is_float=True):
    """Return the rewritten model, in a folder of its own, and what was kept."""
    folder.mkdir()
    model = ir.load(path)
    kept = KeptWeights(tensors, match_rows(model.graph, tensors))
    schemes = kept.select(model.graph, NO_EXCLUSIONS)
    tables = dict(embeddings(model.graph))
    rewriter_class = DequantizeRewriter if is_float else IntegerRewriter
    with WeightsWriter(folder) as store:
        rewriter = rewriter_class(model.graph, store, {}, (), kept.tables(model.graph))
        for group in matrix_groups(model.graph):
            rewriter.group(group, schemes[group.key])
        for node, stored in tables.items():
            rewriter.embedding(node, stored)
        from onnx_ir.passes.common import RemoveUnusedNodesPass

        RemoveUnusedNodesPass()(model)
        store.adopt(model.graph)
    ir.save(model, folder / "decoder.onnx")
    return model, kept


def run(folder, ids):
    session = open_session(folder / "decoder.onnx", ort.SessionOptions())
    return session.run(None, {"ids": np.array([ids])})


def assert_outputs_agree(folder, tolerance):
    """Compare the kept model with the float one, for one and for several tokens."""
    for ids in ([3], [5, 0, 39, 17]):
        exact = run(folder / "float", ids)
        for actual, expected in zip(run(folder / "kept", ids), exact, strict=True):
            assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("name", ggml_types.LAYOUTS)
def test_matmuls_and_lookups_match_dequantized_weights(name, tmp_path):
    table, matrices = quantized(name, V), [quantized(name, N), quantized("Q8_0", 16)]
    path = write_float(tmp_path / "float", table, list(map(values, matrices)))
    model, _ = rewrite(path, tmp_path / "kept", [table, *matrices])
    ops = [node.op_type for node in model.graph]
    assert "Gather" not in ops or ggml_types.LAYOUTS[name].has_offsets
    layouts = {ggml_types.LAYOUTS[name], ggml_types.LAYOUTS["Q8_0"]}
    assert ops.count("MatMulNBits") == len(layouts)
    assert_outputs_agree(tmp_path, 3e-6)


@pytest.mark.parametrize("name", ["Q4_1", "Q2_K", "Q4_K"])
@pytest.mark.parametrize("massive", [(1, -1), (2622, -1573)])
def test_offsets_in_float16_are_as_accurate_as_weights(massive, name, tmp_path):
    """Compare with float64, also with two massive activations like those of LLaMA2-7B.

    The CPU computes in float32 and rounds the result; CUDA also rounds both terms.
    """
    rows = np.random.default_rng(0).standard_normal((V, K)).astype(np.float32)
    rows[:, [5, 99]] = massive
    packed = gguf.quants.quantize(rows, Kind.Q8_0)
    table = packed_tensor("Q8_0", packed, "table")
    matrix = packed_tensor(name, random_weights(name, N, K, 0), "matrix")
    path = write_float(tmp_path / "float", table, [values(matrix)])
    model, _ = rewrite(path, tmp_path / "kept", [table, matrix])
    convert_graph(model, ir.DataType.FLOAT16)
    ir.save(model, tmp_path / "kept" / "decoder.onnx")
    wide = [node.op_type for node in model.graph if node.outputs[0].dtype == ir.DataType.FLOAT]
    assert wide.count("ReduceSum") == wide.count("MatMul") == 1
    ids = np.arange(V)
    x = values(table).astype(np.float16).astype(np.float64)
    expected = x @ values(matrix).astype(np.float64).T
    error = run(tmp_path / "kept", ids)[0][0].astype(np.float64) - expected
    # Scales and results have 11 bits.
    assert np.sqrt(np.mean(error**2)) <= 2**-11 * np.sqrt(np.mean(expected**2))


def test_products_of_one_input_have_offsets_of_different_block_sizes(tmp_path):
    """In Q2_K files, queries and values of a layer have blocks of 16 and 32."""
    table, wide = quantized("Q4_K", V), quantized("Q2_K", 2 * K)
    narrow, last = quantized("Q4_K", N, " narrow"), quantized("Q4_K", 16, " last", 2 * K)
    tensors = [table, wide, narrow, last]
    matrices = values(wide), values(narrow)
    path = write_float(tmp_path / "float", table, matrices, values(last))
    rewrite(path, tmp_path / "kept", tensors)
    assert_outputs_agree(tmp_path, 3e-6)


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_and_lookups_with_zero_points(bits, block_size, zeros, tmp_path):
    table, *matrices = (grouped(bits, block_size, n, None, zeros) for n in (V, N, 16))
    path = write_float(tmp_path / "float", table, list(map(values, matrices)))
    model, _ = rewrite(path, tmp_path / "kept", [table, *matrices])
    ops = [node.op_type for node in model.graph]
    assert ops == ["GatherBlockQuantized", "MatMulNBits", "Split"]
    assert_outputs_agree(tmp_path, 3e-6)


@pytest.mark.parametrize("num_blocks", [3, 5])
def test_4_bit_zero_points_of_an_odd_number_of_blocks(num_blocks, tmp_path):
    table, *matrices = (grouped(4, 32, n, size=32 * num_blocks) for n in (V, N, 16))
    path = write_float(tmp_path / "float", table, list(map(values, matrices)))
    model, _ = rewrite(path, tmp_path / "kept", [table, *matrices])
    ops = [node.op_type for node in model.graph]
    assert ops == ["GatherBlockQuantized", "MatMulNBits", "Split"]
    assert_outputs_agree(tmp_path, 3e-6)


def with_zero_points():
    return [grouped(bits, 32, n) for bits, n in ((8, V), (4, N), (8, 16))]


def of_type(name):
    return [quantized("Q8_0", V), quantized(name)]


@pytest.mark.parametrize(
    "tensors",
    [with_zero_points(), *map(of_type, ggml_types.LAYOUTS)],
    ids=["zero points", *ggml_types.LAYOUTS],
)
def test_int8_activations_cause_small_errors(tensors, tmp_path):
    table, *matrices = tensors
    path = write_float(tmp_path / "float", table, list(map(values, matrices)))
    rewrite(path, tmp_path / "kept", tensors, is_float=False)
    assert_outputs_agree(tmp_path, 2e-2)


def test_products_whose_inputs_are_reordered_share_one_gather(tmp_path):
    orders = [np.random.default_rng(seed).permutation(K) for seed in (0, 0, 1)]
    table = grouped(4, 32, V)
    matrices = [grouped(4, 32, n, order) for n, order in zip((N, 16, 8), orders, strict=True)]
    path = write_float(tmp_path / "float", table, list(map(values, matrices)))
    model, _ = rewrite(path, tmp_path / "kept", [table, *matrices])
    ops = [node.op_type for node in model.graph]
    assert (ops.count("MatMulNBits"), ops.count("Gather"), ops.count("MatMul")) == (3, 2, 0)
    assert_outputs_agree(tmp_path, 3e-6)


@pytest.mark.parametrize("name", ggml_types.LAYOUTS)
def test_kept_blocks_dequantize_to_the_checkpoints_values(name):
    tensor = quantized(name, V)
    kept = CheckpointMatrix(tensor, np.arange(V))
    whole = rounding.dequantize(kept.blocks(), kept.layout.bits).numpy().T
    if not kept.layout.has_offsets:
        assert np.array_equal(whole, values(tensor))
        return
    blocks = tensor.unpack(kept.rows)
    if kept.layout.has_zero_points:
        shifts = (2.0 ** (kept.layout.bits - 1) - blocks.zero_points) * blocks.scales
        whole = whole + np.repeat(shifts, kept.layout.block_size, 1)
    whole = whole + np.repeat(kept.offsets(), kept.layout.block_size, 1)
    largest = 32 * np.repeat(np.abs(blocks.scales), kept.layout.block_size, 1)
    assert np.all(np.abs(whole - values(tensor)) <= 2.0**-22 * (largest + np.abs(whole)))


def test_reordered_rows_and_tensor_slices_are_recognized():
    tensor = quantized("Q4_0", V)
    rows = np.random.default_rng(1).permutation(V)[:N]
    matrix = lazy_rows(tensor).index_select(0, torch.from_numpy(rows)).T
    kept = find_matrix(find_rows(matrix))
    assert kept.tensor is tensor
    assert kept.rows.tolist() == rows.tolist()
    assert torch.equal(find_rows(matrix).lazy().read(), matrix.read())


def test_rows_of_several_tensors_are_recognized():
    tensors = [quantized("Q4_0", 2 * N), quantized("Q8_0", 2 * N)]
    gate, up = (lazy_rows(tensor, (2, N, K)) for tensor in tensors)
    experts = torch.stack((gate, up), 2).reshape(2, 2 * N, K)
    rows = find_rows(experts)
    assert torch.equal(rows.lazy().read(), experts.read())
    assert find_matrix(rows, (1, slice(1, None, 2))).rows.tolist() == [*range(N, 2 * N)]
    assert find_matrix(rows, (1, slice(4))) is None


@pytest.mark.parametrize(
    "compute",
    [
        lambda matrix: matrix.flip(1),
        lambda matrix: matrix[:, 1:],
        lambda matrix: matrix + 1,
        lambda matrix: LazyTensor(matrix, matrix.read),
        lambda matrix: torch.cat((matrix, as_lazy(torch.zeros(1, K)))),
        lambda matrix: matrix.reshape(-1, 2 * K),
    ],
)
def test_other_values_are_no_rows(compute):
    assert find_rows(compute(lazy_rows(quantized("Q4_0", N)))) is None


def test_modified_matrix_stays_in_float(tmp_path):
    table, first = quantized("Q8_0", V), quantized("Q4_0", N)
    second = quantized("Q4_0", 16, " of another")
    changed = values(first).copy()
    changed[7, 3] += 1e-3
    path = write_float(tmp_path / "float", table, [changed, values(second)])
    model, kept = rewrite(path, tmp_path / "kept", [table, first, second])
    assert sum(node.op_type == "MatMul" for node in model.graph) == 1
    assert {n: t.bundle_bits for n, t in kept.types().items()} == {
        "Q4_0": pytest.approx((24 * 32 + 16 * 5) / 40), "Q8_0": 9,
    }  # fmt: skip
    exact, actual = run(tmp_path / "float", [1, 2]), run(tmp_path / "kept", [1, 2])
    for a, b in zip(actual, exact, strict=True):
        assert np.allclose(a, b, rtol=1e-5, atol=1e-5)


def test_types_report_bits_in_file_and_bundle(tmp_path):
    tensors = [quantized("Q4_K", V), quantized("Q6_K", N)]
    path = write_float(tmp_path / "float", tensors[0], [values(tensors[1])])
    _, kept = rewrite(path, tmp_path / "kept", tensors)
    sizes = {name: (t.num_weights, t.file_bits, t.bundle_bits) for name, t in kept.types().items()}
    assert sizes == {"Q4_K": (V * K, 4.5, 6.0), "Q6_K": (N * K, 6.5625, 10.0)}
