"""Graph variants that compute as the model does, with caches in float16."""

import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto

import specedge
from cases import exhaustive, slow
from quantized import PROMPTS, Made, check_greedy
from specedge.bundle.graph_variants import OPS
from specedge.cli.inspect import inspect
from specedge.cli.verify import verify
from specedge.errors import BundleError
from specedge.runtime.requests.loader import memory_of

SETS = [f"{ops}-kv16" for ops in OPS]
CASES = [
    slow(("llama", "int8")),
    exhaustive(("gpt2", "fp32")),
    exhaustive(("llama", "fp32")),
    exhaustive(("gpt2", "int4")),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def made(request, tmp_path_factory):
    kind, precision = request.param
    folder = tmp_path_factory.mktemp("cached")
    return Made(folder, kind, draft="self:1", precision=precision, cache="fp16")


def test_each_graph_variant_has_an_fp16_cache_counterpart(made):
    for model in made.bundle.models.values():
        assert list(model.parity) == [*OPS, *SETS]
        for ops in SETS:
            assert 2 * model.cache_size(ops) == model.cache_size("onnx")
            report = model.quantization[ops]
            assert (report.num_tokens > 1000) is ops.startswith("gqa")
            assert 0 < report.error < 0.2
            assert "with caches in float16" in model.describe_parity(ops)


def test_only_caches_are_float16(made):
    model = made.bundle.target
    for plain, ops in zip(OPS, SETS, strict=True):
        graph, before = (
            onnx.load(made.bundle.path(model.graph("decoder", one).file), load_external_data=False)
            for one in (ops, plain)
        )
        types = {v.name: v.type.tensor_type.elem_type for v in graph.graph.value_info}
        caches = [v for v in graph.graph.output if v.name != "logits"]
        assert {v.type.tensor_type.elem_type for v in caches} == {TensorProto.FLOAT16}
        products = [node for node in graph.graph.node if "MatMul" in node.op_type]
        assert TensorProto.FLOAT16 not in {types.get(n.input[0]) for n in products}
        wanted = [node.op_type for node in before.graph.node if "MatMul" in node.op_type]
        assert [node.op_type for node in products] == wanted


def test_fp16_cache_variants_are_batch_invariant(made):
    made.check_rows()


def test_greedy_text_equals_plain_decoding_with_fp16_cache(made):
    for ops in SETS:
        pipeline = specedge.load(made.bundle.folder, ops=ops)
        assert pipeline.target.ops == pipeline.draft.ops == ops
        for k in (1, 4, 8):
            check_greedy(pipeline, PROMPTS[k % 3], 24, k)


def test_fp16_cache_is_opt_in_and_halves_cache_memory(made):
    assert made.pipeline.target.ops in OPS
    own, small = (memory_of(made.bundle, ops).models[0] for ops in ("gqa", "gqa-kv16"))
    assert own.caches == 2 * small.caches
    assert own.packed == small.packed
    said = CliRunner().invoke(inspect, ["--bundle", str(made.bundle.folder)]).output
    assert "    caches in    float16, " in said


def test_missing_fp16_cache_variant_error_has_export_command(pairs):
    bundle = pairs.bundle("gpt2")
    with pytest.raises(BundleError, match=r"export the pair with --ops gqa --cache fp16$"):
        specedge.load(bundle.folder, ops="gqa-kv16")


@pytest.mark.slow(exhaustive=True)
def test_verify_passes_with_fp16_cache(made):
    for ops in SETS:
        found = CliRunner().invoke(verify, ["--bundle", str(made.bundle.folder), "--ops", ops])
        assert found.exit_code == 0, found.output
