"""Conversion of float32 graphs to half precision, except where it would overflow."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

from specedge.exporter.graph.half_precision import convert_graph
from specedge.exporter.verification.subgraph import open_session

HALF = ir.DataType.FLOAT16


def narrowed(body, inputs, kind=HALF, opset=24):
    """A graph whose first output is logits, from text."""
    header = f'<ir_version: 10, opset_import: ["": {opset}]>'
    text = f"{header} g ({inputs}) => (float[n] y) {{ {body} }}"
    model = ir.from_onnx_text(text)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    ShapeInferencePass()(model)
    convert_graph(model, kind)
    return model


def run(model, **values):
    session = open_session(ir.to_proto(model).SerializeToString(), onnxruntime.SessionOptions())
    return session.run(None, values)[0]


def kinds(model):
    return [(node.op_type, node.outputs[0].dtype) for node in model.graph]


def test_inputs_have_type_and_logits_are_cast_at_end():
    model = narrowed("one = Constant <value_float = 1.0> ()  y = Add(x, one)", "float[n] x")
    assert model.graph.inputs[0].dtype == HALF
    assert model.graph.outputs[0].name == "y"
    assert model.graph.outputs[0].dtype == ir.DataType.FLOAT
    found = run(model, x=np.arange(4, dtype=np.float16))
    assert found.dtype == np.float32
    assert np.array_equal(found, [1, 2, 3, 4])


def test_position_dependent_values_are_computed_in_float32():
    """The cosine of position 2,049, which float16 does not have."""
    body = "f = Cast <to = 1> (p)  c = Cos(f)  y = Mul(x, c)"
    model = narrowed(body, "float[n] x, int64[n] p")
    assert ("Cos", ir.DataType.FLOAT) in kinds(model)
    found = run(model, x=np.ones(1, np.float16), p=np.array([2049]))
    assert found[0] == pytest.approx(np.cos(2049), abs=1e-3)


@pytest.mark.parametrize("mean", ["ReduceMean", "ReduceSum"])
@pytest.mark.parametrize("square", ["two = Constant <value_float = 2.0> () s = Pow(x, two)",
                                    "s = Mul(x, x)"])  # fmt: skip
def test_overflowing_squares_are_summed_in_float32(square, mean):
    body = f"{square} m = {mean}(s)  r = Sqrt(m)  y = Div(x, r)"
    model = narrowed(body, "float[n] x")
    assert ("Sqrt", ir.DataType.FLOAT) in kinds(model)
    assert ("Div", HALF) in kinds(model)
    length = {"ReduceMean": 2**-0.5, "ReduceSum": 1}[mean] * 500
    expected = np.array([400, 300]) / length
    assert run(model, x=np.array([400, 300], np.float16)) == pytest.approx(expected, 1e-3)


def test_sums_over_blocks_are_multiplied_in_float32():
    """The sum of 32 activations may exceed 65,504."""
    body = """b = Constant <value = int64[2] {2, 32}> ()  a = Constant <value = int64[1] {-1}> ()
              w = Constant <value = float[2, 2] {0.5, 0.25, 0.0, 1.0}> ()
              s = Reshape(x, b)  t = ReduceSum <keepdims = 0> (s, a)  y = MatMul(t, w)"""
    model = narrowed(body, "float[64] x")
    wide = ir.DataType.FLOAT
    assert {("ReduceSum", wide), ("MatMul", wide)} <= {*kinds(model)}
    x = np.repeat([3000, 1], 32).astype(np.float16)
    assert run(model, x=x).tolist() == [48000, 24032]


def test_other_sums_of_activations_are_not_cast():
    """A router's sum of probabilities."""
    model = narrowed("s = ReduceSum(x)  y = Add(s, s)", "float[n] x")
    assert kinds(model) == [("ReduceSum", HALF), ("Add", HALF), ("Cast", ir.DataType.FLOAT)]


@pytest.mark.parametrize("opset", [20, 24])
@pytest.mark.parametrize("body", ["k = Constant <value = int64[1] {2}> ()  v, i = TopK(x, k)",
                                  "s = Reciprocal(x)  v = Log(s)"])  # fmt: skip
def test_operators_without_bfloat16_kernel_stay_in_float32(body, opset):
    """Routers of mixtures of experts, also in graphs that ONNX Runtime 1.23 loads."""
    model = narrowed(f"{body}  y = Mul(v, x)", "float[n] x", ir.DataType.BFLOAT16, opset)
    operators = [(op, kind) for op, kind in kinds(model) if op in ("TopK", "Reciprocal", "Log")]
    assert operators
    assert {kind for _, kind in operators} == {ir.DataType.FLOAT}
    assert ("Mul", ir.DataType.BFLOAT16) in kinds(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_comparisons_without_bfloat16_kernel_stay_in_float32():
    body = "z = Constant <value_float = 0.0> ()  b = Greater(x, z)  y = Where(b, x, z)"
    model = narrowed(body, "float[n] x", ir.DataType.BFLOAT16, 20)
    (greater,) = (node for node in model.graph if node.op_type == "Greater")
    assert [value.dtype for value in greater.inputs] == [ir.DataType.FLOAT] * 2
    assert greater.outputs[0].dtype == ir.DataType.BOOL
    assert ("Where", ir.DataType.BFLOAT16) in kinds(model)


def test_inline_tables_are_converted_instead_of_their_rows():
    body = "t = Constant <value = float[3] {0.5, 1.5, 2.5}> ()  e = Gather(t, ids)  y = Add(e, e)"
    model = narrowed(body, "int64[n] ids")
    wide = ir.DataType.FLOAT
    assert kinds(model) == [("Gather", HALF), ("Add", HALF), ("Cast", wide)]
    assert run(model, ids=np.array([2, 0])).tolist() == [5, 1]


def test_casts_of_external_tables_are_folded_when_a_graph_is_loaded(tmp_path):
    """All readers thus share one table in 16 bits."""
    table = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    (tmp_path / "weights.bin").write_bytes(table.tobytes())
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["": 24]> g (int64[n] ids, float[50, 8] t) => '
        "(float[n, 8] y) { e = Gather(t, ids)  y = Add(e, e) }"
    )
    value = model.graph.inputs.pop()
    value.const_value = ir.ExternalTensor(
        "weights.bin", 0, table.nbytes, ir.DataType.FLOAT,
        shape=ir.Shape(table.shape), name="t", base_dir=tmp_path,
    )  # fmt: skip
    model.graph.register_initializer(value)
    ShapeInferencePass()(model)
    convert_graph(model, HALF)
    assert kinds(model)[:2] == [("Cast", HALF), ("Gather", HALF)]
    ir.save(model, tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    open_session(tmp_path / "model.onnx", options)
    optimized = ir.load(tmp_path / "optimized.onnx").graph
    (gather,) = (node for node in optimized if node.op_type == "Gather")
    assert np.array_equal(gather.inputs[0].const_value.numpy(), table.astype(np.float16))
    shapes = [node.inputs[0].shape for node in optimized if node.op_type == "Cast"]
    assert table.shape not in shapes


def test_constants_stay_finite():
    model = narrowed("low = Constant <value_float = -3.0e38> ()  y = Max(x, low)", "float[n] x")
    assert np.isfinite(run(model, x=np.array([-np.inf], np.float16))).all()


def test_comparison_operands_have_one_type():
    body = "z = Constant <value_float = 0.0> ()  b = Greater(x, z)  y = Where(b, x, z)"
    assert np.array_equal(
        run(narrowed(body, "float[n] x"), x=np.array([-1, 2], np.float16)), [0, 2]
    )
