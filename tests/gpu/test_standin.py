"""The stand-in CUDA records the host calls of the real provider for a two-node graph."""

import ctypes
import gc
import os
import pathlib
import subprocess
import sys

import numpy
import pytest
import standin

HERE = pathlib.Path(standin.__file__).resolve().parent
if reason := standin.why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def placement():
    pytest.importorskip("onnx")
    standin.load()
    return __import__("placement")


def graph(cpu_node=False):
    """y = (x + past) @ w, present = x + past; at the end perhaps a node that CUDA does not have."""
    from onnx import TensorProto, helper, numpy_helper

    shape = [4, 256]
    nodes = [
        helper.make_node("Add", ["x", "past_key_values"], ["present"]),
        helper.make_node("MatMul", ["present", "w"], ["product"]),
    ]
    weights = [numpy_helper.from_array(numpy.ones((256, 256), numpy.float32), "w")]
    if cpu_node:
        weights.append(numpy_helper.from_array(numpy.ones((256, 256), numpy.uint8), "b"))
        nodes += [
            helper.make_node("Cast", ["product"], ["a"], to=TensorProto.UINT8),
            helper.make_node("MatMulInteger", ["a", "b"], ["c"]),
            helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
        ]
    else:
        nodes.append(helper.make_node("Relu", ["product"], ["y"]))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name in ("x", "past_key_values")
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("y", "present")
    ]
    made = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_run_on_the_device_copies_nothing(placement):
    session, placed, copies, _ = placement.open_session(graph(), forbid_cpu=True)
    assert set(placed) == {"CUDAExecutionProvider"}
    assert not copies
    binding, values = placement.bind(session, {})
    with standin.counted() as counts:
        session.run_with_iobinding(binding)
    assert counts["launches"] == 3
    assert counts["blas_calls"] == 1
    assert counts["async_h2d"] == counts["async_d2h"] == counts["h2d"] == counts["d2h"] == 0
    with standin.counted() as counts:
        values["y"].numpy()
    assert (counts["d2h"], counts["d2h_bytes"], counts["blocking"]) == (1, 4 * 256 * 4, 1)


def test_node_on_the_cpu_is_detected(placement):
    session, placed, copies, _ = placement.open_session(graph(cpu_node=True))
    assert placed["CPUExecutionProvider"]["MatMulInteger"] == 1
    assert len(copies) >= 1
    binding, _ = placement.bind(session, {})
    with standin.counted() as counts:
        session.run_with_iobinding(binding)
    assert counts["async_d2h"] + counts["d2h"] >= 1
    with pytest.raises(Exception, match="fallback to CPU EP has been explicitly disabled"):
        placement.open_session(graph(cpu_node=True), forbid_cpu=True)
    with pytest.raises(Exception, match="cannot use the graph capture feature"):
        placement.open_session(graph(cpu_node=True), graph=True)


def test_a_graph_is_captured_once(placement):
    session, *_ = placement.open_session(graph(), graph=True)
    binding, _ = placement.bind(session, {})
    with standin.counted() as first:
        session.run_with_iobinding(binding)
    with standin.counted() as second:
        session.run_with_iobinding(binding)
    assert (first["captures"], first["captured_launches"], first["graph_launches"]) == (1, 3, 1)
    assert (
        second["captures"],
        second["launches"],
        second["replayed_launches"],
        second["blocking"],
    ) == (0, 0, 3, 1)


def test_unsynchronized_copy_is_detected(placement):
    import onnxruntime

    session, *_ = placement.open_session(graph())
    binding, values = placement.bind(session, {})
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    with standin.counted() as counts:
        session.run_with_iobinding(binding, options)
        values["y"].numpy()
    assert counts["racing_copies"] == 1
    with standin.counted() as counts:
        session.run_with_iobinding(binding, options)
        binding.synchronize_outputs()
        values["y"].numpy()
    assert counts["racing_copies"] == 0


def test_closing_frees_session_memory(placement):
    from onnxruntime import OrtValue
    from onnxruntime.capi import _pybind_state

    gc.collect()  # left by earlier tests
    before = standin.counts()
    session, *_ = placement.open_session(graph())
    pinned = _pybind_state.OrtDevice(
        1, 5, 0x10DE, 0
    )  # a GPU's memory that the host can reach, NVIDIA, device 0
    value = OrtValue(
        session._sess.create_ortvalue_from_shape_and_type([64], numpy.float32, pinned),
        session=session._sess,
    )
    held = session.create_ortvalue_from_shape_and_type([1024, 1024], numpy.float32, "cuda")
    during = standin.counts()
    assert during["device_bytes"] >= before["device_bytes"] + (4 << 20)
    assert during["pinned_bytes"] > before["pinned_bytes"]
    del session, value, held
    after = standin.counts()
    for name in ("device_bytes", "pinned_bytes", "streams", "events", "graph_execs"):
        assert after[name] == before[name], name


def test_allocation_during_capture_fails():
    runtime = standin.load()
    stream, graph, pointer = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1)
    assert runtime.cudaStreamBeginCapture(stream, 0) == 0
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(16)) == 900
    assert runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 901
    assert not graph.value
    runtime.cudaGetLastError()
    runtime.cudaStreamDestroy(stream)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"STANDIN_DEVICES": "0"}, "CPUExecutionProvider"),
        ({"STANDIN_DRIVER": "12040"}, "CPUExecutionProvider"),
        ({"STANDIN_MEMORY_MB": "0"}, "Failed to allocate memory"),
        ({}, "CUDAExecutionProvider"),
    ],
)
def test_missing_gpu_components_fail_session_creation(placement, tmp_path, setting, expected):
    path = tmp_path / "graph.onnx"
    path.write_bytes(graph().SerializeToString())
    code = (
        "import sys, standin; standin.load(); import onnxruntime\n"
        "asked = {'providers': ['CUDAExecutionProvider']}\n"
        "try: print(onnxruntime.InferenceSession(sys.argv[1], **asked).get_providers()[0])\n"
        "except Exception as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=HERE,
        capture_output=True,
        text=True,
        env={**os.environ, **setting},
    )
    assert expected in done.stdout
