"""Default number of threads chosen by tune."""

import subprocess
import sys

import pytest

from specedge.benchmarks import tune
from specedge.bundle import store
from specedge.runtime.backend import sessions
from specedge.runtime.requests import loader

pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")


@pytest.fixture(autouse=True)
def _no_pool(monkeypatch):
    monkeypatch.setattr(sessions, "_pool_threads", [])


class Loaded:
    def __init__(self, count):
        self.count = count
        self.bundle = self.tokenizer = self.target = self.draft = None


@pytest.mark.parametrize(
    ("seconds", "best"),
    [({4: 1.0, 2: 0.8, 1: 0.9}, 2), ({4: 1.0, 2: 0.99, 1: 1.5}, None), ({4: 1, 2: 2, 1: 3}, None)],
)
def test_fewer_threads_are_chosen_if_clearly_faster(monkeypatch, seconds, best):
    monkeypatch.setattr(tune, "cpu_count", lambda: 4)
    monkeypatch.setattr(loader, "load", lambda bundle, threads, ops: Loaded(threads))
    monkeypatch.setattr(tune, "_seconds_per_token", lambda loaded, text, k: seconds[loaded.count])
    assert tune.fastest_threads(store.embedded_folder(), "auto") == best


def test_thread_tuning_is_skipped_for_large_models_one_core_or_shared_pool(monkeypatch):
    monkeypatch.setattr(loader, "load", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(tune, "cpu_count", lambda: 1)
    assert tune.fastest_threads(store.embedded_folder(), "auto") is None
    monkeypatch.setattr(tune, "cpu_count", lambda: 4)
    monkeypatch.setattr(tune, "LARGE_WEIGHTS", 1)
    assert tune.fastest_threads(store.embedded_folder(), "auto") is None
    monkeypatch.setattr(tune, "LARGE_WEIGHTS", 10**9)
    monkeypatch.setattr(sessions, "_pool_threads", [None])
    assert tune.fastest_threads(store.embedded_folder(), "auto") is None


def test_the_measured_number_of_threads_is_the_default():
    """Runs in a child process, since sessions of this one may share a pool."""
    code = """if True:
        import dataclasses
        from specedge.bundle import store
        from specedge.runtime.requests import loader
        from specedge.runtime.backend import sessions
        loaded = loader.load(store.embedded_folder(), threads=1)
        table = dataclasses.replace(loaded.costs.table, origin="tune", threads=1)
        loaded.costs.store_as_default(table)
        opened, real = [], sessions.Device.open
        sessions.Device.open = lambda device, path: opened.append(device) or real(device, path)
        assert loader.load(store.embedded_folder()).costs.table == table
        assert [(d.threads, d.default_threads) for d in opened[-2:]] == [(None, 1)] * 2
        loader.load(store.embedded_folder(), threads=1)
        assert [(d.threads, d.default_threads) for d in opened[-2:]] == [(1, None)] * 2
        """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_existing_pool_overrides_the_default_number():
    code = """if True:
        from specedge.bundle import store
        from specedge.bundle import Bundle
        from specedge.runtime.backend.sessions import Device
        bundle = Bundle.read(store.embedded_folder())
        path = bundle.path(bundle.draft.graph("step", "onnx").file)
        Device(share_threads=True).open(path)
        Device(share_threads=True, default_threads=1).open(path)
        """
    subprocess.run([sys.executable, "-c", code], check=True)
