"""Graph variants that compute in a type of their own, over the weights that the others read."""

import json
from collections import Counter
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto

import specedge
from cases import exhaustive, slow
from quantized import PROMPTS, Made, check_greedy, with_outliers
from specedge.bundle import Bundle
from specedge.bundle.graph_variants import OPS, compute_dtype
from specedge.bundle.manifest import key_value_states
from specedge.cli.inspect import inspect
from specedge.cli.verify import verify
from specedge.errors import BundleError, DeviceError, ExportError
from specedge.exporter import export
from specedge.exporter.verification import partition, runner
from specedge.runtime.backend.model_session import choose_ops
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.requests.loader import memory_of
from specedge.runtime.sampling.logits import Row

CASES = [
    slow(("llama", "fp16", "fp16")),
    slow(("llama", "int8", "fp16")),
    exhaustive(("gpt2", "int8", "fp32")),
    exhaustive(("gpt2", "int4", "fp16")),
    exhaustive(("gpt2", "fp32", "fp16")),
]


class Typed(Made):
    def __init__(self, folder, kind, precision, compute):
        change = with_outliers if kind == "llama" else (lambda model: model)
        super().__init__(folder, kind, change, "self:1", precision, compute=compute)
        self.kind, self.compute = kind, compute
        self.sets = [f"{ops}-{compute}" for ops in OPS]

    def graph(self, model, ops):
        path = self.bundle.path(model.graph("decoder", ops).file)
        return onnx.load(path, load_external_data=False).graph

    def places(self, model, ops):
        """Return file, offset and size of a decoder's weights."""
        found = set()
        for tensor in self.graph(model, ops).initializer:
            if where := {entry.key: entry.value for entry in tensor.external_data}:
                found.add((where["location"], int(where["offset"]), int(where["length"])))
        return found


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def made(request, tmp_path_factory):
    return Typed(tmp_path_factory.mktemp("typed"), *request.param)


def test_scored_graph_returns_decoder_logits_and_top_logits(made):
    bundle = made.bundle
    for model in bundle.models.values():
        ops = made.sets[0]
        whole, scored = (OrtModel(bundle, model, Device(), ops, g) for g in ("decoder", "scored"))
        wanted, found = (one.forward([5, 6, 7, 8]) for one in (whole, scored))
        assert found.best[:, -1].tolist() == [0] * 4
        # The tied int8 head is decomposed there and has a half-precision kernel on the CPU, too.
        allowed = 1e-3 if made.compute == "fp32" else 0.01 * np.abs(wanted.array()).max()
        assert np.allclose(found.array(), wanted.array(), atol=allowed)
        for i in range(4):
            own = Row(found.array()[i], found.ids)
            for count in (1, 5):
                assert found[i].largest(count)[0].tolist() == own.largest(count)[0].tolist()
                assert found[i].largest(count)[1].tolist() == own.largest(count)[1].tolist()


def test_sigmoid_is_not_decomposed_in_half_precision(made):
    for ops in made.sets:
        names = {node.op_type for node in made.graph(made.bundle.target, ops).node}
        assert made.compute == "fp32" or "Exp" not in names


def test_rotary_embedding_and_residual_norms_are_fused_for_gpu(made):
    if (made.kind, made.compute) != ("llama", "fp16"):
        pytest.skip("has no such nodes")
    for model in made.bundle.models.values():
        operators = Counter(node.op_type for node in made.graph(model, "gqa-fp16").node)
        layers = operators["GroupQueryAttention"]
        assert operators["RotaryEmbedding"] == 0
        assert operators["SkipSimplifiedLayerNormalization"] == 2 * layers
        assert operators["SimplifiedLayerNormalization"] == 1  # of the embedding
        assert operators["QuickGelu"] == layers  # SiLU
        assert operators["Sigmoid"] == 0
        assert operators["Split"] == (0 if model.weights_dtype == "float16" else layers)


def test_each_typed_graph_variant_has_its_quantization_report(made):
    for model in made.bundle.models.values():
        assert list(model.parity) == [*OPS, *made.sets]
        for ops in made.sets:
            report = model.quantization[ops]
            is_primary = ops == list(made.sets)[-1]
            assert (report.num_tokens > 1000) is is_primary
            bound = 0.05 if is_primary else 0.15
            assert report.perplexity == pytest.approx(report.original_perplexity, rel=bound)
            assert report.divergence < 0.3
            assert 0 < report.error < 1
            assert compute_dtype(ops) in model.describe_parity(ops)
    assert made.bundle.to_json() == Bundle.from_json(made.bundle.to_json()).to_json()


def test_typed_variants_share_the_weights_file(made):
    for model in made.bundle.models.values():
        for plain, ops in zip(OPS, made.sets, strict=True):
            known, found = made.places(model, plain), made.places(model, ops)
            assert len(found) > 5
            # Zero points, which are no copies of weights.
            assert sum(size for *_, size in found - known) < 0.02 * sum(s for *_, s in known)


def test_graph_variants_are_batch_invariant(made):
    made.check_rows()


def test_greedy_text_equals_plain_decoding_in_each_graph_variant(made):
    for ops in made.sets:
        pipeline = specedge.load(made.bundle.folder, ops=ops)
        assert pipeline.target.ops == pipeline.draft.ops == ops
        for k in (1, 4, 8):
            check_greedy(pipeline, PROMPTS[k % 3], 24, k)


def test_caches_have_compute_type_and_roll_back_by_length(made):
    for ops in made.sets:
        model = specedge.load(made.bundle.folder, ops=ops).target
        arrays = list(model.cache.arrays.values())
        assert {array.dtype.name for array in arrays} == {compute_dtype(ops)}
        model.truncate(0)
        wanted = model.forward(range(1, 13)).array().copy()
        rows = model.cache_rows(0, 12)
        model.truncate(5)
        for array in arrays:
            array[:, :, 5:] = np.random.default_rng(0).normal(0, 4, array[:, :, 5:].shape)
        assert np.array_equal(model.forward(range(6, 13)).array(), wanted[5:])
        assert all(map(np.array_equal, model.cache_rows(0, 12), rows))


def test_cpu_uses_typed_variants_only_if_specified(made):
    assert made.pipeline.target.ops in OPS
    assert {choose_ops(model) for model in made.bundle.models.values()} <= {*OPS}


def test_memory_estimate_uses_the_specified_graph_variant(made):
    own, typed = (memory_of(made.bundle, ops).models[0] for ops in ("gqa", made.sets[1]))
    share = 2 if made.compute == "fp16" else 1
    assert own.caches == share * typed.caches


def test_inspect_shows_compute_type_and_cache_of_each_variant(made):
    said = CliRunner().invoke(inspect, ["--bundle", str(made.bundle.folder)]).output
    for ops in made.sets:
        assert f"  {ops} " in said
        assert f"computed in  {compute_dtype(ops)}, with a cache of" in said


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("made", CASES[:2], indirect=True, ids="-".join)
def test_verify_passes_in_typed_graph_variant(made):
    """In one, as an audit takes two minutes."""
    ops = made.sets[-1]
    found = CliRunner().invoke(verify, ["--bundle", str(made.bundle.folder), "--ops", ops])
    assert found.exit_code == 0, found.output
    assert f"graph variant {ops}" in found.output


def test_missing_graph_variant_is_rejected_by_name(made):
    with pytest.raises(
        BundleError, match="has no graphs in the graph variant 'onnx-bf16', only in"
    ):
        specedge.load(made.bundle.folder, ops="onnx-bf16")


def test_manifest_with_missing_report_or_wrong_cache_is_rejected(made):
    value = json.loads(made.bundle.to_json())
    del value["models"]["target"]["quantization"][made.sets[0]]
    with pytest.raises(ValueError, match="quantization must have a report"):
        Bundle.from_json(json.dumps(value))
    value = json.loads(made.bundle.to_json())
    for graph in value["models"]["target"]["graphs"]:
        if graph["ops"] in made.sets and made.compute != "fp32":
            graph["signature"] = "chosen_logits"
            with pytest.raises(ValueError, match="its signature does not match its states"):
                Bundle.from_json(json.dumps(value))
            return


def test_float16_weights_are_multiplied_without_casts(made):
    if made.bundle.target.weights_dtype != "float16":
        pytest.skip("of weights in 16 bits")
    for ops in made.sets:
        graph = made.graph(made.bundle.target, ops)
        stored = {t.name: t.data_type for t in graph.initializer if t.external_data}
        products = [node for node in graph.node if node.op_type == "MatMul"]
        assert products
        assert {stored[node.input[1]] for node in products} == {TensorProto.FLOAT16}


def test_all_matmuls_use_the_compute_type(made):
    wanted = {"fp16": TensorProto.FLOAT16, "fp32": TensorProto.FLOAT}[made.compute]
    for ops in made.sets:
        graph = made.graph(made.bundle.target, ops)
        types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
        products = [node for node in graph.node if node.op_type in ("MatMul", "RMSNormalization")]
        assert products
        assert {types[node.input[0]] for node in products} == {wanted}


def test_int8_weights_are_dequantized_and_inputs_stay_float(made):
    if made.bundle.target.weights_dtype != "int8":
        pytest.skip("of weights in 8 bits")
    for ops in made.sets:
        graph = made.graph(made.bundle.target, ops)
        ops_found = {node.op_type for node in graph.node}
        assert "MatMulNBits" in ops_found
        assert not {"DequantizeLinear", "QuantizeLinear", "MatMulInteger"} & ops_found
        products = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
        assert all("hadamard" in name for name in products)


@pytest.mark.slow(exhaustive=True)
def test_unrunnable_variant_is_checked_structurally_and_reported(tmp_path):
    made = Made(tmp_path, "gpt2", draft="self:1", precision="bf16", compute="bf16", ops="gqa")
    notes = [note for note in made.progress.notes if "no bfloat16 kernels on this machine" in note]
    assert [note.split(":")[0] for note in notes] == ["target (gqa-bf16)", "draft (gqa-bf16)"]
    for model in made.bundle.models.values():
        assert model.quantization["gqa-bf16"].num_tokens == 0
        assert model.parity["gqa-bf16"].invariant_lengths == ()
        assert "not run" in model.describe_parity("gqa-bf16")
    with pytest.raises(DeviceError, match="'gqa-bf16' computes in bfloat16, which ONNX Runtime"):
        specedge.load(made.bundle.folder, ops="gqa-bf16")
    said = CliRunner().invoke(verify, ["--bundle", str(made.bundle.folder)])
    assert said.exit_code == 0, said.output


@pytest.mark.parametrize(
    ("dtype", "ops", "advice"),
    [
        ("float32", "onnx-fp32", ""),
        ("float32", "onnx-qdq", ""),
        ("int4", "onnx-qdq", ", or export the pair with --ops onnx --compute qdq"),
        ("float32", "onnx-bf16", ", or export the pair with --ops onnx --compute bf16"),
        ("int8", "gqa-fp32", ", or export the pair with --ops gqa --compute fp32"),
        ("int8", "gqa-bf16", ""),
        ("int4", "onnx", ", or export the pair with --ops onnx"),
    ],
)
def test_advised_export_command_is_valid_for_graph_variant(dtype, ops, advice):
    model = Mock(weights_dtype=dtype, parity={"gqa": None}, graph_variant=lambda ops: None)
    with pytest.raises(BundleError) as caught:
        choose_ops(model, ops)
    assert str(caught.value).endswith(f"only in gqa; omit --ops{advice}")


@pytest.mark.parametrize(
    ("value_size", "advice"),
    [(64, "--ops all --cache fp16, which adds gqa-kv16 if the model supports it"), (48, None)],
)
def test_gqa_export_is_advised_only_if_possible(value_size, advice):
    """Keys and values of two sizes: never. With one size a manifest cannot tell."""
    layers = (key_value_states(0, (2, 64), (2, value_size), "float32"),)
    parity = {"onnx": None}
    model = Mock(weights_dtype="int8", parity=parity, graph_variant=lambda ops: None)
    model.layers = layers
    with pytest.raises(BundleError) as caught:
        choose_ops(model, "gqa-kv16")
    said = "" if advice is None else f", or export the pair with {advice}"
    assert str(caught.value).endswith(f"only in onnx; omit --ops{said}")


@pytest.mark.slow(exhaustive=True)
def test_large_model_is_verified_by_subgraph(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "WHOLE_BYTES", 0)
    monkeypatch.setattr(partition, "PART_BYTES", 100_000)
    for precision in ("fp16", "int8"):
        (tmp_path / precision).mkdir()
        made = Typed(tmp_path / precision, "gpt2", precision, "fp16")
        for ops in made.sets:
            report = made.bundle.target.quantization[ops]
            assert report.perplexity == pytest.approx(report.original_perplexity, rel=0.02)
            assert {1, 2, 5} <= {*made.bundle.target.parity[ops].invariant_lengths}


@pytest.mark.slow
def test_overflow_of_compute_type_is_rejected_by_name(tmp_path):
    def change(model):
        with torch.no_grad():
            model.model.embed_tokens.weight *= 1e6
        return model

    with pytest.raises(ExportError, match=r"onnx-fp16\): some values exceed the range of float16"):
        Made(tmp_path, "llama", change, "self:1", "bf16", compute="fp16", ops="onnx")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compute": "int8"}, "compute must be one of fp32, fp16, bf16, qdq"),
        ({"compute": "fp32", "precision": "fp32"}, "compute in fp32; omit compute"),
        ({"compute": "bf16", "precision": "int8"}, "int8 cannot be dequantized to bf16"),
        ({"compute": "bf16", "draft_precision": "int4"}, "int4 cannot be dequantized to bf16"),
    ],
)
def test_redundant_or_invalid_compute_type_is_rejected(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        export("a", "b", tmp_path / "out", **options)


@pytest.mark.slow
def test_float_draft_of_quantized_target_runs_in_float32(tmp_path):
    made = Made(tmp_path, "gpt2", compute="fp32", draft_precision="fp32", ops="onnx")
    assert list(made.bundle.draft.parity) == ["onnx"]
    pipeline = specedge.load(made.bundle.folder, ops="onnx-fp32")
    assert (pipeline.target.ops, pipeline.draft.ops) == ("onnx-fp32", "onnx")
