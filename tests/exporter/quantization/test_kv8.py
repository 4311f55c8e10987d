"""Graph variants with caches in int8, whose scales are static."""

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto

import published
import specedge
from auditing import Ticks
from cases import exhaustive, slow
from checkpoints import make_config, make_model, make_tokenizer, save
from quantized import PROMPTS, Made, check_greedy
from specedge.bundle.manifest import PREFILL_LENGTH
from specedge.bundle.precision import OLDEST_ONNXRUNTIME
from specedge.cli.inspect import inspect
from specedge.cli.verify import verify
from specedge.errors import BundleError, DeviceError, ExportError
from specedge.exporter import export
from specedge.exporter.graph.int8_caches import quantize_caches
from specedge.exporter.quantization import cache_scales, float_model
from specedge.exporter.quantization.cache_scales import measure_scales
from specedge.exporter.verification import partition, runner
from specedge.runtime.backend import model_session
from specedge.runtime.backend.batched_self_test import share_passes
from specedge.runtime.backend.model_session import choose_ops
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.requests.loader import memory_of
from specedge.verification import graph_checks
from specedge.verification.report import PASSED

KV8 = "gqa-kv8"
TOKENS = [7 * i % 90 + 2 for i in range(60)]
CASES = [("llama", "fp32"), slow(("llama", "int8")), exhaustive(("gpt2", "int4"))]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def made(request, tmp_path_factory):
    kind, precision = request.param
    folder = tmp_path_factory.mktemp("int8-caches")
    return Made(folder, kind, draft="self:1", precision=precision, cache="int8")


@pytest.fixture(scope="module")
def models(made):
    return {ops: specedge.load(made.bundle.folder, ops=ops).target for ops in ("gqa", KV8)}


def outputs(model, cuts):
    """Return logits [60, V] and cache rows of passes that end at `cuts`."""
    logits = []
    for end in cuts:
        logits.append(model.forward(TOKENS[model.length : end]).array().copy())
    return np.concatenate(logits), model.cache_rows(0, len(TOKENS))


def are_equal(outputs, expected):
    logits, rows = outputs
    expected_logits, expected_rows = expected
    return np.array_equal(logits, expected_logits[-len(logits) :]) and all(
        map(np.array_equal, rows, expected_rows)
    )


def test_only_attention_with_group_query_attention_has_int8_caches(made):
    for model in made.bundle.models.values():
        assert list(model.parity) == ["onnx", "gqa", KV8]
        assert {state.dtype for state in model.states_of(KV8)} == {"int8"}
        path = made.bundle.path(model.graph("decoder", KV8).file)
        graph = onnx.load(path, load_external_data=False).graph
        types = [v.type.tensor_type.elem_type for v in graph.output if v.name != "logits"]
        assert {*types} == {TensorProto.INT8}


def test_fresh_chunked_and_reused_prefills_are_bitwise_equal(models):
    model = models[KV8]
    model.truncate(0)
    fresh = outputs(model, [60])
    for cuts in (range(1, 61), (2, 5, 21, 38, 60), (59, 60), (16, 32, 48, 60)):
        model.truncate(0)
        assert are_equal(outputs(model, cuts), fresh)
    for array in model.cache.arrays.values():
        array[:, :, 23:] = np.random.default_rng(0).integers(-128, 128, array[:, :, 23:].shape)
    model.truncate(0)
    model.cache.extend(TOKENS)
    assert model.reuse([*TOKENS[:23], 1]) == 23
    assert are_equal(outputs(model, [60]), fresh)


def test_int8_cache_variants_are_batch_invariant(made):
    made.check_rows()
    for model in made.bundle.models.values():
        assert {1, 2, 5, 64} <= {*model.parity[KV8].invariant_lengths}


def test_logits_are_close_to_those_with_float_caches(made, models):
    for model in models.values():
        model.truncate(0)
    expected, logits = (outputs(models[ops], [60])[0] for ops in ("gqa", KV8))
    difference = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 0 < difference < 0.1  # random weights amplify errors
    for model in made.bundle.models.values():
        report, plain = model.quantization[KV8], model.quantization.get("gqa")
        assert report.num_tokens > 1000
        assert 0 < report.divergence < 0.01 + (plain.divergence if plain else 0)
        assert 0 < report.error < 0.2 + (plain.error if plain else 0)
        assert "with caches in int8" in model.describe_parity(KV8)


def test_first_layer_caches_are_rounded_to_multiples_of_the_scales(made, models):
    """Caches of later layers also have the errors of earlier ones."""
    path = made.bundle.path(made.bundle.target.graph("decoder", KV8).file)
    constants = {x.name: x for x in onnx.load(path, load_external_data=False).graph.initializer}
    for model in models.values():
        model.truncate(0)
    expected, rows = (outputs(models[ops], [60])[1][:2] for ops in ("gqa", KV8))
    for name, floats, integers in zip(("key", "value"), expected, rows, strict=True):
        scale = onnx.numpy_helper.to_array(constants[f"past_key_values.0.{name}.scale"])[0]
        assert np.array_equal(integers, np.rint(floats / scale).clip(-128, 127))
        assert np.mean(np.abs(integers) == 127) < 0.02
        assert np.abs(integers).max() > 90


@pytest.mark.slow
def test_scales_represent_rotated_keys_at_the_end_of_the_context(tmp_path):
    """Rotation of channel 7 into channel 15 takes more tokens than a text has."""

    def grow(model):
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight[7::16] *= 20
        return model

    rope = {"rope_type": "default", "rope_theta": 1500.0}
    config = make_config("llama", layers=1, context=1024, kv_heads=2, rope_parameters=rope)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    target = save(grow(make_model(config)), tokenizer, tmp_path / "target")
    export(None, target, tmp_path / "bundle", ops="gqa", cache="int8")
    model = specedge.load(tmp_path / "bundle", ops=KV8).target
    model.prefill((TOKENS * 20)[:1020])
    keys = model.cache_rows(900, 1020)[0]
    assert np.mean(np.abs(keys[..., 15]) >= 127) < 0.05


def test_greedy_text_equals_plain_decoding_with_int8_caches(made):
    pipeline = specedge.load(made.bundle.folder, ops=KV8)
    assert pipeline.target.ops == pipeline.draft.ops == KV8
    for k in (1, 4, 8):
        check_greedy(pipeline, PROMPTS[k % 3], 24, k)


def test_batched_passes_are_bitwise_those_of_one_sequence(made):
    for model in made.bundle.models.values():
        first = OrtModel(made.bundle, model, Device(), KV8)
        models, note = share_passes(made.bundle, model, Device(), [first, first.with_new_cache()])
        assert note is None
        assert models[0].batch.max_rows > PREFILL_LENGTH


def test_int8_cache_is_opt_in_and_takes_a_quarter_of_the_memory(made):
    assert made.pipeline.target.ops != KV8
    own, small = (memory_of(made.bundle, ops).models[0] for ops in ("gqa", KV8))
    assert own.caches == 4 * small.caches
    assert own.packed == small.packed
    output = CliRunner().invoke(inspect, ["--bundle", str(made.bundle.folder)]).output
    assert "    caches in    int8, " in output


def test_only_cpus_run_int8_caches(made):
    with pytest.raises(DeviceError, match=f"cuda runs .*, not '{KV8}'"):
        choose_ops(made.bundle.target, KV8, Device("cuda"))


def test_old_onnxruntime_is_rejected_by_name(made, monkeypatch):
    oldest = OLDEST_ONNXRUNTIME["int8_caches"]
    monkeypatch.setattr(
        model_session, "onnxruntime", lambda: type("", (), {"__version__": "1.26.0"})
    )
    with pytest.raises(DeviceError, match=f"'{KV8}' requires ONNX Runtime {oldest} or later"):
        specedge.load(made.bundle.folder, ops=KV8)


@pytest.mark.parametrize("ops", [KV8, "gqa"])
def test_graphs_with_and_without_int8_caches_agree(made, ops):
    def open_(model, ops, graph):
        return OrtModel(made.bundle, model, Device(), ops, graph)

    check = graph_checks.graphs(made.bundle, lambda model: ops, open_, Ticks(10**6).budget)
    assert check.status == PASSED, check


@pytest.mark.parametrize(
    "name",
    map(exhaustive, ("gemma-2-2b", "gemma-3-1b", "gpt-oss-20b", "bloom-560m", "pythia-160m")),
)
def test_windows_softcaps_sinks_biases_and_partial_rotary_have_int8_caches(name, tmp_path):
    model = published.build(name, tmp_path / "target")
    tokenizer = make_tokenizer(tmp_path / "target")
    published.save(name, model, tokenizer, tmp_path / "target")
    bundle = export(
        None, tmp_path / "target", tmp_path / "bundle",
        ops="gqa", precision="fp32", cache="int8", max_length=128,
    )  # fmt: skip
    assert {1, 2, 5, 64} <= {*bundle.target.parity[KV8].invariant_lengths}
    # One token of gpt-oss has a third of the divergence of 120 tokens.
    limit = 0.1 if bundle.target.num_experts else 0.02
    assert 0 < bundle.target.quantization[KV8].divergence < limit


@pytest.mark.slow(exhaustive=True)
def test_large_model_is_calibrated_by_subgraph(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "WHOLE_BYTES", 0)
    monkeypatch.setattr(partition, "PART_BYTES", 100_000)
    made = Made(tmp_path, "llama", draft="none", precision="int8", ops="gqa", cache="int8")
    plain, report = (made.bundle.target.quantization[ops] for ops in ("gqa", KV8))
    assert 0 < report.divergence < 0.01 + plain.divergence
    assert {1, 2, 5} <= {*made.bundle.target.parity[KV8].invariant_lengths}


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("ops", [KV8, "auto"])
def test_verify_passes_with_int8_caches(made, ops):
    result = CliRunner().invoke(verify, ["--bundle", str(made.bundle.folder), "--ops", ops])
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 1 / 2])
@pytest.mark.parametrize("state", ["0.key", "1.value"])
def test_a_wrong_scale_of_one_channel_is_rejected(tmp_path, monkeypatch, state, factor):
    def plant(model, scales):
        name = f"past_key_values.{state}"
        scale = scales[name].copy()
        scale[1, 0, 5] *= factor
        quantize_caches(model, {**scales, name: scale})

    monkeypatch.setattr(float_model, "quantize_caches", plant)
    with pytest.raises(ExportError, match=rf"target \(gqa-kv8\): .*{state}.*int8"):
        Made(tmp_path, "llama", draft="none", precision="fp32", ops="gqa", cache="int8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "message"), [(40, "its KL divergence in int8"), (1 / 40, "key")]
)
def test_calibration_with_wrong_scales_is_rejected(tmp_path, monkeypatch, factor, message):
    def plant(model, texts):
        return {name: factor * scale for name, scale in measure_scales(model, texts).items()}

    monkeypatch.setattr(cache_scales, "measure_scales", plant)
    with pytest.raises(ExportError, match=rf"target \(gqa-kv8\): .*{message}"):
        Made(tmp_path, "llama", draft="none", precision="fp32", ops="gqa", cache="int8")


def test_int8_caches_need_group_query_attention(tmp_path):
    with pytest.raises(ExportError, match="--cache int8 requires GroupQueryAttention; omit"):
        export(None, "b", tmp_path / "out", cache="int8", ops="onnx")
    with pytest.raises(ValueError, match="cache must be one of fp16, int8, got 'int4'"):
        export(None, "b", tmp_path / "out", cache="int4")


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ("auto", "12, which is not a multiple of 8.* in gqa, which --cache int8 requires$"),
        slow("all", "^target: --cache int8 requires GroupQueryAttention"),
    ],
)
def test_model_without_group_query_attention_is_rejected(tmp_path, ops, message):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    config = make_config("llama", layers=1, context=96, hidden=24, heads=2)
    target = save(make_model(config), tokenizer, tmp_path / "target")
    with pytest.raises(ExportError, match=message):
        export(None, target, tmp_path / "out", cache="int8", ops=ops)


def test_missing_int8_cache_variant_error_has_export_command(pairs):
    bundle = pairs.bundle("gpt2")
    with pytest.raises(BundleError, match=r"export the pair with --ops gqa --cache int8$"):
        specedge.load(bundle.folder, ops=KV8)
