"""Pairs are exported once a session; without the export extra all of these tests are skipped."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

for package in ("torch", "transformers", "optimum", "onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason="needs the cpu and export extras")

import torch  # noqa: E402
from filelock import FileLock  # noqa: E402

import traces  # noqa: E402
from checkpoints import make_pair  # noqa: E402
from specedge.bundle import Bundle, store  # noqa: E402
from specedge.exporter import Progress, export  # noqa: E402
from specedge.exporter.verification import partition, runner  # noqa: E402

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
PAIRS = {
    "gpt2": ("gpt2", {"noise": 0.1, "context": 256}),
    "llama": ("llama", {"kv_heads": 2, "context": 256}),
    "qwen2": ("qwen2", {"kv_heads": 2, "tied": True, "context": 256}),
    "mistral": ("mistral", {"kv_heads": 1, "head_size": 20, "context": 256}),
    "padded": ("gpt2", {"hidden": 60, "vocab_size": 520, "noise": 0.1, "context": 256}),
    "bfloat16": ("llama", {"kv_heads": 2, "tied": True, "dtype": torch.bfloat16, "context": 256}),
    "windowed": ("mistral", {"sliding_window": 16}),
}


class Pairs:
    """Checkpoints and bundles by name, each made when first asked for, by one worker for all."""

    def __init__(self, folder):
        self.folder = folder
        shipped = Path(__file__).parents[2] / "models" / "checkpoints"
        self.checkpoints = {"embedded": (shipped / "python-1m", shipped / "python-9m")}
        self.bundles = {"embedded": Bundle.read(store.embedded_folder())}
        self.notes = {"embedded": []}

    def checkpoint(self, name):
        if name not in self.checkpoints:
            kind, options = PAIRS[name]
            with self.once(name, "checkpoint") as done:
                if not done.exists():
                    make_pair(self.folder / name, kind, **options)
                    done.touch()
            self.checkpoints[name] = (self.folder / name / "draft", self.folder / name / "target")
        return self.checkpoints[name]

    def bundle(self, name):
        if name not in self.bundles:
            draft, target = self.checkpoint(name)
            output = self.folder / name / "bundle"
            with self.once(name, "bundle") as done:
                if not done.exists():
                    progress = Progress()
                    export(draft, target, output, draft_precision="fp32", progress=progress)
                    done.write_text(json.dumps(progress.notes), "utf-8")
            self.bundles[name] = Bundle.read(output)
            self.notes[name] = json.loads(done.read_text("utf-8"))
        return self.bundles[name]

    @contextlib.contextmanager
    def once(self, name, what):
        """Yield the marker file of a shared build, under a lock between workers."""
        with FileLock(self.folder / f"{name}.{what}.lock"):
            yield self.folder / f"{name}.{what}.json"


@pytest.fixture(scope="session", autouse=True)
def _traces(tmp_path_factory):
    with traces.remembered(_of_all_workers(tmp_path_factory) / "traces"):
        yield


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    folder = _of_all_workers(tmp_path_factory) / "pairs"
    folder.mkdir(exist_ok=True)
    return Pairs(folder)


def _of_all_workers(tmp_path_factory):
    """A folder of this run of tests."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


QUICK, SLOW = ("gpt2",), ("llama", "bfloat16", "windowed")  # the others are exhaustive


@pytest.fixture(
    params=[*QUICK, "embedded"]
    + [pytest.param(x, marks=pytest.mark.slow) for x in SLOW]
    + [
        pytest.param(x, marks=pytest.mark.slow(exhaustive=True))
        for x in PAIRS
        if x not in (*QUICK, *SLOW)
    ]
)
def exported(request, pairs):
    """Each exported pair in turn."""
    return pairs.bundle(request.param)


@pytest.fixture
def checkpoint(pairs, tmp_path):
    """A copy of the gpt2 target's folder, to damage."""
    import shutil

    return shutil.copytree(pairs.checkpoint("gpt2")[1], tmp_path / "checkpoint")


@pytest.fixture
def in_parts(monkeypatch):
    """Small models are run as large ones are."""
    monkeypatch.setattr(runner, "WHOLE_BYTES", 0)
    monkeypatch.setattr(partition, "PART_BYTES", 100_000)
