"""Fixtures: each test has empty data and cache folders, and no network."""

# ruff: noqa: E402
from __future__ import annotations

import gc
import itertools
import os
import signal
import threading

WORKER, WORKERS = (os.environ.get(f"PYTEST_XDIST_WORKER{x}", "") for x in ("", "_COUNT"))
CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
if WORKER and CPUS:
    # One CPU for each worker, before thread pools exist: with more threads than CPUs, ONNX
    # Runtime's busy waiting takes half of the time.
    index = len(CPUS) * int(WORKER[2:]) // int(WORKERS)
    os.sched_setaffinity(0, {sorted(CPUS)[index % len(CPUS)]})  # replacements have higher numbers

import pytest

gc.disable()  # until the tests are collected: allocations of imports and collection are permanent

from specedge.bundle import store
from specedge.runtime.backend import sessions
from virtual import table

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # of tests that import onnxruntime themselves
# A busy machine must not decide what a test prints: costs measured once are kept.
os.environ["SPECEDGE_KEEP_COSTS"] = "1"
# A shell's background jobs ignore SIGINT, and so would every process that a test starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Repeat the examples of Hypothesis."""
    if config.getoption("numprocesses", None):  # the process that starts workers collects none
        gc.enable()
    else:
        from hypothesis import settings

        settings.register_profile("repeatable", deadline=None, derandomize=True)
        settings.load_profile("repeatable")


def pytest_collection_finish():
    """Exempt modules and collected tests, millions of objects, from garbage collection."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="Collect the slow tests of every model family, checkpoint format and option, too.",
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Let every other worker import the test files backwards.

    In a new environment, importing them compiles thousands of modules: a worker loads what another
    compiled, where both would compile each at the same time.
    """
    report = yield
    if WORKER and int(WORKER[2:]) % 2 and isinstance(collector, pytest.Dir):
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Sort tests by file, and sort out the arguments of the mark `slow`.

    `slow(exhaustive=True)` deselects a test unless `--exhaustive` is given. With
    `slow(after_first=True)` the first case of a test is quick and the others are exhaustive.
    """
    items.sort(key=lambda item: item.path)
    seen, exhaustive = set(), set()
    for item in items:
        marks = list(item.iter_markers("slow"))
        if any(mark.kwargs.get("after_first") for mark in marks):
            if item.function in seen:
                exhaustive.add(item)
            else:
                item.own_markers = [m for m in item.own_markers if not m.kwargs.get("after_first")]
            seen.add(item.function)
        if any(mark.kwargs.get("exhaustive") for mark in marks):
            exhaustive.add(item)
    if exhaustive and not config.getoption("--exhaustive"):
        config.hook.pytest_deselected(items=list(exhaustive))
        items[:] = [item for item in items if item not in exhaustive]


HOMES = ("XDG_DATA_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "HOME", "USERPROFILE")


@pytest.fixture(scope="session", autouse=True)
def _folders_of_the_session(tmp_path_factory):
    """Keep files of shared fixtures out of the user's folders; measure pass costs once for all."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for variable in HOMES:
            patch.setenv(variable, str(home))
        patch.setattr(store, "costs_folder", lambda: home / "costs")
        yield


@pytest.fixture(scope="session", autouse=True)
def _sessions_of_the_embedded_pair():
    """Open each graph of the embedded pair once, which is half of the time of a load."""
    folder, opened, open_session = store.embedded_folder(), {}, sessions.Device.open

    def open_once(device, path):
        if not path.is_relative_to(folder):
            return open_session(device, path)
        key = device, path, sessions.onnxruntime().SessionOptions  # which tests replace
        if key not in opened:
            opened[key] = open_session(device, path)
        return opened[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sessions.Device, "open", open_once)
        yield


@pytest.fixture
def own_costs(monkeypatch):
    """Let each first load in a test's empty folders measure pass costs, as on a new machine."""
    monkeypatch.setattr(store, "costs_folder", _COSTS_FOLDER)


_COSTS_FOLDER = store.costs_folder


@pytest.fixture
def replaced_costs(own_costs, monkeypatch):
    """Let loads replace pass costs that are not reliable, as for a user."""
    monkeypatch.delenv("SPECEDGE_KEEP_COSTS")


def _on_all_cpus():
    """Run a test and the processes that it starts on all CPUs, not on the worker's alone."""
    if CPUS:
        pinned = os.sched_getaffinity(0)
        os.sched_setaffinity(0, CPUS)
    yield
    if CPUS:
        os.sched_setaffinity(0, pinned)


all_cpus = pytest.fixture(_on_all_cpus, name="all_cpus")
all_cpus_of_a_module = pytest.fixture(_on_all_cpus, name="all_cpus_of_a_module", scope="module")


@pytest.fixture(scope="session")
def _homes(tmp_path_factory):
    """Yield new folders; `mktemp` would list all earlier ones for each."""
    folder = tmp_path_factory.mktemp("homes")
    return map(folder.joinpath, map(str, itertools.count()))


@pytest.fixture(autouse=True)
def _own_folders(_homes, monkeypatch):
    home = next(_homes)
    home.mkdir()
    for variable in HOMES:
        monkeypatch.setenv(variable, str(home))
    monkeypatch.delenv("SPECEDGE_BUNDLE", raising=False)


@pytest.fixture
def shared_costs(_own_folders):
    """Let processes that a test starts use the pass costs that earlier ones measured."""
    store.costs_folder().mkdir(exist_ok=True)
    store.data_folder().mkdir(parents=True)
    (store.data_folder() / "costs").symlink_to(store.costs_folder(), target_is_directory=True)


@pytest.fixture(scope="session")
def pipeline():
    """Return the loaded embedded pair."""
    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    import specedge

    pipeline = specedge.load(store.embedded_folder())
    pipeline.costs.table = table(prior={"model": 0.8})  # test results must not depend on time
    return pipeline


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct, downloaded and exported once for all runs and workers."""
    for package in ("torch", "transformers", "onnxruntime"):
        pytest.importorskip(package, reason="needs the cpu and export extras")
    import real_weights
    from real import Real

    return Real(real_weights.SMOLLM2)


@pytest.fixture(scope="session")
def self_draft(pipeline):
    """Return the embedded target with itself as the draft model."""
    from specedge.runtime.backend.onnx_model import OrtModel
    from specedge.runtime.backend.self_test import exact_device
    from specedge.runtime.requests.pipeline import Pipeline

    bundle = pipeline.bundle
    twin = OrtModel(bundle, bundle.target, exact_device([bundle.target], sessions.Device()))
    return Pipeline(bundle, pipeline.tokenizer, pipeline.target, twin)


@pytest.fixture
def text(tmp_path):
    """Return the path of a text file of prompts."""
    return tmp_path / "prompts.txt"


@pytest.fixture
def jsonl(tmp_path):
    """Return the path of a JSONL file of prompts."""
    return tmp_path / "prompts.jsonl"


_LINES = []


@pytest.fixture
def report():
    """Return a function that adds a line to the terminal summary."""
    return _LINES.append


def pytest_terminal_summary(terminalreporter):
    if _LINES:
        terminalreporter.section("measured")
        terminalreporter.write_line("\n".join(_LINES))
