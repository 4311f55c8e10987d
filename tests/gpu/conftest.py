"""Pairs for GPUs, exported once; without onnxruntime-gpu and a C compiler these are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import pytest
import standin

import specedge
from gpu.reporting import ON_A_GPU, Reporting
from shared import build_once, run_folder
from specedge.bundle.gpu_signatures import num_best
from specedge.runtime.backend.cuda.buffers import CudaBuffers
from specedge.runtime.backend.cuda.draft_graphs import DraftGraph
from specedge.runtime.backend.onnx_model import OrtModel

STANDIN = Path(standin.__file__).parent
PAIRS = {
    "fp32-fp16": ("llama", {"kv_heads": 2, "tied": True}),
    "int8-fp16": ("llama", {"kv_heads": 2, "tied": True}),
    "int4-fp16": ("llama", {"kv_heads": 2}),
    "fp32-bf16": ("gpt2", {}),
    "int8-fp32": ("gpt2", {}),
}
FOR_ENGINES = {  # of integers
    "int4-qdq": ("llama", {"kv_heads": 2}),
    "int8-qdq": ("gpt2", {}),
    "int8-block-qdq": ("llama", {"kv_heads": 2, "tied": True}),
}
PROMPT = "def f(self):"
VOCAB_SIZE = 512
COMPILE = [os.environ.get("CC", "gcc"), "-std=gnu11", "-fPIC", "-shared", "-o"]
K = 4


def pytest_addoption(parser):
    parser.addoption("--gpu-report", metavar="FILE", help="Put what tests on a GPU found there.")


def pytest_configure(config):
    path = config.getoption("--gpu-report", None)  # not known where all tests are collected
    if path and not hasattr(config, "workerinput"):
        try:
            config.pluginmanager.register(Reporting(Path(path)))
        except click.ClickException as error:
            raise pytest.UsageError(error.message) from error


def pytest_itemcollected(item):
    if item.get_closest_marker("gpu"):
        item.keywords[ON_A_GPU] = True


@pytest.fixture(scope="session")
def cuda():
    """The stand-in, loaded: from then on CUDA is not the real one in this process."""
    standin.load()
    return standin


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """A folder with the stand-in CUDA, and over it a driver that tells of itself."""
    folder = standin.build(tmp_path_factory.mktemp("cuda"))
    source = str(Path(__file__).with_name("driver.c"))
    for name, flags in (("libcuda.so.1", ["-DDRIVER"]), ("libnvidia-ml.so.1", [])):
        subprocess.run([*COMPILE, str(folder / name), source, *flags], check=True)
    return folder


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Folders of bundles by their weights' and their computing type."""
    pytest.importorskip("torch", reason="needs the export extra")
    import traces
    from checkpoints import make_config, make_model, make_tokenizer, save
    from specedge.exporter import export

    def build(folder):
        kind, options = (PAIRS | FOR_ENGINES)[folder.name]
        precision, _, compute = folder.name.rpartition("-")
        tokenizer = make_tokenizer(folder / "tokenizer")
        save(make_model(make_config(kind, context=256, **options)), tokenizer, folder / "target")
        with traces.remembered(run_folder(tmp_path_factory, "traces")):
            export(
                "self:1", folder / "target", folder / "bundle",
                ops="all", precision=precision, compute=compute,
            )  # fmt: skip

    return lambda name: build_once(run_folder(tmp_path_factory, name), build) / "bundle"


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
    that it is of token 1, drawn from as many weights as the test says, a few of them at first.
    """
    fetch, num = CudaBuffers.fetch, num_best(VOCAB_SIZE)
    weights = np.exp(-np.arange(VOCAB_SIZE - 1, dtype=np.float32))
    best = [*weights[:num], *range(1, num + 1)]
    plant = {"num_weights": num}

    def planting(self, array):
        found = fetch(self, array)
        if array.shape[-1] == 2 * num + 1:
            found[..., :] = [*-np.arange(num), *(1 + np.arange(num)), 0]
        if array.dtype == "int64":
            found[...] = 1  # what an unrolled graph drafts
        if array.dtype == "float64":  # what a graph that draws says of a token
            found[...] = [1, 0, plant["num_weights"], 1, weights.sum(dtype=float), *best]
        if array.shape == (1, VOCAB_SIZE):  # all weights that it was drawn from
            found[0, 1:] = weights
        return found

    monkeypatch.setattr(CudaBuffers, "fetch", planting)
    return plant


@pytest.fixture
def one_call(monkeypatch):
    """Make one-call drafts as fast as one pass and equal to drafts by passes."""
    monkeypatch.setattr(DraftGraph, "_median", lambda self, run: 1.0)
    monkeypatch.setattr(OrtModel, "_drafts_equal_tokens", lambda self, call: True)


@pytest.fixture
def pipeline(cuda, pairs, planted, one_call):
    with loaded(pairs("fp32-fp16")) as found:
        yield found


def run(*arguments, **environment):
    """The command line in a process that finds the stand-in where a GPU's machine has CUDA."""
    command = ["sh", str(STANDIN / "run.sh"), sys.executable, "-m", "specedge", *arguments]
    environment = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
