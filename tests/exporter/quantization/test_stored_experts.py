"""A stored block of experts' matrices, [E, K, N], that one product reads whole."""

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from specedge.exporter.graph.external_data import FILE
from specedge.exporter.quantization import schemes
from specedge.exporter.quantization.calibration import InputStatistics
from specedge.exporter.quantization.integer_rewriter import IntegerRewriter
from specedge.exporter.quantization.matrices import matrix_groups, ungrouped_weights
from specedge.exporter.quantization.weights_writer import WeightsWriter
from specedge.exporter.verification.subgraph import open_session

EXPERTS, K, N, ROWS = 8, 64, 48, 40


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.fixture
def weights(random):
    return random.standard_normal((EXPERTS, K, N), np.float32)


@pytest.fixture
def x(random):
    return random.standard_normal((ROWS, K), np.float32)


PRODUCT = helper.make_node("MatMul", ["x", "w"], ["y"])


def stored(weights, folder, nodes=(PRODUCT,)):
    """Build a model of one matmul, [T, K] -> [E, T, N], with external weights."""
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "experts",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", K])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [EXPERTS, "T", N])],
            [numpy_helper.from_array(weights, "w")],
        ),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    folder.mkdir()
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location=FILE)
    return ir.load(folder / "m.onnx")


def rounded(weights, x, folder):
    """Return the rounding of the product and the rewritten model's output for x."""
    model = stored(weights, folder / "float")
    (group,) = matrix_groups(model.graph)
    choice = schemes.per_channel_scheme(group, InputStatistics.from_values(x))
    (folder / "int8").mkdir()
    with WeightsWriter(folder / "int8") as store:
        IntegerRewriter(model.graph, store, {}).group(group, choice)
        passes.RemoveUnusedNodesPass()(model)
        store.adopt(model.graph)
    ir.save(model, folder / "int8" / "m.onnx")
    session = open_session(folder / "int8" / "m.onnx", ort.SessionOptions())
    return choice, session.run(None, {"x": x})[0]


def error(found, wanted):
    return np.sqrt(np.square(found - wanted).sum() / np.square(wanted).sum())


def test_block_error_is_maximum_over_experts(weights, x, tmp_path):
    """Magnitudes are distinct, so that none hides another; 0, 2, 4 and 6 are measured."""
    weights *= 2.0 ** np.arange(EXPERTS)[:, None, None]
    weights[4, ::5] *= 16
    choice, found = rounded(weights, x, tmp_path)
    own = [error(one, x @ matrix) for one, matrix in zip(found, weights, strict=True)]
    assert max(own) == own[4]
    assert choice.error == pytest.approx(own[4], rel=0.01)
    assert choice.error > 1.1 * own[0] > 0.005
    assert (choice.num_parts, choice.bits) == (1, 0)


def test_block_with_excessive_quantization_error_stays_in_float(weights, x, tmp_path):
    """A channel that dwarfs the others is not split off: the block has one scale a row."""
    x[:, 5] *= 4096
    weights[:, 5] /= 4096
    choice, found = rounded(weights, x, tmp_path)
    assert choice.num_parts == 0
    assert choice.plain_error > schemes.MAX_ERROR
    assert "not quantized, because quantization would cause" in choice.reason
    assert error(found, x @ weights) < 1e-6


@pytest.mark.parametrize(
    ("op_type", "before"), [("MatMul", ["x"]), ("Gemm", ["x"]), ("MoE", ["x", "logits"])]
)
def test_weights_used_by_other_operators_are_reported(weights, tmp_path, op_type, before):
    nodes = (
        helper.make_node("Reshape", ["w", "shape"], ["flat"]),
        helper.make_node(op_type, [*before, "flat"], ["y"]),
    )
    graph = stored(weights, tmp_path / "float", nodes).graph
    assert not matrix_groups(graph)
    assert {op: [t.name for t in found] for op, found in ungrouped_weights(graph).items()} == {
        op_type: ["w"]
    }
