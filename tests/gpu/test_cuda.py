"""What the host does for a GPU: placement, copies, waits, captured graphs, memory, errors.

Over a stand-in for CUDA, where kernels compute nothing: what a pass would have written is planted.
"""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import standin

import specedge
from gpu.conftest import PAIRS, run
from specedge.bundle import Bundle
from specedge.errors import DeviceError, SpecEdgeError
from specedge.manifest import num_best
from specedge.runtime import loading
from specedge.runtime.backend import gpu_buffers
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.backend.unrolled import Unrolled

if reason := standin.why_not():
    pytest.skip(reason, allow_module_level=True)
PROMPT = "def f(self):"
VOCAB_SIZE = 512
K = 4


@contextmanager
def loaded(folder, **options):
    pipeline = specedge.load(folder, device="cuda", **options)
    try:
        yield pipeline
    finally:
        pipeline.close()


@pytest.fixture
def planted(monkeypatch):
    """Let every pass have said that its best logits are of the tokens 1, 2, 3 ..., and every draft
    that it is of token 1.
    """
    fetch = gpu_buffers.GpuBuffers.fetch

    def planting(self, array):
        found = fetch(self, array)
        num = (array.shape[-1] - 1) // 2
        if array.shape[-1] == 2 * num_best(VOCAB_SIZE) + 1:
            found[..., :] = [*-np.arange(num), *(1 + np.arange(num)), 0]
        if array.dtype == "int64":
            found[...] = 1  # what an unrolled graph drafts
        return found

    monkeypatch.setattr(gpu_buffers.GpuBuffers, "fetch", planting)


@pytest.fixture
def one_call(monkeypatch):
    """A draft of K tokens by one call takes as long as one pass."""
    monkeypatch.setattr(Unrolled, "_median", lambda self, run: 1.0)


@pytest.fixture
def pipeline(cuda, pairs, planted, one_call):
    with loaded(pairs("fp32-fp16")) as found:
        yield found


@pytest.mark.parametrize("name", PAIRS)
def test_no_node_of_any_graph_is_on_the_cpu_nor_copied_to_it(cuda, pairs, name):
    import placement

    bundle = Bundle.read(pairs(name))
    for role, model in bundle.models.items():
        graphs = [graph for graph in model.graphs if model.is_for_gpus(graph.ops)]
        assert {graph.name for graph in graphs} >= {"scored", "decoder", "step", "verify"}
        assert ("unrolled" in {graph.name for graph in graphs}) is (role == "draft")
        for graph in graphs:
            path = str(bundle.path(graph.file))
            _, placed, copies, _ = placement.open_session(path, forbid_cpu=True, graph=True)
            assert set(placed) == {"CUDAExecutionProvider"}, graph.file
            assert not copies


def test_float32_groupqueryattention_is_no_kernel_of_a_gpu(cuda, pairs):
    with pytest.raises(DeviceError, match=r"cuda runs only .*onnx of its op sets, not 'gqa'"):
        specedge.load(pairs("fp32-fp16"), device="cuda", ops="gqa")
    bundle = Bundle.read(pairs("fp32-fp16"))
    path = bundle.path(bundle.target.graph("decoder", "gqa").file)
    with pytest.raises(DeviceError, match="no kernels for: 2 GroupQueryAttention; take another"):
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
def test_a_request_runs_through_in_the_best_op_set(cuda, pairs, name, ops):
    with loaded(pairs(name)) as pipeline:
        assert (pipeline.target.ops, pipeline.draft.ops) == (ops, ops)
        for options in ({}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.0}):
            found = pipeline.generate(PROMPT, 12, ignore_eos=True, seed=1, **options)
            assert len(found.tokens) == 12


def cost_of_rounds(cuda, pipeline, **options):
    """What the second half of a long request does, and how many passes it has."""
    found = []
    for length in (20, 20, 40):
        pipeline.forget()
        with cuda.counted() as counts:
            request = {"ignore_eos": True, "seed": 1, "num_draft_tokens": K, **options}
            stats = pipeline.generate(PROMPT, length, **request).stats
        passes = stats.num_draft_passes + stats.num_target_passes
        found.append(counts | {"passes": passes, "rounds": stats.num_rounds})
    return {name: found[2][name] - found[1][name] for name in found[2]}


def test_a_greedy_round_waits_twice_for_its_draft_and_twice_for_the_target(cuda, pipeline):
    counts = cost_of_rounds(cuda, pipeline)
    assert counts["passes"] == (K + 1) * counts["rounds"] > K
    assert counts["blocking"] <= 4 * counts["rounds"]
    assert counts["d2h"] == counts["graph_launches"] == 2 * counts["rounds"]
    assert counts["d2h_bytes"] < 4096 * counts["rounds"]
    assert counts["h2d"] == counts["async_h2d"] == counts["async_d2h"] == counts["launches"] == 0
    assert counts["racing_copies"] == 0
    assert counts["mallocs"] <= 0


def test_the_steps_of_a_draft_copy_no_buffer(cuda, pipeline):
    session, cache = pipeline.draft._unrolled._session, pipeline.draft.cache
    for length in (1, 2):
        bound = session.bind(cache, length, 1)
        with cuda.counted() as counts:
            session.run(bound, [5] * length)
        assert counts["launches"] > K
        copied = counts["d2d_bytes"] + counts["async_d2d_bytes"]
        assert copied < pipeline.bundle.draft.cache_of("gqa-fp16").size / len(cache.arrays)


def test_a_draft_that_one_call_makes_no_faster_takes_passes(cuda, pairs, planted, monkeypatch):
    seconds = iter([K + 0.5, 1.0])
    monkeypatch.setattr(Unrolled, "_median", lambda self, run: next(seconds))
    with loaded(pairs("fp32-fp16")) as pipeline:
        counts = cost_of_rounds(cuda, pipeline)
        assert counts["graph_launches"] == counts["passes"] > K


def test_a_round_waits_twice_for_each_pass_and_fetches_a_few_kilobytes(cuda, pipeline):
    counts = cost_of_rounds(cuda, pipeline, temperature=0.9, top_k=20)
    assert counts["passes"] > K
    assert counts["blocking"] <= 2 * counts["passes"]
    assert counts["d2h"] == counts["graph_launches"] == counts["passes"]
    assert counts["d2h_bytes"] < 4096 * counts["passes"]
    assert counts["h2d"] == counts["async_h2d"] == counts["async_d2h"] == counts["launches"] == 0
    assert counts["racing_copies"] == 0
    assert counts["mallocs"] <= 0


def test_drawing_from_all_tokens_fetches_whole_rows_once_a_pass(cuda, pipeline):
    counts = cost_of_rounds(cuda, pipeline, temperature=1.0)
    assert counts["d2h"] == counts["passes"]
    assert counts["blocking"] == 2 * counts["passes"]


def test_each_length_is_captured_at_load_and_only_replayed_afterwards(cuda, pairs):
    with cuda.counted() as counts:
        pipeline = specedge.load(pairs("fp32-fp16"), device="cuda")
    assert counts["captures"] == K + 1 + 2 + 2  # the target's, the draft's, and of K steps
    assert counts["failed_captures"] == 0
    with cuda.counted() as counts:
        for length in range(1, K + 2):
            pipeline.target.truncate(0)
            pipeline.target.forward([1] * length)
    assert (counts["launches"], counts["captures"]) == (0, 0)
    assert counts["graph_launches"] == K + 1
    pipeline.close()


def test_all_slots_draft_over_one_copy_of_the_drafts_weights(cuda, pairs, planted, one_call):
    with (
        cuda.counted() as counts,
        loaded(pairs("fp32-fp16"), slots=2) as pipeline,
    ):
        first, second = (slot.draft._unrolled for slot in pipeline.slots.all)
        assert first._session is second._session
        assert first._cache is not second._cache
    assert counts["captures"] == 2 * (K + 1 + 2 + 2)


def test_a_length_beyond_the_exported_one_runs_without_a_graph(cuda, pipeline):
    for _ in range(2):
        with cuda.counted() as counts:
            pipeline.target.truncate(0)
            pipeline.target.forward([1] * (K + 2))
    assert counts["launches"] > 0
    assert counts["captures"] == counts["graph_launches"] == 0


def test_a_twin_has_graphs_of_its_own_over_its_own_cache(cuda, pipeline):
    twin = pipeline.target.twin()
    with cuda.counted() as counts:
        twin.forward([1])
    assert counts["captures"] == 1
    first, second = (m.cache.arrays["0.key"].value.data_ptr() for m in (pipeline.target, twin))
    assert first != second


def test_a_cache_shares_no_memory_with_what_captured_passes_write_again(cuda, pairs):
    with loaded(pairs("fp32-fp16"), ops="onnx-fp16") as pipeline:
        with cuda.counted() as counts:
            twin = pipeline.target.twin()  # the audit makes one after all is captured
        assert counts["mallocs"] >= len(twin.cache.arrays)
        twin.close()


def test_whichever_thread_asks_captured_passes_are_replayed(cuda, pipeline):
    def ask():
        pipeline.generate(PROMPT, 12, ignore_eos=True, num_draft_tokens=K)

    ask()
    before = cuda.counts()["graph_execs"]
    with cuda.counted() as counts:
        for _ in range(2):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
    assert counts["captures"] == 0
    assert counts["graph_launches"] > 2 * K
    assert cuda.counts()["graph_execs"] == before


def test_a_pass_that_fails_says_so_in_the_thread_that_asked(cuda, pairs):
    bundle = Bundle.read(pairs("fp32-fp16"))
    model = OrtModel(bundle, bundle.target, Device("cuda"))
    bound = model._session.bind(model.cache, 1, 1)
    bound.binding.clear_binding_inputs()
    with pytest.raises(SpecEdgeError, match="a pass of target failed in ONNX Runtime"):
        model._session.run(bound, [1])
    assert model.length == 0
    model.forward([1])
    model.close()


def test_a_cache_that_does_not_fit_is_one_clear_error(cuda, pairs, monkeypatch):
    bundle = Bundle.read(pairs("fp32-fp16"))
    model = OrtModel(bundle, bundle.target, Device("cuda"))
    monkeypatch.setenv("STANDIN_MEMORY_MB", "0")
    with pytest.raises(DeviceError, match="not enough memory on cuda for target"):
        model.twin()
    model.close()


def test_caches_are_written_where_they_are_read(cuda, pipeline):
    addresses = [a.value.data_ptr() for a in pipeline.target.cache.arrays.values()]
    with cuda.counted() as counts:
        pipeline.target.truncate(0)
        pipeline.target.forward([1])
    cache = pipeline.bundle.target.cache_of(pipeline.target.ops)
    assert counts["d2d_bytes"] + counts["async_d2d_bytes"] < cache.size
    assert addresses == [a.value.data_ptr() for a in pipeline.target.cache.arrays.values()]


def test_memory_returns_when_a_pipeline_is_closed(cuda, pairs):
    names = ("device_bytes", "pinned_bytes", "streams", "events", "graph_execs")
    before = cuda.counts()
    for _ in range(2):
        with loaded(pairs("fp32-fp16")) as pipeline:
            pipeline.generate(PROMPT, 12, ignore_eos=True, temperature=1.0)
            held = cuda.counts()
        assert held["device_bytes"] > before["device_bytes"]
        assert held["pinned_bytes"] > before["pinned_bytes"]
        after = cuda.counts()
        assert {name: after[name] for name in names} == {name: before[name] for name in names}


def test_a_tied_table_is_on_the_device_once(cuda, pairs):
    bundle = Bundle.read(pairs("fp32-fp16"))
    before = cuda.counts()["device_bytes"]
    session = Device("cuda").open(bundle.path(bundle.target.graph("scored", "gqa-fp16").file))
    held = cuda.counts()["device_bytes"] - before
    assert held < 1.05 * bundle.files[bundle.target.weights].size + 2**16
    del session


def test_auto_is_the_gpu_where_it_works_and_the_bundle_has_graphs_for_it(cuda, pairs, monkeypatch):
    for reason, ops in ((None, "gqa-fp16"), ("no driver", "gqa")):
        monkeypatch.setattr(loading, "why_not", lambda device, reason=reason: reason)
        pipeline = specedge.load(pairs("fp32-fp16"), device="auto")
        assert pipeline.target.ops == ops
        pipeline.close()
    monkeypatch.setattr(loading, "why_not", lambda device: None)
    assert specedge.load(device="auto").target.ops == "gqa"  # the embedded pair has none


def test_a_draft_on_the_cpu_beside_a_target_on_the_gpu(cuda, pairs):
    with loaded(pairs("fp32-fp16"), draft_device="cpu") as pipeline:
        assert (pipeline.target.ops, pipeline.draft.ops) == ("gqa-fp16", "gqa")
        found = pipeline.generate(PROMPT, 12, ignore_eos=True, num_draft_tokens=2)
        assert len(found.tokens) == 12
        assert found.stats.num_draft_passes


def test_without_the_private_way_to_pinned_memory_public_calls_serve(
    cuda, pairs, planted, monkeypatch
):
    monkeypatch.setattr(gpu_buffers.GpuBuffers, "_make_pinned", None)
    with loaded(pairs("fp32-fp16")) as pipeline:
        found = pipeline.generate(PROMPT, 12, ignore_eos=True, num_draft_tokens=K)
        assert found.tokens == [1] * 12
        tokens = pipeline.target._passes[K + 1].arrays["tokens"]
        assert tokens.value.numpy().tolist() == [[1] * (K + 1)]


def test_what_the_host_writes_is_what_the_device_reads(cuda, pipeline):
    pipeline.target.truncate(0)
    pipeline.target.forward([5, 6])
    pipeline.target.forward([7, 8])
    arrays = pipeline.target._passes[2].arrays
    assert arrays["tokens"].value.numpy().tolist() == [[7, 8]]
    assert arrays["past_length"].value.numpy().tolist() == [2]


def test_a_pass_of_the_cpu_is_asked_for_in_vain_of_a_gpu_model(cuda, pairs):
    bundle = Bundle.read(pairs("int8-fp16"))
    model = OrtModel(bundle, bundle.target, Device("cuda"))
    assert model.ops == "gqa-fp16"
    model.close()
    with pytest.raises(DeviceError, match="not 'onnx'"):
        OrtModel(bundle, bundle.target, Device("cuda"), "onnx")


def test_a_whole_request_of_the_command_line(cuda, pairs):
    done = run(
        "generate", PROMPT, "--bundle", str(pairs("fp32-fp16")), "--device", "cuda",
        "-n", "12", "--ignore-eos",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "12 tokens" in done.stderr


def test_the_command_lines_thread_pool_serves_a_draft_on_the_cpu_beside_a_gpu(cuda, pairs):
    done = run(
        "generate", PROMPT, "--bundle", str(pairs("fp32-fp16")), "--device", "cuda",
        "--draft-device", "cpu", "-n", "12", "--ignore-eos", "-k", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "12 tokens" in done.stderr


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"STANDIN_DEVICES": 0}, "specedge: cuda does not work here: "),
        ({"STANDIN_DRIVER": 12040}, "specedge: cuda does not work here: "),
        ({"STANDIN_MEMORY_MB": 0}, "specedge: not enough memory on cuda for "),
    ],
)
def test_a_machine_that_lacks_something_is_one_clear_line(cuda, pairs, setting, message):
    done = run(
        "generate", PROMPT, "--bundle", str(pairs("fp32-fp16")), "--device", "cuda", **setting
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_library_that_is_missing_is_one_clear_line(cuda, pairs, tmp_path):
    folder = Path(cuda.build())
    for name in cuda.LIBRARIES[:3]:
        (tmp_path / name).symlink_to(folder / name)
    command = [sys.executable, "-m", "specedge", "generate", PROMPT, "--device", "cuda"]
    done = subprocess.run(
        [*command, "--bundle", str(pairs("fp32-fp16"))],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("specedge: cuda does not work here: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_device_that_there_is_not_is_named(cuda, pairs):
    done = run("generate", PROMPT, "--bundle", str(pairs("fp32-fp16")), "--device", "cuda:7")
    assert done.returncode == 1
    assert "specedge: cuda:7: there is none of this number, or it fails" in done.stderr
