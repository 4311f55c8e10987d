"""Quantized experts: accuracy and batch invariance in each graph variant."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from mixtures import (
    CHOSEN,
    INNER,
    SWIGLU,
    E,
    H,
    Model,
    dense,
    error,
    rewritten,
    run,
    sparse,
)  # fmt: skip
from specedge.exporter.quantization import schemes
from specedge.exporter.quantization.calibration import InputStatistics
from specedge.exporter.quantization.dequantize_rewriter import DequantizeRewriter, QdqRewriter
from specedge.exporter.quantization.experts import find_excluded
from specedge.exporter.quantization.matrices import matrix_groups, split_gemms, ungrouped_weights


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture
def weights(random):
    return {
        "w1": random.standard_normal((E, 2 * INNER, H), np.float32) / 8,
        "b1": random.standard_normal((E, 2 * INNER), np.float32),
        "w2": random.standard_normal((E, H, INNER), np.float32) / 8,
        "b2": random.standard_normal((E, H), np.float32),
    }


@pytest.fixture
def given(random):
    """Rows x [T, H], and the weights of their experts, [T, E]."""
    scores = random.standard_normal((64, E)).astype(np.float32)
    scores[np.arange(64)[:, None], scores.argsort(1)[:, :-CHOSEN]] = -np.inf
    chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    return random.standard_normal((64, H), np.float32), 0.7 * chances


@pytest.mark.parametrize("nodes", [sparse, dense])
@pytest.mark.parametrize(("bits", "least", "most"), [(8, 0.002, 0.02), (4, 0.03, 0.25)])
def test_block_quantized_experts_match_float_within_bounds(
    tmp_path, weights, given, nodes, bits, least, most
):
    session, choice = rewritten(tmp_path, weights, given, nodes, bits)
    wanted = run(Model(tmp_path / "whole", weights, nodes).session(), given)
    off = error(run(session, given), wanted)
    assert least < off < most
    assert choice.bits == bits
    assert least < choice.error < most


@pytest.mark.parametrize("bits", [8, 4])
def test_sparse_and_dense_forms_share_quantized_weights(tmp_path, weights, given, bits):
    found = [rewritten(tmp_path, weights, given, nodes, bits)[0] for nodes in (sparse, dense)]
    first, second = (run(session, given) for session in found)
    assert error(first, second) < 0.012  # x is quantized before and after the expert sum


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_shared", [False, True])
def test_experts_are_batch_invariant(tmp_path, weights, given, bits, is_shared):
    """Of four experts a row, its own or those of all: what one node adds up depends on threads, on
    the other rows and on how many an expert has.
    """
    session, _ = rewritten(tmp_path, weights, given, sparse, bits)
    if is_shared:
        given = given[0], given[1][:1].repeat(len(given[1]), 0)
    whole = run(session, given)
    for length in range(1, 10):
        for start in range(0, 60 - length, length):
            rows = slice(start, start + length)
            assert np.array_equal(run(session, given, rows), whole[rows])


@pytest.mark.parametrize(("nodes", "kind"), [(sparse, DequantizeRewriter), (dense, QdqRewriter)])
@pytest.mark.parametrize("bits", [8, 4])
def test_typed_graph_dequantizes_the_same_integers(tmp_path, weights, given, bits, nodes, kind):
    """Activations are not quantized; engines use DequantizeLinear only."""
    session, _ = rewritten(tmp_path, weights, given, nodes, bits, kind)
    plain, _ = rewritten(tmp_path, weights, given, nodes, bits)
    assert error(run(session, given), run(plain, given)) < 0.015


def test_experts_error_is_maximum_over_experts(tmp_path, weights, given):
    weights["w2"][8, :, ::32] *= 8  # measured are 0, 4, 8 and 12
    _, choice = rewritten(tmp_path, weights, given, sparse)
    x = torch.from_numpy(given[0])
    matrix, bias = (torch.from_numpy(weights[name][8]) for name in ("w1", "b1"))
    inner = SWIGLU(*(x @ matrix[half::2].T + bias[half::2] for half in (0, 1)))
    blocks = schemes.rounding.block_error(torch.from_numpy(weights["w2"][8]).T, inner.numpy(), 8)
    assert blocks > 0.013
    assert choice.error == pytest.approx(blocks)


def test_experts_not_divisible_into_blocks_stay_in_float_with_reason(tmp_path, weights):
    cut = weights | {"w2": np.ascontiguousarray(weights["w2"][..., :80])}
    (experts,) = find_excluded([Model(tmp_path / "float", cut, sparse).graph], E).experts
    choice = schemes.expert_scheme(
        experts, InputStatistics.from_values(np.zeros((4, H), np.float32)), 8
    )
    assert choice.num_parts == 0
    assert "not multiples of 32" in choice.reason


def routers():
    """Build a router, biases of the chosen experts, and keys of the same width."""
    node = helper.make_node
    return [
        node("Gemm", ["x", "r"], ["scores"], transB=1),
        node("Sigmoid", ["scores"], ["open"]),
        node("TopK", ["open", "k"], ["top", "chosen"]),
        node("Cast", ["chosen"], ["wide"], to=TensorProto.FLOAT),
        node("MatMul", ["wide", "b"], ["biases"]),
        node("MatMul", ["x", "keys"], ["key"]),
        node("Softmax", ["key"], ["more"]),
        node("MatMul", ["more", "v"], ["value"]),
        node("Add", ["value", "biases"], ["y"]),
    ]


def test_routers_are_excluded_from_matrix_groups(tmp_path, random):
    shapes = {"r": (E, H), "b": (E, H), "keys": (H, E), "v": (E, H)}
    weights = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    graph = Model(tmp_path / "float", weights, routers).graph
    known = find_excluded([graph], E)
    assert len(known.routers) == 2
    split_gemms(graph, known.offsets)
    found = [m.stored.tensor.name for g in matrix_groups(graph, known.offsets) for m in g.matrices]
    assert found == ["keys", "v"]
    assert not find_excluded([graph], 0).offsets


def test_experts_are_excluded_from_matrix_groups(tmp_path, weights):
    known = find_excluded([Model(tmp_path / "float", weights, sparse).graph], E)
    graph = Model(tmp_path / "float", weights, dense).graph
    split_gemms(graph, known.offsets)
    found = [m.stored.tensor.name for g in matrix_groups(graph, known.offsets) for m in g.matrices]
    assert found == ["b2"]


def gemms(weights):
    node = helper.make_node
    return [
        node("Gemm", ["x", "w"], ["u"], transB=1),
        node("Gemm", ["x", "v", "c"], ["z"], transB=1),
        node("Gemm", ["x", "one"], ["gate"], transB=1),
        node("Sum", ["u", "z", "gate"], ["y"]),
    ]


def test_gemm_matrices_are_grouped_except_single_columns(tmp_path, random):
    weights = {
        "w": random.standard_normal((H, H), np.float32),
        "v": random.standard_normal((H, H), np.float32),
        "c": random.standard_normal(H).astype(np.float32),
        "one": random.standard_normal((1, H), np.float32),
    }

    def nodes():
        return gemms(weights)

    made = Model(tmp_path / "float", weights, nodes)
    x = random.standard_normal((7, H), np.float32), np.zeros((7, E), np.float32)
    wanted = x[0] @ weights["w"].T + x[0] @ weights["v"].T + weights["c"] + x[0] @ weights["one"].T
    split_gemms(made.graph)
    (group,) = matrix_groups(made.graph)
    assert [matrix.stored.tensor.name for matrix in group.matrices] == ["w", "v"]
    assert [node.op_type for node in made.graph].count("Gemm") == 1
    assert not ungrouped_weights(made.graph)
    assert np.allclose(run(made.session(), x), wanted, atol=1e-4)
