"""Host-side CUDA behavior: placement, copies, synchronization and graph capture.

Over a stand-in for CUDA, where kernels compute nothing: what a pass would have written is planted.
"""

from collections import Counter
from itertools import cycle

import numpy as np
import pytest
import standin

import specedge
from gpu.conftest import PAIRS, PROMPT, VOCAB_SIZE, K, loaded
from specedge.bundle import Bundle
from specedge.bundle.gpu_signatures import ONE_CALL
from specedge.bundle.signature import SAMPLING_SETTINGS
from specedge.errors import DeviceError, SpecEdgeError
from specedge.runtime.backend.cuda.draft_graphs import (
    DraftGraph,
    GreedyDraftGraph,
    SampledDraftGraph,
)
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.decoding.verification import DraftRequest
from specedge.runtime.requests import loader
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

if reason := standin.why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.parametrize("name", PAIRS)
def test_no_node_of_any_graph_is_on_the_cpu_nor_copied_to_it(cuda, pairs, name):
    import placement

    bundle = Bundle.read(pairs(name))
    for role, model in bundle.models.items():
        graphs = [graph for graph in model.graphs if model.supports_gpu(graph.ops)]
        assert {graph.name for graph in graphs} >= {"scored", "decoder", "step", "verify"}
        assert ({graph.name for graph in graphs} >= {*ONE_CALL}) is (role == "draft")
        for graph in graphs:
            path = str(bundle.path(graph.file))
            _, placed, copies, _ = placement.open_session(path, forbid_cpu=True, graph=True)
            assert set(placed) == {"CUDAExecutionProvider"}, graph.file
            assert not copies


def test_float32_group_query_attention_is_rejected_on_cuda(cuda, pairs):
    with pytest.raises(
        DeviceError, match=r"cuda runs only .*onnx of its graph variants, not 'gqa'"
    ):
        specedge.load(pairs("fp32-fp16"), device="cuda", ops="gqa")
    bundle = Bundle.read(pairs("fp32-fp16"))
    path = bundle.path(bundle.target.graph("decoder", "gqa").file)
    with pytest.raises(DeviceError, match=r"no CUDA kernels .*: 2 GroupQueryAttention"):
        Device("cuda").open(path)


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("fp32-fp16", "gqa-fp16"),
        ("int8-fp16", "gqa-fp16"),
        ("int4-fp16", "gqa-fp16"),
        ("fp32-bf16", "gqa-bf16"),
        ("int8-fp32", "onnx-fp32"),
    ],
)
def test_request_completes_in_the_best_graph_variant(cuda, pairs, name, ops):
    with loaded(pairs(name)) as pipeline:
        assert (pipeline.target.ops, pipeline.draft.ops) == (ops, ops)
        for options in ({}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.0}):
            found = pipeline.generate(PROMPT, 12, ignore_eos=True, seed=1, **options)
            assert len(found.tokens) == 12


def cost_of_rounds(cuda, pipeline, **options):
    """Return the CUDA call counts and number of passes of the second half of a long request."""
    found = []
    for length in (20, 20, 40):
        pipeline.forget()
        with cuda.counted() as counts:
            request = {"ignore_eos": True, "seed": 1, "num_draft_tokens": K, **options}
            stats = pipeline.generate(PROMPT, length, **request).stats
        passes = stats.num_draft_passes + stats.num_target_passes
        found.append(counts | {"passes": passes, "rounds": stats.num_rounds})
    return {name: found[2][name] - found[1][name] for name in found[2]}


def test_greedy_round_synchronizes_twice_per_model(cuda, pipeline):
    counts = cost_of_rounds(cuda, pipeline)
    assert counts["passes"] == (K + 1) * counts["rounds"] > K
    assert counts["blocking"] <= 4 * counts["rounds"]
    assert counts["d2h"] == counts["graph_launches"] == 2 * counts["rounds"]
    assert counts["d2h_bytes"] < 4096 * counts["rounds"]
    assert counts["h2d"] == counts["async_h2d"] == counts["async_d2h"] == counts["launches"] == 0
    assert counts["racing_copies"] == 0
    assert counts["mallocs"] <= 0


def test_sampled_round_synchronizes_twice_per_model(cuda, pipeline):
    counts = cost_of_rounds(cuda, pipeline, temperature=0.9, top_k=20, top_p=0.99, min_p=1e-4)
    assert counts["passes"] == (K + 1) * counts["rounds"] > K
    assert counts["blocking"] <= 4 * counts["rounds"]
    assert counts["d2h"] == counts["graph_launches"] == 2 * counts["rounds"]
    assert counts["d2h_bytes"] < 8192 * counts["rounds"]
    assert counts["h2d"] == counts["async_h2d"] == counts["async_d2h"] == counts["launches"] == 0
    assert counts["racing_copies"] == 0
    assert counts["mallocs"] <= 0


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.2}], ids=str
)
def test_full_distribution_row_is_fetched_only_after_rejection(
    cuda, pipeline, planted, monkeypatch, options
):
    planted["num_weights"] = VOCAB_SIZE - 1
    fetched = []
    fetch = SampledDraftGraph._fetch
    monkeypatch.setattr(
        SampledDraftGraph, "_fetch", lambda self, array: fetched.append(array) or fetch(self, array)
    )
    counts = cost_of_rounds(cuda, pipeline, **options)
    assert fetched
    assert all(array.shape == (1, VOCAB_SIZE) for array in fetched)
    assert counts["graph_launches"] == 2 * counts["rounds"]
    # Block verification computes the residual distribution of each rejected prefix.
    assert counts["d2h"] <= (2 + K) * counts["rounds"]
    assert counts["blocking"] <= (4 + K) * counts["rounds"]
    assert counts["h2d"] == counts["async_h2d"] == counts["async_d2h"] == counts["launches"] == 0
    assert counts["racing_copies"] == 0


def test_accepted_draft_fetches_no_distribution_row(cuda, pipeline, planted):
    planted["num_weights"] = VOCAB_SIZE - 1
    draft = pipeline.draft
    draft.truncate(0)
    with cuda.counted() as counts:
        request = DraftRequest(History([5]), K, Sampling(temperature=1.0), np.full(K, 0.5))
        made = draft.draft([5], request)
        assert all(made.distribution(i).of(1) > 0.6 for i in range(K))
    assert made.tokens == [1] * K
    assert (counts["graph_launches"], counts["d2h"], counts["blocking"]) == (1, 1, 2)
    assert counts["d2h_bytes"] < 1100 * K


def test_sampling_inputs_are_on_the_device(cuda, pipeline):
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.8, min_p=0.1, repetition_penalty=1.5)
    pipeline.draft.truncate(0)
    request = DraftRequest(History([5, 7]), 2, sampling, np.array([0.25, 0.75]))
    pipeline.draft.draft([5], request)
    (sampled,) = (
        call for call in pipeline.draft._draft_graphs if isinstance(call, SampledDraftGraph)
    )
    arrays = {role: array.value.numpy() for role, array in sampled._passes[1].arrays.items()}
    told = {role: arrays[role].item() for role in SAMPLING_SETTINGS}
    assert told == {name: pytest.approx(getattr(sampling, name)) for name in SAMPLING_SETTINGS}
    assert arrays["uniforms"].tolist() == [0.25, 0.75] * (K // 2)
    assert arrays["seen"][0].nonzero()[0].tolist() == [5, 7]


def test_draft_steps_have_the_fused_layers_of_the_decoder(pairs):
    import onnx

    bundle = Bundle.read(pairs("fp32-fp16"))
    num_nodes = {}
    for graph in ("decoder", *ONE_CALL):
        path = bundle.path(bundle.draft.graph(graph, "gqa-fp16").file)
        nodes = onnx.load(path, load_external_data=False).graph.node
        num_nodes[graph] = Counter(node.op_type for node in nodes if node.domain)
    assert num_nodes["decoder"].keys() >= {"SkipSimplifiedLayerNormalization", "QuickGelu"}
    for graph in ONE_CALL:
        steps = {op: K * count for op, count in num_nodes["decoder"].items()}
        assert steps.items() <= num_nodes[graph].items()


@pytest.mark.parametrize("at", range(len(ONE_CALL)), ids=ONE_CALL)
def test_draft_steps_do_not_copy_cache_buffers(cuda, pipeline, at):
    session, cache = pipeline.draft._draft_graphs[at]._session, pipeline.draft.cache
    for length in (1, 2):
        bound = session.bind(cache, length, 1)
        with cuda.counted() as counts:
            session.run(bound, [5] * length)
        assert counts["launches"] > K
        logits = 4 * VOCAB_SIZE * (K - 1)  # of the first row of each step
        copied = counts["d2d_bytes"] + counts["async_d2d_bytes"] - logits
        assert copied < pipeline.bundle.draft.cache_size("gqa-fp16") / len(cache.arrays)


def test_draft_uses_passes_if_one_call_is_not_faster(cuda, pairs, planted, monkeypatch):
    seconds = cycle([K + 0.5, 1.0])
    monkeypatch.setattr(DraftGraph, "_median", lambda self, run: next(seconds))
    monkeypatch.setattr(OrtModel, "_drafts_equal_tokens", lambda self, call: True)
    with loaded(pairs("fp32-fp16")) as pipeline:
        assert not pipeline.draft._draft_graphs
        counts = cost_of_rounds(cuda, pipeline)
        assert counts["graph_launches"] == counts["passes"] > K


def test_failing_draft_graph_falls_back_to_passes_with_note(cuda, pairs, planted, monkeypatch):
    def fail(self, step, hidden):
        raise SpecEdgeError("a pass of draft failed in ONNX Runtime: no kernel")

    monkeypatch.setattr(DraftGraph, "measure", fail)
    with loaded(pairs("fp32-fp16"), slots=2) as pipeline:
        assert pipeline.note.endswith(
            "its draft graph fails: a pass of draft failed in ONNX Runtime: no kernel"
        )
        found = pipeline.generate(PROMPT, 12, ignore_eos=True, num_draft_tokens=K)
        assert found.stats.num_draft_passes


def test_one_call_speed_is_measured_separately_for_full_distributions(
    cuda, pairs, planted, monkeypatch
):
    seconds = iter([1.0, 1.0, K + 0.5, 1.0, 1.0, 1.0])  # greedy, top-k, all tokens; by passes each
    monkeypatch.setattr(DraftGraph, "_median", lambda self, run: next(seconds))
    monkeypatch.setattr(OrtModel, "_drafts_equal_tokens", lambda self, call: True)
    with loaded(pairs("fp32-fp16")) as pipeline:
        few = cost_of_rounds(cuda, pipeline, temperature=0.9, top_k=20)
        assert few["graph_launches"] == few["passes"]
        whole = cost_of_rounds(cuda, pipeline, temperature=0.9, top_k=100)
        assert whole["graph_launches"] == 2 * whole["rounds"]


def test_draft_graph_with_different_tokens_is_not_used(cuda, pairs, planted, monkeypatch):
    monkeypatch.setattr(DraftGraph, "_median", lambda self, run: 1.0)
    with loaded(pairs("fp32-fp16")) as pipeline:  # stand-in kernels compute nothing: always token 1
        assert [type(call) for call in pipeline.draft._draft_graphs] == [GreedyDraftGraph]


def test_round_synchronizes_twice_per_pass_and_fetches_few_kilobytes(cuda, pipeline):
    counts = cost_of_rounds(cuda, pipeline, temperature=0.9, top_k=20, typical_p=0.99)
    assert counts["passes"] > K
    assert counts["blocking"] <= 2 * counts["passes"]
    assert counts["d2h"] == counts["graph_launches"] == counts["passes"]
    assert counts["d2h_bytes"] < 4096 * counts["passes"]
    assert counts["h2d"] == counts["async_h2d"] == counts["async_d2h"] == counts["launches"] == 0
    assert counts["racing_copies"] == 0
    assert counts["mallocs"] <= 0


def test_unfiltered_sampling_fetches_full_rows_once_per_pass(cuda, pipeline):
    counts = cost_of_rounds(cuda, pipeline, temperature=1.0, typical_p=0.99)
    assert counts["d2h"] == counts["passes"]
    assert counts["blocking"] == 2 * counts["passes"]


def test_each_pass_length_is_captured_once_at_load(cuda, pairs):
    with cuda.counted() as counts:
        pipeline = specedge.load(pairs("fp32-fp16"), device="cuda")
    # Single tokens are padded to two: the target has K lengths, the draft one.
    assert counts["captures"] == K + 1 + 2 + 2  # and two of each graph of K steps
    assert counts["failed_captures"] == 0
    with cuda.counted() as counts:
        for length in range(1, K + 2):
            pipeline.target.truncate(0)
            pipeline.target.forward([1] * length)
    assert (counts["launches"], counts["captures"]) == (0, 0)
    assert counts["graph_launches"] == K + 1
    pipeline.close()


def test_single_token_is_padded_for_float_weights_only(cuda, pairs):
    for name, lengths in (("fp32-fp16", [2, 3]), ("int4-fp16", [1, 2, 3])):
        bundle = Bundle.read(pairs(name))
        model = OrtModel(bundle, bundle.target, Device("cuda"))
        model.warm_up([1, 2, 3])
        assert sorted(model._passes) == [(n, n) for n in lengths]
        model.close()


def test_draft_graph_reads_a_single_token_together_with_the_one_before(cuda, pipeline):
    draft = pipeline.draft
    (call, _) = draft._draft_graphs
    for before, positions, tokens in (([], 0, [9]), ([5, 7], 1, [7, 9])):
        draft.truncate(0)
        if before:
            draft.forward(before)
        request = DraftRequest(History([*before, 9]), K, Sampling(), np.full(K, 0.5))
        draft.draft([9], request)
        arrays = call._passes[len(tokens)].arrays
        assert arrays["tokens"].value.numpy().tolist() == [tokens]
        assert arrays["past_length"].value.numpy().tolist() == [positions]
        assert draft.length == len(before) + K


def test_longer_pass_runs_without_cuda_graph(cuda, pipeline):
    for _ in range(2):
        with cuda.counted() as counts:
            pipeline.target.truncate(0)
            pipeline.target.forward([1] * (K + 2))
    assert counts["launches"] > 0
    assert counts["captures"] == counts["graph_launches"] == 0


def test_auto_selects_gpu_if_usable_and_supported_by_bundle(cuda, pairs, monkeypatch):
    for reason, ops in ((None, "gqa-fp16"), ("no driver", "gqa")):
        monkeypatch.setattr(loader, "why_not", lambda device, reason=reason: reason)
        pipeline = specedge.load(pairs("fp32-fp16"), device="auto")
        assert pipeline.target.ops == ops
        pipeline.close()
    monkeypatch.setattr(loader, "why_not", lambda device: None)
    assert specedge.load(device="auto").target.ops == "gqa"  # the embedded pair has none


def test_threads_option_is_rejected_without_cpu_models(cuda, pairs):
    with pytest.raises(DeviceError, match="threads=1 is for models on the CPU, and both run on"):
        specedge.load(pairs("fp32-fp16"), device="cuda", threads=1)
    bundle = Bundle.read(pairs("fp32-fp16"))
    on = loader.devices_of(bundle, "cuda", threads=1, draft_device="cpu")
    assert on == {"target": Device("cuda", 1), "draft": Device("cpu", 1)}


def test_audit_supports_draft_on_another_device(cuda, pairs):
    pytest.importorskip("scipy", reason="the audit needs SciPy")
    from specedge.verification.audit import ExecutionSettings

    bundle = Bundle.read(pairs("fp32-fp16"))
    machinery = ExecutionSettings(Device("cuda"), draft_device=Device("cpu"))
    found = {role: machinery.graph_variant(bundle, model) for role, model in bundle.models.items()}
    assert found == {"target": "gqa-fp16", "draft": "gqa"}
    assert machinery.devices == "cuda and cpu"
    draft = machinery.open(bundle, bundle.draft, "gqa")
    assert draft.invariant_lengths  # of the CPU alone they are known before they are tried
    draft.close()


def test_cpu_draft_with_gpu_target(cuda, pairs):
    with loaded(pairs("fp32-fp16"), draft_device="cpu") as pipeline:
        assert (pipeline.target.ops, pipeline.draft.ops) == ("gqa-fp16", "gqa")
        found = pipeline.generate(PROMPT, 12, ignore_eos=True, num_draft_tokens=2)
        assert len(found.tokens) == 12
        assert found.stats.num_draft_passes


def test_cpu_graph_variant_is_rejected_on_gpu(cuda, pairs):
    bundle = Bundle.read(pairs("int8-fp16"))
    model = OrtModel(bundle, bundle.target, Device("cuda"))
    assert model.ops == "gqa-fp16"
    model.close()
    with pytest.raises(DeviceError, match="not 'onnx'"):
        OrtModel(bundle, bundle.target, Device("cuda"), "onnx")
