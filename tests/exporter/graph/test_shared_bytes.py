"""A table of bytes that is embedding and head is read by both as MatMulNBits has it."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnxruntime import SessionOptions

from specedge.exporter.graph.shared_bytes import share_embeddings
from specedge.runtime.backend.ort import inference_session

ROWS, BLOCK = 96, 32


@pytest.fixture(params=[64, 40], ids=["whole-blocks", "padded-blocks"])
def path(request, tmp_path):
    """Return a graph that gathers rows of a table and multiplies them with it."""
    random, width = np.random.default_rng(0), request.param
    num_blocks = -(-width // BLOCK)
    table = random.integers(-127, 128, (ROWS, width), np.int8)
    scales = random.uniform(0.001, 0.01, (ROWS, 1)).astype(np.float32)
    stored = [
        onnx.numpy_helper.from_array(table, "table"),
        onnx.numpy_helper.from_array(scales, "scales"),
        onnx.numpy_helper.from_array(np.repeat(scales, num_blocks, 1), "columns"),
        onnx.numpy_helper.from_array(np.array(128, np.uint8), "zero"),
        onnx.numpy_helper.from_array(np.array([0, 0, 0, num_blocks * BLOCK - width]), "ends"),
        onnx.numpy_helper.from_array(np.array([ROWS, num_blocks, BLOCK]), "dims"),
    ]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["taken"]),
        helper.make_node("Cast", ["taken"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("Gather", ["scales", "input_ids"], ["scale"]),
        helper.make_node("Mul", ["wide", "scale"], ["embedding"]),
        helper.make_node("Cast", ["table"], ["bytes"], to=TensorProto.UINT8),
        helper.make_node("BitwiseXor", ["bytes", "zero"], ["unsigned"]),
        helper.make_node("Pad", ["unsigned", "ends", "zero"], ["padded"]),
        helper.make_node("Reshape", ["padded", "dims"], ["head"]),
        helper.make_node(
            "MatMulNBits", ["embedding", "head", "columns"], ["logits"], domain="com.microsoft",
            K=width, N=ROWS, bits=8, block_size=BLOCK,
        ),
    ]  # fmt: skip
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "decoder", [value("input_ids", TensorProto.INT64, [1, "T"])],
        [
            value("logits", TensorProto.FLOAT, [1, "T", ROWS]),
            value("embedding", TensorProto.FLOAT, [1, "T", width]),
        ],
        stored,
        value_info=[
            value("taken", TensorProto.INT8, [1, "T", width]),
            value("wide", TensorProto.FLOAT, [1, "T", width]),
            value("head", TensorProto.UINT8, [ROWS, num_blocks, BLOCK]),
        ],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    path = tmp_path / "decoder.onnx"
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=1024)
    return path


def run(path):
    session = inference_session(str(path), SessionOptions(), ["CPUExecutionProvider"])
    return session.run(None, {"input_ids": np.array([[5, 0, ROWS - 1]])})


def test_lookup_and_matmul_share_one_initializer(path, tmp_path):
    wanted = run(path)
    model = ir.load(path)
    share_embeddings(model)
    ir.save(model, tmp_path / "shared.onnx")
    for found, before in zip(run(tmp_path / "shared.onnx"), wanted, strict=True):
        assert np.abs(before).max() > 0.1
        assert np.array_equal(found, before)
    (lookup,) = (
        n for n in model.graph if n.op_type == "Gather" and "scale" not in n.outputs[0].name
    )
    (product,) = (n for n in model.graph if n.op_type == "MatMulNBits")
    assert lookup.inputs[0] is product.inputs[1]


def test_lookup_only_table_is_unchanged(path, tmp_path):
    model = ir.load(path)
    graph = model.graph
    del graph.outputs[0]
    for name in ("MatMulNBits", "Reshape", "Pad", "BitwiseXor"):
        graph.remove([node for node in graph if node.op_type == name], safe=True)
    graph.remove([node for node in graph if node.outputs[0].name == "bytes"], safe=True)
    before = [node.op_type for node in graph]
    share_embeddings(model)
    assert [node.op_type for node in graph] == before
