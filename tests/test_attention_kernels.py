"""Kernels of attention that are not batch-invariant: flash attention on Arm, and wide heads."""

import os
import platform
import shutil
import threading

import pytest

import specedge
from specedge.attention_kernels import VARIABLE, batch_invariant_attention, pass_boundaries
from specedge.bundle import store
from specedge.bundle.manifest import State
from specedge.runtime.backend import sessions


@pytest.fixture(params=["aarch64", "arm64", "ARM64"])
def _arm(request, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.usefixtures("_arm")
def test_sessions_are_created_without_flash_attention_on_arm(monkeypatch, tmp_path):
    values, open_session = [], sessions.Device._open

    def recorded(device, *arguments):
        values.append(os.environ.get(VARIABLE))
        return open_session(device, *arguments)

    monkeypatch.setattr(sessions.Device, "_open", recorded)
    bundle = specedge.Bundle.read(shutil.copytree(store.embedded_folder(), tmp_path / "pair"))
    sessions.Device().open(bundle.path(bundle.target.graph("step", "gqa").file))
    assert values == ["1"]
    assert VARIABLE not in os.environ


def test_other_processors_use_flash_attention(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv(VARIABLE, raising=False)
    with batch_invariant_attention():
        assert VARIABLE not in os.environ


@pytest.mark.usefixtures("_arm")
def test_value_that_the_user_has_set_is_kept(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    with batch_invariant_attention():
        assert os.environ[VARIABLE] == "0"
    assert os.environ[VARIABLE] == "0"


@pytest.mark.usefixtures("_arm")
def test_variable_stays_until_the_last_concurrent_session_is_created():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with batch_invariant_attention():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with batch_invariant_attention():
        thread.start()
        assert entered.wait(60)
    assert os.environ[VARIABLE] == "1"
    leave.set()
    thread.join()
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("head_size", "boundaries"),
    [(64, ()), (128, ()), (192, (63,)), (256, (63,)), (512, (31, 63))],
)
def test_boundaries_of_wide_heads(head_size, boundaries):
    state = State("0.key", "rows", "float32", ("B", 1, "S", head_size))
    assert pass_boundaries([state], "gqa") == boundaries
    assert pass_boundaries([state], "onnx") == ()


def test_wide_heads_use_no_flash_attention(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv(VARIABLE, raising=False)
    for head_size, value in ((128, None), (192, "1")):
        state = State("0.key", "rows", "float32", ("B", 1, "S", head_size))
        with batch_invariant_attention([state]), batch_invariant_attention():
            assert os.environ.get(VARIABLE) == value
        assert VARIABLE not in os.environ
