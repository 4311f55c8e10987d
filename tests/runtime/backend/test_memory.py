"""Memory estimates, and refusals if memory does not suffice."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
from test_graph_files import INITIALIZER, NODE, field

import measure_memory
import specedge
from specedge.bundle import Bundle, store
from specedge.bundle.graph_scan import parse_weights
from specedge.bundle.manifest import key_value_states
from specedge.errors import DeviceError
from specedge.runtime.backend import memory
from specedge.runtime.backend.memory import ModelMemory, PairMemory
from specedge.runtime.requests import loader

MB = 10**6


def model(name="some/target", **sizes):
    known = {"packed": 800, "unpacked": 80, "opening": 200, "caches": 400, "passes": 20}
    known = {part: MB * size for part, size in (known | sizes).items()}
    return ModelMemory(id=name, weights_dtype="float16", cache_dtype="float32", **known)


@pytest.fixture
def need():
    """A pair that takes 1.3 GB opening and 1.6 GB running."""
    small = dict.fromkeys(("packed", "unpacked", "opening", "caches", "passes"), 40)
    draft = model("some/draft", **small)
    return PairMemory(95 * MB, 5 * MB, (model(), draft), context_length=4096)


def leave(monkeypatch, megabytes):
    monkeypatch.setattr(memory, "available_bytes", lambda: megabytes * MB)


def graph(sizes, *nodes):
    """A graph's bytes: weights by name and size, and nodes as operator, inputs and output."""
    parts = []
    for name, size in sizes.items():
        entry = field(1, b"length") + field(2, str(size).encode())
        parts.append(field(INITIALIZER, field(8, name.encode()) + field(13, entry)))
    for op_type, *inputs, output in nodes:
        read = b"".join(field(1, name.encode()) for name in inputs)
        written = field(2, output.encode()) + field(2, b"second")
        parts.append(field(NODE, read + written + field(4, op_type.encode())))
    return field(7, b"".join(parts))


def held(content, is_16_bit=False, is_32_bit=False):
    """Packed and unpacked bytes of a graph's weights."""
    found = [
        one
        for weight in parse_weights(content)
        for one in memory._weight_bytes(weight, is_16_bit, is_32_bit)
    ]
    return [sum(size for size, packed in found if packed is kind) for kind in (True, False)]


X_A, X_W = ("MatMul", "x", "a", "y"), ("MatMul", "x", "w", "z")
CAST_B = ("Cast", "b", "w")
HEAD = (("Transpose", "t", "h"), ("MatMul", "x", "h", "y"))
JOINED = (("Transpose", "a", "t"), ("Reshape", "t", "shape", "w"))
NORM = "RMSNormalization"
HELD = {  # weights, nodes, packed and unpacked bytes
    "cast matrix": ({"b": 10, "a": 20}, [CAST_B, X_W, ("MatMulInteger", "x", "a", "y")], [40, 0]),
    "gathered table": ({"t": 10}, [("Gather", "t", "ids", "rows")], [0, 0]),
    "tied table": ({"t": 10}, [("Gather", "t", "ids", "rows"), *HEAD], [10, 0]),
    "cast table": (
        {"t": 10},
        [("Cast", "t", "w"), ("Gather", "w", "ids", "r"), ("Transpose", "w", "h"), HEAD[1]],
        [20, 20],
    ),
    "two products": ({"a": 10}, [X_A, ("MatMul", "z", "a", "u")], [20, 0]),
    "two norms": ({"a": 10}, [(NORM, "x", "a", "y"), (NORM, "z", "a", "u")], [0, 10]),
    "scale of each block": ({"a": 32}, [("DequantizeLinear", "a", "s", "w"), X_W], [36, 0]),
    "4-bit blocks": ({"a": 16, "s": 4}, [("MatMulNBits", "x", "a", "s", "y")], [27, 0]),
    "4-bit experts": ({"a": 16, "s": 4}, [("QMoE", "x", "a", "s", "y")], [27, 0]),
    "joined experts": ({"a": 16}, [*JOINED, ("MatMulNBits", "x", "w", "s", "y")], [22, 0]),
    "cycle": ({"a": 10}, [("Cast", "a", "b"), ("Cast", "b", "a"), X_A], [10, 0]),
    "invalid lengths": ({"a": "9" * 5000, "b": "-1"}, [X_A], [0, 0]),  # ONNX Runtime's to refuse
}


@pytest.mark.parametrize(("sizes", "nodes", "expected"), HELD.values(), ids=HELD)
def test_weight_memory_matches_resident_format(sizes, nodes, expected):
    assert held(graph(sizes, *nodes)) == expected


def test_16_bit_weights_count_as_float32_on_cpu():
    nodes = (X_A, CAST_B, X_W)
    assert held(graph({"a": 10, "b": 20}, *nodes), is_16_bit=True) == [60, 0]
    assert held(graph({"a": 40, "b": 80}, *nodes), is_16_bit=True, is_32_bit=True) == [120, 0]


def test_components_sum_to_peak_estimate(need):
    found = loader.memory_of(Bundle.read(store.embedded_folder()))
    assert sum(found.parts.values()) == found.peak
    large = replace(need, models=(model(opening=900), need.models[1]))
    assert sum(large.parts.values()) == large.peak == large.opening
    assert found.peak == max(found.running, found.opening)


def test_cache_memory_follows_capacity():
    bundle = Bundle.read(store.embedded_folder())
    found = loader.memory_of(bundle)
    arrays = [
        4 * math.prod(state.sizes(one.capacity))
        for one in bundle.models.values()
        for state in one.states
    ]
    assert found.parts["caches"] == sum(arrays)


def passes(vocab, of_layer=4, mask_token=None, **changes):
    """Model with rows of 512 values, 8 heads and 4 layers of 4 million parameters, K = 4."""
    layers = tuple(key_value_states(i, (2, 64), (2, 64), "float32") for i in range(4))
    given = {"capacity": 1024, "num_draft_tokens": 4, "slots": 1} | changes
    packed = [4 * 512 * vocab, *[4 * of_layer * MB] * 4]
    one = Mock(padded_vocab_size=vocab, weights_dtype="float32", capacity=1024)
    one.layers, one.states, one.encoder, one.hidden = layers, layers[0], None, None
    one.mask_token = mask_token
    return memory._pass_bytes(one, packed, **given)


def test_prefill_memory_has_attention_scores_but_no_logits():
    few, many = passes(50_000), passes(150_000)
    assert many - few == pytest.approx(4 * 100_000 * (15 + 20))  # of rounds' passes, and drawing
    prompt = few - 4 * 50_000 * 35
    assert prompt == pytest.approx(4 * 256 * (8 * 1024 + 4 * 2000))
    assert few - passes(50_000, capacity=512) == pytest.approx(4 * 256 * 8 * 512)
    longer = passes(50_000, mask_token=7) - few  # passes of up to 8 tokens, not 5
    assert longer == pytest.approx(4 * 50_000 * (36 - 15 + 4 * 3))
    assert passes(50_000, slots=3) - few == pytest.approx(4 * 50_000 * (2 * 15 + 3 * 5))


def test_large_experts_are_not_counted_as_lm_head():
    more = passes(50_000, of_layer=64) - passes(50_000, of_layer=4)
    assert more == pytest.approx(4 * 256 * 4 * (8000 - 2000))


def test_pair_within_available_memory_is_accepted(need, monkeypatch):
    leave(monkeypatch, 1500)
    memory.check_memory(need)
    leave(monkeypatch, 1370)  # a tenth less than is predicted
    memory.check_memory(need)
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    memory.check_memory(need)


@pytest.mark.parametrize(
    ("megabytes", "advice"),
    [
        (
            1300,
            "with --max-length 2560 (about 1.4 GB) or --precision int8 (about 840.0 MB) or "
            "--cache fp16, for --ops gqa-kv16 (about 1.3 GB)",
        ),
        (1200, "with --max-length 1536 (about 1.3 GB) or --precision int8 (about 840.0 MB)"),
        (700, "with --precision int8 --max-length "),
        (600, "--precision int8 --cache fp16, for --ops gqa-kv16 (about 620.0 MB)"),
        (320, "with --precision int8 --max-length 256 --cache fp16, for --ops gqa-kv16 (about"),
        (100, "or use a smaller model"),
    ],
)
def test_pair_beyond_available_memory_is_rejected_with_advice(need, monkeypatch, megabytes, advice):
    leave(monkeypatch, megabytes)
    with pytest.raises(DeviceError) as caught:
        memory.check_memory(need)
    message = str(caught.value)
    assert (
        "some/target and its draft: loading needs about 1.6 GB (packed weights 840.0 MB" in message
    )
    assert f"{memory.format_bytes(megabytes * MB)} are available" in message
    assert advice in message


def test_an_advised_length_fits(need):
    for limit in range(900, 1700, 50):
        shorter = need.with_context_below(limit * MB)
        assert shorter is need or shorter.running <= limit * MB


def test_existing_graph_variants_are_not_advised(need):
    ready = replace(need.models[0], weights_dtype="int8", cache_dtype="float16")
    assert ready.with_int8_weights() is ready
    assert ready.with_float16_caches() is ready


def test_rejected_load_opens_no_session(monkeypatch):
    def opened(*arguments):
        raise AssertionError("a session was opened")

    leave(monkeypatch, 1)
    monkeypatch.setattr(loader, "OrtModel", opened)
    with pytest.raises(DeviceError, match="not enough memory for"):
        specedge.load(store.embedded_folder())


def test_cgroup_page_cache_counts_as_available_memory(tmp_path):
    for name, text in (
        ("memory.max", "1000"),
        ("memory.current", "900"),
        ("memory.stat", "anon 500\ninactive_file 300\nactive_file 50\n"),
    ):
        (tmp_path / name).write_text(text, "utf-8")
    assert memory.available_cgroup_bytes(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n", "utf-8")
    with pytest.raises(ValueError, match="max"):
        memory.available_cgroup_bytes(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("pipeline", "shared_costs")  # the first load measures costs, too
def test_the_peak_is_predicted():
    folder = str(store.embedded_folder())
    command = [sys.executable, measure_memory.__file__, "--fill", folder]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = int(said.stdout.split()[-1])
    need = loader.memory_of(Bundle.read(store.embedded_folder()))
    assert need.peak == pytest.approx(measured, rel=0.1)


FREED = """
import ctypes
from pathlib import Path
from specedge.runtime.backend.memory import return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None

def resident():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])

def taken(size):
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    return block

libc.free(taken(30_000_000))  # glibc takes smaller ones from its heap from now on
before = resident()
pairs = [(taken(4_000_000), taken(100_000)) for _ in range(25)]
for large, _ in pairs:
    libc.free(large)
{}
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_returned_to_the_system():
    left = {}
    for way in ("return_freed_memory()", "pass"):
        command = [sys.executable, "-c", FREED.format(way)]
        left[way] = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert left["pass"] > 80 * MB  # as it is without; or this test shows nothing
    assert left["return_freed_memory()"] < 20 * MB


def test_allocators_without_trim_support_are_ignored(monkeypatch):
    for failure in (AttributeError, OSError, TypeError):
        monkeypatch.setattr(memory.ctypes, "CDLL", Mock(side_effect=failure))
        memory.return_freed_memory()


def test_slots_beyond_available_memory_are_rejected_with_a_number_that_fits(need, monkeypatch):
    many = need.with_slots(64)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * (need.peak - need.process))
    with pytest.raises(DeviceError, match=r"use at most (\d+) of 64 slots") as caught:
        memory.check_memory(many)
    count = int(re.search(r"at most (\d+)", str(caught.value)).group(1))
    assert 1 <= count == memory.fitting_slots(need, 64) < 64
    memory.check_memory(need.with_slots(count))
    with pytest.raises(DeviceError):
        memory.check_memory(need.with_slots(count + 1))
