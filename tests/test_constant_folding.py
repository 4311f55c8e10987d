"""Weights that ONNX Runtime casts and transposes when it loads a graph, of any size."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from specedge import constant_folding
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


@pytest.mark.parametrize("open_session", [Device().open, open_for_verification])
def test_sessions_limit_no_constants(open_session, tmp_path):
    write_product(tmp_path / "product.onnx", 4, 8)
    session = open_session(tmp_path / "product.onnx")
    ((key, value),) = constant_folding.WITHOUT_LIMIT.items()
    assert session.get_session_options().get_session_config_entry(key) == value
    assert not session.run(None, {"x": np.ones((1, 8), np.float32)})[0].any()


@pytest.mark.slow(exhaustive=True)
def test_onnxruntime_casts_weights_above_1_gib_once(tmp_path, monkeypatch):
    """The cast is in no profile of a pass."""
    write_product(tmp_path / "product.onnx", NUM_ROWS, WIDTH)

    class Options(onnxruntime.SessionOptions):
        def __init__(self):
            super().__init__()
            self.enable_profiling = True
            self.profile_file_prefix = str(tmp_path / "profile")

    monkeypatch.setattr(onnxruntime, "SessionOptions", Options)
    session = Device().open(tmp_path / "product.onnx")
    session.run(None, {"x": np.ones((1, WIDTH), np.float32)})
    with open(session.end_profiling()) as file:
        profile = file.read()
    assert "MatMul_kernel_time" in profile or "MatMul" in profile
    assert '"op_name" : "Cast"' not in profile
