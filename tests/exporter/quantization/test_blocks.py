"""Weights in blocks of 32: rounded well, read by MatMulNBits, exact to their own target."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from cases import slow
from quantized import PROMPTS, SIZES, Made
from specedge.exporter.quantization import rounding
from specedge.exporter.verification.subgraph import open_session

pytestmark = pytest.mark.usefixtures("all_cpus_of_a_module")  # before `made` opens sessions


@pytest.fixture
def random():
    return np.random.default_rng(0)


def product(blocks, bits, size):
    """A session of one MatMulNBits node at accuracy level 4, [T, K] -> [T, N]."""
    sizes = {"K": size, "N": len(blocks.values), "bits": bits, "block_size": 32}
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", accuracy_level=4, **sizes
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["T", sizes["N"]])],
        [
            numpy_helper.from_array(blocks.values, "w"),
            numpy_helper.from_array(blocks.scales, "s"),
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return open_session(model.SerializeToString(), ort.SessionOptions())


@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize("bits", [4, 8])
def test_block_layout_and_error_estimate_match_onnx_runtime(random, bits, size):
    weights = torch.from_numpy(random.standard_normal((size, 48), np.float32))
    x = random.standard_normal((20, size), np.float32)
    blocks = rounding.quantize_blocks(weights, bits, np.square(x).mean(0))
    (found,) = product(blocks, bits, size).run(None, {"x": x})
    wanted = x @ weights.numpy()
    off = np.sqrt(np.square(found - wanted).sum() / np.square(wanted).sum())
    assert off == pytest.approx(rounding.block_error(weights, x, bits), rel=0.02)
    assert 0.001 < off < (0.11 if bits == 4 else 0.012)


def test_scale_search_reduces_error_versus_absmax(random):
    """Nearest: the largest of 32 normal numbers at 7 steps."""
    weights = random.standard_normal((256, 64)).astype(np.float32)
    x = random.standard_normal((64, 256)).astype(np.float32) * random.uniform(0.1, 4, 256)
    x = x.astype(np.float32)
    blocks = weights.reshape(8, 32, 64)
    scale = np.abs(blocks).max(1, keepdims=True) / 7
    nearest = (np.rint(blocks / scale) * scale).reshape(256, 64)
    plain = np.sqrt(np.square(x @ nearest - x @ weights).sum() / np.square(x @ weights).sum())
    assert rounding.block_error(torch.from_numpy(weights), x, 4) < 0.85 * plain


def test_scale_search_uses_input_statistics(random):
    weights = torch.from_numpy(random.standard_normal((32, 64), np.float32))
    x = random.standard_normal((64, 32), np.float32)
    x[:, 7] *= 50
    heeding = rounding.quantize_blocks(weights, 4, np.square(x).mean(0))
    heedless = rounding.quantize_blocks(weights, 4)
    off = [
        float(np.square(x @ (rounding.dequantize(b, 4).numpy() - weights.numpy())).sum())
        for b in (heeding, heedless)
    ]
    assert off[0] < 0.5 * off[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_blocks_are_quantized_exactly(bits):
    weights = torch.zeros(64, 3)
    weights[32:, 1] = 0.75
    weights[:, 2] = -1.5
    found = rounding.dequantize(rounding.quantize_blocks(weights, bits), bits)
    assert np.allclose(found, weights, rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_strip_wise_block_quantization_equals_whole_matrix(random, monkeypatch, bits):
    weights = torch.from_numpy(random.standard_normal((64, 100), np.float32))
    whole = rounding.quantize_blocks(weights, bits)
    monkeypatch.setattr(rounding, "_STRIP_SIZE", 7 * 64)
    parts = rounding.quantize_blocks(weights, bits)
    assert np.array_equal(whole.values, parts.values)
    assert np.array_equal(whole.scales, parts.scales)


@pytest.fixture(
    scope="module",
    params=[slow(("llama", "int4")), slow(("gpt2", "int8-block"))],
)
def made(request, tmp_path_factory):
    kind, precision = request.param
    folder = tmp_path_factory.mktemp("blocks")
    return Made(folder, kind, precision=precision, draft_precision=precision)


def test_layers_and_int8_head_are_block_quantized(made):
    for model in made.bundle.models.values():
        is_int8 = model.weights_dtype == "int8-block"
        for entry in model.graphs:
            graph = onnx.load(made.bundle.path(entry.file), load_external_data=False).graph
            ops = [node.op_type for node in graph.node]
            whole = entry.signature != "caches_alone"
            in_layers = 4 * SIZES["layers"] if whole else 5
            assert ops.count("MatMulNBits") == in_layers + (whole and is_int8)
            own = "MatMulIntegerToFloat" if entry.ops == "gqa" else "MatMulInteger"
            assert ops.count(own) == (whole and not is_int8)
            floats = [node for node in graph.node if node.op_type == "MatMul"]
            assert all("hadamard" in node.input[1] for node in floats)
        for report in model.quantization.values():
            assert report.num_in_blocks == 4 * SIZES["layers"] + is_int8
            assert report.perplexity == pytest.approx(report.original_perplexity, rel=0.15)


def test_block_quantized_tied_head_is_stored_once(made):
    if made.bundle.target.weights_dtype == "int8-block":  # of GPT-2, whose head is tied
        assert made.bundle.files[made.bundle.target.weights].size < (
            1.3 * made.bundle.target.num_parameters
        )


def flatter(model):
    """Scale logits down by 100, so that 4 bits suffice."""
    with torch.no_grad():
        model.lm_head.weight /= 100
    return model


def check_average_bits(bundle, most):
    """Attention's input projections have 8 bits, and matrices in layers as many as allowed."""
    decoder = bundle.path(bundle.target.graph("decoder", "gqa").file)
    nodes = onnx.load(decoder, load_external_data=False).graph.node
    found = [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for node in nodes
        if node.op_type == "MatMulNBits" and "logits" not in node.output
    ]
    layers = [found[at : at + 4] for at in range(0, len(found), 4)]
    assert all(projections["bits"] == 8 for projections, *_ in layers)
    assert all(output["bits"] == gate_up["bits"] == 4 for _, output, gate_up, _ in layers)
    sizes = [one["K"] * one["N"] for one in found]
    bits = sum(size * one["bits"] for size, one in zip(sizes, found, strict=True))
    down = layers[0][3]
    assert most - 4 * down["K"] * down["N"] / sum(sizes) < bits / sum(sizes) <= most


@pytest.mark.slow
def test_head_is_int4_only_if_its_divergence_is_low(tmp_path, made):
    flat = Made(tmp_path, "llama", flatter, "self:1", "int4", ops="gqa", bits=5.0)
    for model in flat.bundle.models.values():
        decoder = flat.bundle.path(model.graph("decoder", "gqa").file)
        nodes = onnx.load(decoder, load_external_data=False).graph.node
        (last,) = (node for node in nodes if "logits" in node.output)
        assert last.op_type == "MatMulNBits"
        assert not any(node.op_type.startswith("MatMulInteger") for node in nodes)
    check_average_bits(flat.bundle, 5.0)
    flat.check_greedy_text(16, 4)
    flat.check_rows()
    for report in made.bundle.target.quantization.values():
        said = [line for line in report.exceptions if "nats per token" in line]
        assert len(said) == (made.bundle.target.weights_dtype == "int4")


def test_head_error_is_kl_divergence(random):
    x, weights = (random.standard_normal(shape, np.float32) for shape in ((48, 64), (64, 300)))
    blocks = rounding.quantize_blocks(torch.from_numpy(weights), 4, np.square(x).mean(0))
    wide = rounding.round_rows(x.reshape(48, 2, 32)).reshape(48, 64)
    wanted, found = x @ weights, wide @ rounding.dequantize(blocks, 4).numpy()
    p, q = (np.exp(z - z.max(1, keepdims=True), dtype=np.float64) for z in (wanted, found))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    exact = (p * np.log(p / q)).sum(1).mean()
    assert rounding.block_divergence(torch.from_numpy(weights), x, 4) == pytest.approx(exact)


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_text_equals_plain_decoding(made, k):
    made.check_greedy_text(24, k)


def test_block_quantized_models_are_batch_invariant(made):
    made.check_rows()


@pytest.mark.slow
@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_large_model_is_quantized_and_verified_by_subgraph(tmp_path, in_parts, precision):
    made = Made(tmp_path, "llama", precision=precision, ops="onnx", draft_precision="fp32")
    assert made.bundle.draft.weights_dtype == "float32"
    assert not made.bundle.draft.quantization
    made.check_rows()
    plain = made.pipeline.generate(PROMPTS[0], 24, num_draft_tokens=0, ignore_eos=True)
    found = made.pipeline.generate(PROMPTS[0], 24, num_draft_tokens=4, ignore_eos=True)
    assert found.tokens == plain.tokens
