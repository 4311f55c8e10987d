"""Integers as compilers of engines take them: the same numbers, by DequantizeLinear alone."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from cases import exhaustive, slow
from quantized import Made
from specedge.errors import DeviceError
from specedge.exporter import export
from specedge.exporter.quantization import rounding
from specedge.runtime.backend.model_session import choose_ops
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.self_test import exact_device
from specedge.runtime.backend.sessions import Device

QDQ = "onnx-qdq"
INTEGERS = {TensorProto.INT4, TensorProto.INT8, TensorProto.UINT8}
TOKENS = [5, 6, 7, 8, 300, 12]


@pytest.fixture(
    scope="module",
    params=[
        slow(("gpt2", "int4")),  # a tied table of bytes
        exhaustive(("llama", "int8")),
        exhaustive(("llama", "int8-block")),
        exhaustive(("llama", "int4")),
        exhaustive(("gpt2", "int8")),
    ],
    ids="-".join,
)
def made(request, tmp_path_factory):
    kind, precision = request.param
    folder = tmp_path_factory.mktemp("qdq")
    return Made(folder, kind, draft="none", precision=precision, compute="qdq", ops="onnx")


def graphs(made):
    """Every graph of the graph variant, without its weights."""
    for model in made.bundle.models.values():
        for graph in model.graphs:
            if graph.ops == QDQ:
                yield onnx.load(made.bundle.path(graph.file), load_external_data=False).graph


def test_only_dequantize_linear_consumes_integer_weights(made):
    for graph in graphs(made):
        stored = {t.name for t in graph.initializer if t.data_type in INTEGERS}
        assert stored
        readers = [node for node in graph.node if stored & {*node.input}]
        assert {node.op_type for node in readers} == {"DequantizeLinear"}
        assert not any(node.domain for node in graph.node)


def test_qdq_logits_match_cpu_variant_up_to_input_quantization(made):
    device = exact_device(
        made.bundle.models.values(), Device()
    )  # products of bytes saturate on some
    for model in made.bundle.models.values():
        plain, qdq = (OrtModel(made.bundle, model, device, ops) for ops in ("onnx", QDQ))
        wanted, found = (one.forward(TOKENS).array() for one in (plain, qdq))
        off = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert off < 0.06, off
        report = model.quantization[QDQ]
        (like,) = (
            one
            for ops, one in model.quantization.items()
            if ops in ("onnx", "gqa") and one.num_tokens == report.num_tokens
        )
        assert report.perplexity == pytest.approx(like.perplexity, rel=0.02)


def test_single_qdq_graph_variant_is_limited_to_engines(made):
    for model in made.bundle.models.values():
        assert [*model.parity] == ["onnx", QDQ]
        names = {graph.name for graph in model.graphs if graph.ops == QDQ}
        assert names == {"decoder", "step", "catchup", "verify", "prefill"}
        for device in ("rtx", "tensorrt:1"):
            assert choose_ops(model, "auto", Device(device)) == QDQ
        with pytest.raises(
            DeviceError, match=r"cuda runs none of its graph variants \(onnx, onnx-qdq\)"
        ):
            choose_ops(model, "auto", Device("cuda"))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(64, 6), (80, 5), (33, 3)])
def test_signed_blocks_dequantize_to_same_values(bits, shape):
    weights = torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))
    blocks = rounding.quantize_blocks(weights, bits)
    found = rounding.to_signed(blocks, bits, shape[0])
    values = found.values.astype(np.int16)
    if bits == 4:
        values = np.stack([values & 15, values >> 4], -1).reshape(-1)[: np.prod(shape)]
        values = np.where(values > 7, values - 16, values).reshape(shape)
    assert values.shape == shape
    whole = values * found.scales.repeat(rounding.BLOCK_SIZE, 0)[: shape[0]]
    assert np.abs(whole - weights.numpy()).max() < (0.5 if bits == 4 else 0.02)
    assert found.scales.shape == (-(-shape[0] // rounding.BLOCK_SIZE), shape[1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"precision": "fp32"},
            "compute qdq is for quantized weights; specify a precision of int8, ",
        ),
        ({"precision": "int4", "ops": "gqa"}, "compute qdq needs the graph variant onnx"),
    ],
)
def test_unsupported_precision_or_op_set_is_rejected(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        export("a", "b", tmp_path / "out", compute="qdq", **options)
