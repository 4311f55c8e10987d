"""Constants that ONNX Runtime computes when it loads a graph, of any size."""

import json

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper

from specedge.exporter.verification import subgraph
from specedge.runtime.backend.sessions import Device

NUM_ROWS, WIDTH = 264_000, 1024  # more than 1 GiB in float32


def open_for_verification(path):
    return subgraph.open_session(path, onnxruntime.SessionOptions())


def write_product(path, num_rows, width):
    """Write y = x W, with zeros in bfloat16 that the graph casts to float32. [K, N]"""
    weights = path.with_name("weights.bin")
    with weights.open("wb") as file:
        file.truncate(num_rows * width * 2)
    tensor = TensorProto(name="w", data_type=TensorProto.BFLOAT16, dims=[width, num_rows])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", weights.name), ("length", str(num_rows * width * 2))):
        tensor.external_data.add(key=key, value=value)
    nodes = [
        helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["x", "wide"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size])
        for name, size in (("x", width), ("y", num_rows))
    )
    graph = helper.make_graph(nodes, "product", [x], [y], [tensor])
    opset = helper.make_opsetid("", 20)
    path.write_bytes(helper.make_model(graph, opset_imports=[opset]).SerializeToString())


def profile_options(folder, monkeypatch):
    """Let sessions write a profile of their passes."""

    class Options(onnxruntime.SessionOptions):
        def __init__(self):
            super().__init__()
            self.enable_profiling = True
            self.profile_file_prefix = str(folder / "profile")

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)


def run_operators(session, x):
    """Return the operators that a pass runs."""
    session.run(None, {"x": x})
    with open(session.end_profiling()) as file:
        events = json.load(file)
    return [event["args"]["op_name"] for event in events if event["name"].endswith("kernel_time")]


@pytest.mark.parametrize("open_session", [Device().open, open_for_verification])
def test_constants_of_unknown_size_are_computed_once(open_session, tmp_path, monkeypatch):
    """With a limit, ONNX Runtime does not fold operators without shape inference (opset 15)."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 15]>
        g (float[3] x) => (float[3] y) <float[3] a = {1, 2, 3}, float[3] b = {2, 2, 2}> {
            c = GreaterOrEqual(a, b)
            y = Where(c, x, a)
        }""")
    onnx.save(model, tmp_path / "model.onnx")
    profile_options(tmp_path, monkeypatch)
    session = open_session(tmp_path / "model.onnx")
    assert run_operators(session, np.zeros(3, np.float32)) == ["Where"]


@pytest.mark.slow(exhaustive=True)
def test_onnxruntime_casts_weights_above_1_gib_once(tmp_path, monkeypatch):
    write_product(tmp_path / "product.onnx", NUM_ROWS, WIDTH)
    profile_options(tmp_path, monkeypatch)
    session = Device().open(tmp_path / "product.onnx")
    assert run_operators(session, np.ones((1, WIDTH), np.float32)) == ["MatMul"]
