"""int8 bundles: greedy text equals plain decoding, and logits are close to float."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner

from cases import exhaustive
from quantized import PROMPTS, SIZES, Made, with_outliers
from specedge.bundle import Bundle
from specedge.cli.export import export as export_command
from specedge.errors import ExportError
from specedge.exporter.quantization import quantizer, rotation_rewriter, texts
from specedge.exporter.verification.subgraph import open_session

FUSED = {"GroupQueryAttention", "MatMulIntegerToFloat", "SkipSimplifiedLayerNormalization"}


@pytest.fixture(scope="module", params=["llama", exhaustive("gpt2")])
def made(request, tmp_path_factory):
    change = with_outliers if request.param == "llama" else (lambda model: model)
    return Made(tmp_path_factory.mktemp("int8"), request.param, change, draft="none")


def graphs(model, bundle):
    return [onnx.load(bundle.path(g.file), load_external_data=False).graph for g in model.graphs]


def test_all_matrices_are_int8_with_standard_operators_in_onnx_variant(made):
    for model in made.bundle.models.values():
        assert model.weights_dtype == "int8"
        for graph in graphs(model, made.bundle):
            ops = {(node.domain, node.op_type) for node in graph.node}
            floats = [node for node in graph.node if node.op_type == "MatMul"]
            assert all("hadamard" in node.input[1] for node in floats)
            own = {op for domain, op in ops if domain == "com.microsoft"}
            is_fused = ("com.microsoft", "GroupQueryAttention") in ops
            assert (("", "MatMulInteger") in ops) is not is_fused
            assert ("MatMulIntegerToFloat" in own) is is_fused
            assert own <= FUSED
            assert not {"DynamicQuantizeLinear", "MatMulNBits"} & {op for _, op in ops}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [{"block": 0}, {"gain": None}, {"input": False}])
def test_model_with_one_matrix_in_another_basis_is_not_rotated(tmp_path, monkeypatch, fault):
    """One Hadamard transform or rotation is not inverted, or one norm's gain is not folded."""
    change_matrix, planted = rotation_rewriter.change_matrix, []

    def change(stored, matrix_change, transforms):
        wrong = replace(matrix_change, **fault)
        if wrong != matrix_change and not planted:
            planted.append(stored)
            matrix_change = wrong
        return change_matrix(stored, matrix_change, transforms)

    monkeypatch.setattr(rotation_rewriter, "change_matrix", change)
    made = Made(tmp_path, "llama", ops="gqa")
    notes = made.progress.notes
    assert planted
    assert [note for note in notes if "is not rotated, because the rotated graph differs" in note]
    for graph in graphs(made.bundle.target, made.bundle):
        assert not [node for node in graph.node if node.op_type == "MatMul"]
    made.check_greedy_text(8, k=2)


def test_target_with_too_large_divergence_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(quantizer.MAX_DIVERGENCE, "int8", 1e-9)
    with pytest.raises(ExportError, match=r"KL divergence in int8 is .* the limit is 1e-09"):
        Made(tmp_path, "llama", ops="gqa")
    assert not (tmp_path / "bundle").exists()


def test_fused_int8_matmul_has_six_nodes(made):
    bundle, model = made.bundle, made.bundle.target
    path = bundle.path(model.graph("decoder", "gqa").file)
    nodes = [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    products = 4 * SIZES["layers"] + 1
    for op_type in ("Abs", "ReduceMax", "QuantizeLinear", "MatMulIntegerToFloat"):
        assert nodes.count(op_type) == products
    assert not {"Max", "MatMulInteger"} & {*nodes}


def test_zero_row_stays_zero_in_fused_int8_matmul(made):
    """Its quantization divides 0 by 0."""
    bundle, model = made.bundle, made.bundle.target
    path = bundle.path(model.graph("decoder", "gqa").file)
    proto = onnx.load(path)
    node = next(node for node in proto.graph.node if node.op_type == "MatMulIntegerToFloat")
    index = [*proto.graph.node].index(node)
    (scaled,) = (n for n in proto.graph.node if node.output[0] in n.input)
    source = next(n for n in proto.graph.node if n.op_type == "Abs").input[0]
    first = index - [n.op_type for n in proto.graph.node][index::-1].index("Abs")
    part = [*proto.graph.node[first : index + 1], scaled]
    reads = {name for n in part for name in n.input}
    weights = [t for t in proto.graph.initializer if t.name in reads]
    size = next(t.dims[0] for t in weights if t.name == node.input[1])
    x = onnx.helper.make_tensor_value_info(source, onnx.TensorProto.FLOAT, [1, 3, size])
    y = onnx.helper.make_tensor_value_info(scaled.output[0], onnx.TensorProto.FLOAT, None)
    graph = onnx.helper.make_graph(part, "product", [x], [y], weights)
    one = onnx.helper.make_model(graph, opset_imports=proto.opset_import, ir_version=10)
    session = open_session(one.SerializeToString(), ort.SessionOptions())
    rows = np.ones((1, 3, size), np.float32)
    rows[:, 1] = 0
    (found,) = session.run(None, {source: rows})
    assert np.isfinite(found).all()
    assert not found[:, 1].any()
    assert found[:, 0].any()


def test_matrices_with_a_common_input_are_merged(made):
    graph = graphs(made.bundle.target, made.bundle)[0]
    products = [node for node in graph.node if node.op_type.startswith("MatMulInteger")]
    assert len(products) == 4 * SIZES["layers"] + 1
    assert len({node.input[0] for node in products}) == len(products)


def test_weights_are_stored_once_for_all_graphs(made):
    model = made.bundle.target
    assert made.bundle.files[model.weights].size < 1.25 * model.num_parameters
    found = set()
    for graph in graphs(model, made.bundle):
        places = set()
        for tensor in graph.initializer:
            if where := {entry.key: entry.value for entry in tensor.external_data}:
                places.add((int(where["offset"]), int(where["length"])))
        found |= places
    ends = [offset + length for offset, length in sorted(found)]
    assert all(a <= b for a, (b, _) in zip(ends, sorted(found)[1:], strict=False))


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_greedy_text_equals_plain_decoding(made, k):
    made.check_greedy_text(40, k)


def test_int8_models_are_batch_invariant(made):
    made.check_rows()


@pytest.mark.usefixtures("all_cpus")
def test_text_does_not_depend_on_number_of_threads(made):
    """In processes of their own: in this one there may be a pool that sessions share."""
    script = """
import sys
from dataclasses import replace
import specedge
from fakes import Recalling
pipeline = specedge.load(sys.argv[1], threads=int(sys.argv[2]))
plain = pipeline.generate(sys.argv[3], 40, num_draft_tokens=0, ignore_eos=True).tokens
print(plain)
options = {"num_draft_tokens": 4, "drafter": Recalling(plain), "ignore_eos": True}
print(pipeline.generate(sys.argv[3], 40, **options).tokens)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = set()
    for threads in ("1", "2"):
        command = [sys.executable, "-c", script, str(made.bundle.folder), threads, PROMPTS[0]]
        run = subprocess.run(command, capture_output=True, check=True, env=environment)
        found |= {*run.stdout.splitlines()}
    assert len(found) == 1
    assert len(found.pop()) > 40


def test_report_compares_perplexity_and_divergence_with_float_model(made):
    for model in made.bundle.models.values():
        for ops, report in model.quantization.items():
            assert report.text == texts.BUILT_IN_NAME
            is_primary = ops == "gqa" or "gqa" not in model.quantization
            assert (report.num_tokens > 1000) is is_primary
            assert 8 < report.bits_per_weight < 14
            bound = 0.02 if is_primary else 0.06
            assert report.perplexity == pytest.approx(report.original_perplexity, rel=bound)
            assert report.agreement > 0.9
            assert 0 < report.divergence < 0.02
            assert 0 < report.error < 0.2
            assert report.num_left == 0
            assert f"perplexity {report.perplexity:.4g}" in model.describe_parity(ops)


@pytest.mark.slow
def test_outlier_channels_are_folded_or_rotated(tmp_path):
    made = Made(tmp_path, "llama", with_outliers, ops="onnx")
    (report,) = made.bundle.target.quantization.values()
    assert report.num_left == report.num_cut == report.num_in_blocks == 0
    assert report.product_error < 0.03


def test_int8_matmul_equals_numpy_integer_product(made):
    """Check every integer matmul of the graph on its actual inputs."""
    bundle, model = made.bundle, made.bundle.target
    path = bundle.path(model.graph("decoder", "onnx").file)
    proto = onnx.load(path)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    wanted = [node for node in proto.graph.node if node.op_type == "MatMulInteger"]
    named = {node.input[0] for node in wanted} | {node.output[0] for node in wanted}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(named))
    options = ort.SessionOptions()
    session = open_session(proto.SerializeToString(), options)
    values = {
        i.name: np.zeros(i.shape, np.float32)
        for i in session.get_inputs()
        if i.name.startswith("past_key_values")
    }
    values |= {"input_ids": np.arange(9)[None]}
    values |= {"past_length": np.zeros(1, np.int64), "logits_from": np.zeros(1, np.int64)}
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, values), strict=True))
    for node in wanted:
        matrix = weights.get(node.input[1])
        if matrix is None:  # a tied table, turned
            (turned,) = (n for n in proto.graph.node if n.output[0] == node.input[1])
            matrix = weights[turned.input[0]].T
        x = found[node.input[0]].astype(np.int32) - 128
        assert np.array_equal(x @ matrix.astype(np.int32), found[node.output[0]])


@pytest.mark.slow(exhaustive=True)
def test_self_draft_shares_quantized_target_weights(tmp_path):
    made = Made(tmp_path, "llama", with_outliers, draft="self:1", ops="onnx")
    bundle = made.bundle
    assert bundle.shares_weights
    assert {*bundle.draft.quantization} == {"onnx"}
    plain = made.pipeline.generate(PROMPTS[0], 40, num_draft_tokens=0, ignore_eos=True)
    found = made.pipeline.generate(PROMPTS[0], 40, num_draft_tokens=4, ignore_eos=True)
    assert found.tokens == plain.tokens


@pytest.mark.slow(exhaustive=True)
def test_a_draft_may_have_another_precision(tmp_path):
    made = Made(tmp_path, "gpt2", draft_precision="fp32", ops="onnx")
    assert made.bundle.target.weights_dtype == "int8"
    assert made.bundle.draft.weights_dtype == "float32"
    assert made.bundle.draft.quantization == {}


def test_temporary_float_files_are_removed(made):
    names = {path.name for path in made.bundle.folder.rglob("*")}
    assert not [name for name in names if "float" in name or "calibration" in name]
    Bundle.read(made.bundle.folder)


def exported(*options):
    return CliRunner().invoke(export_command, [*options, "--output", "out"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--precision", "int9"], "int9"),
        (["--precision", "int8", "--calibrate", "missing.txt"], "missing.txt: No such file"),
        (["--precision", "int8", "--calibrate", "."], "Is a directory"),
    ],
)
def test_invalid_precision_or_calibration_text_is_rejected(
    made, tmp_path, monkeypatch, options, said
):
    monkeypatch.chdir(tmp_path)
    result = exported("--draft", str(made.target), "--target", str(made.target), *options)
    assert result.exit_code != 0
    assert said in str(result.output) + str(result.exception)
    assert not (tmp_path / "out").exists()


def test_manifest_inconsistent_with_quantization_reports_is_rejected(made):
    value = json.loads(made.bundle.to_json())
    value["models"]["target"]["weights_dtype"] = "float32"
    with pytest.raises(
        ValueError,
        match="quantization must have a report for each graph variant with integer weights",
    ):
        Bundle.from_json(json.dumps(value))


@pytest.mark.slow(exhaustive=True)
def test_context_equal_to_prefill_length_is_verified(tmp_path):
    made = Made(tmp_path, "llama", max_length=64, draft_precision="fp32")
    held = made.bundle.target.parity["gqa"].invariant_lengths
    assert {1, 2, 3, 5, 9, 18, 36, 64} <= {*held}
