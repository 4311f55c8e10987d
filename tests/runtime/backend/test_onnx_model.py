"""Errors of ONNX Runtime, and of other code during a pass."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from specedge.bundle import Bundle, store
from specedge.bundle.manifest import chunk_length, signatures
from specedge.errors import BundleError, SpecEdgeError
from specedge.runtime.backend import onnx_model as ort
from specedge.runtime.backend.sessions import Device


@pytest.fixture
def model():
    bundle = Bundle.read(store.embedded_folder())
    return ort.OrtModel(bundle, bundle.target, Device())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_caches_of_an_unsupported_type_are_refused_at_load(role, dtype):
    bundle = Bundle.read(store.embedded_folder())
    whole = bundle.models[role]
    states = tuple(dataclasses.replace(state, dtype=dtype) for state in whole.states)
    given = signatures(states, whole.capacity, whole.padded_vocab_size)
    graphs = tuple(graph for graph in whole.graphs if graph.name != "batched")
    changed = dataclasses.replace(whole, states=states, signatures=given, graphs=graphs)
    said = (
        f"with caches in {dtype}; this version of specedge supports float32 with caches in float32"
    )
    with pytest.raises(BundleError, match=said) as caught:
        ort.OrtModel(bundle, changed, Device())
    assert whole.source.id in str(caught.value)


def test_prefill_without_logits_leaves_the_same_caches(model):
    tokens = list(range(1, 65))
    model.forward(tokens)
    wanted = model.cache_rows(0, 64)
    model.truncate(0)
    bound = model._session.bind(model.cache, 64, 0)
    assert bound.arrays["logits"].shape[1] == 0
    model._session.run(bound, tokens)
    assert all(map(np.array_equal, model.cache_rows(0, 64), wanted))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("length", [4, 64])  # one that rounds have, too, and one of a prompt
def test_logits_of_the_last_rows_equal_full_logits(model, length, num_rows):
    tokens = list(range(1, length + 1))
    wanted = model.forward(tokens).array()[-num_rows:].copy()
    model.truncate(0)
    assert np.array_equal(model.forward(tokens, num_rows).array(), wanted)
    assert model.length == length


def test_chunks_are_shorter_for_large_attention_scores():
    lengths = [chunk_length(capacity) for capacity in (64, 8192, 16384, 32768, 131072)]
    assert lengths == [256, 256, 128, 64, 64]


class AlarmError(Exception):
    """Exception of an application's handler."""


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("step", ["forward", "prefill"])
def test_exceptions_of_signal_handlers_pass_through(model, step):
    def handler(*_):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(AlarmError):
            _run_for_ever(getattr(model, step), model)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run_for_ever(step, model):
    end = time.monotonic() + 30
    while time.monotonic() < end:
        model.truncate(0)
        step(list(range(1, 65)))


class HandledError(ValueError):
    """Exceptions during a run that are not ONNX Runtime's."""


class StubbornSession:
    """A session whose calls end in an exception."""

    def __init__(self, session, method, error):
        self._session, self._method, self._error = session, method, error

    def __getattr__(self, name):
        if name == self._method:
            raise self._error
        return getattr(self._session, name)


@pytest.mark.parametrize("method", ["run_with_iobinding", "io_binding"])
def test_only_exceptions_of_onnx_runtime_are_translated(model, method):
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail

    session = model._session._session
    model._session._session = StubbornSession(session, method, HandledError("ours"))
    with pytest.raises(HandledError, match="ours"):
        model.forward([1])
    model._session._session = StubbornSession(session, method, Fail("theirs"))
    with pytest.raises(SpecEdgeError, match=r"a pass of .* failed in ONNX Runtime: theirs"):
        model.forward([1])
    with pytest.raises(SpecEdgeError, match=r"a pass of .* failed in ONNX Runtime: theirs"):
        model.prefill([1])


@pytest.mark.parametrize("message", ["std::bad_alloc", "Failed to allocate memory for 8 bytes"])
def test_an_out_of_memory_pass_reports_needed_and_available_memory(model, message):
    from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

    loaded = model._session
    loaded._session = StubbornSession(
        loaded._session, "run_with_iobinding", RuntimeException(message)
    )
    with pytest.raises(SpecEdgeError) as caught:
        model.forward([1])
    _check_memory_message(str(caught.value))


def _check_memory_message(message):
    assert "not enough memory for " in message
    assert "it needs about " in message
    assert "(weights " in message
    assert "free" in message
    assert "export" not in message


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space")
@pytest.mark.parametrize("megabytes", [5, 10])
def test_an_out_of_memory_load_reports_needed_and_available_memory(megabytes):
    opened = "OrtModel(bundle, bundle.target, Device(threads=1))"
    found = limited(megabytes, opened)
    assert found.startswith("DeviceError ")
    _check_memory_message(found)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the address space")
def test_pair_beyond_process_memory_limit_is_rejected_with_advice():
    assert limited(150, "specedge.load(store.embedded_folder(), threads=1)") == "loaded"
    found = limited(15, "specedge.load(store.embedded_folder(), threads=1)")
    assert found.startswith("DeviceError not enough memory for python-9m and its draft")
    assert "free" in found


def limited(megabytes, action):
    """Run an action in a process with limited further memory."""
    code = f"""if True:
        import resource, specedge, specedge.runtime.requests.loader, onnxruntime
        from specedge.bundle import store
        from specedge.bundle import Bundle
        from specedge.runtime.backend.onnx_model import OrtModel
        from specedge.runtime.backend.sessions import Device
        bundle = Bundle.read(store.embedded_folder())
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + {megabytes}_000_000,) * 2)
        try:
            {action}
            print("loaded")
        except specedge.SpecEdgeError as error:
            print(type(error).__name__, error)
        """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
