"""Sigmoids are computed to float32's precision where ONNX Runtime's own are not."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from specedge.exporter.graph import rewrites
from specedge.exporter.verification.subgraph import open_session

FORMULAS = {
    "x * sigmoid(x)": ("s = Sigmoid(x)  y = Mul(x, s)", lambda x: x / (1 + np.exp(-x))),
    "sigmoid(x) * x": ("s = Sigmoid(x)  y = Mul(s, x)", lambda x: x / (1 + np.exp(-x))),
    "sigmoid(x)": ("y = Sigmoid(x)", lambda x: 1 / (1 + np.exp(-x))),
    "a sigmoid with two users": (
        "s = Sigmoid(x)  p = Mul(x, s)  y = Add(p, s)",
        lambda x: (x + 1) / (1 + np.exp(-x)),
    ),
}


def model(body):
    text = f'<ir_version: 10, opset_import: ["": 20]> g (float[n] x) => (float[n] y) {{ {body} }}'
    return ir.from_onnx_text(text)


@pytest.mark.parametrize("name", FORMULAS)
def test_sigmoid_is_accurate_for_large_negative_inputs(name):
    body, formula = FORMULAS[name]
    changed = model(body)
    rewrites.expand_sigmoids(changed)
    session = open_session(ir.to_proto(changed).SerializeToString(), onnxruntime.SessionOptions())
    x = np.linspace(-80, 80, 2003, dtype=np.float32)
    exact = formula(x.astype(np.float64))
    (found,) = session.run(None, {"x": x})
    near = np.abs(found - exact) <= 1e-6 * np.abs(exact)
    assert near[np.abs(x + 1) > 0.1].all()  # x + 1 is next to nothing there


def test_sigmoid_of_overflowing_exponential_is_zero():
    changed = model(FORMULAS["x * sigmoid(x)"][0])
    rewrites.expand_sigmoids(changed)
    session = open_session(ir.to_proto(changed).SerializeToString(), onnxruntime.SessionOptions())
    (found,) = session.run(None, {"x": np.array([-1e4, -200, 200], np.float32)})
    assert found.tolist() == [0, 0, 200]


def test_sigmoid_expansion_and_fusion_round_trip():
    changed = model(FORMULAS["sigmoid(x)"][0])
    rewrites.expand_sigmoids(changed)
    assert [node.op_type for node in changed.graph] == ["Neg", "Exp", "Add", "Reciprocal"]
    rewrites.fuse_sigmoids(changed)
    assert [node.op_type for node in changed.graph] == ["Sigmoid"]
