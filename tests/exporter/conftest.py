"""Pairs are exported once a session; without the export extra all of these tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

for package in ("torch", "transformers", "optimum", "onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason="needs the cpu and export extras")

import torch  # noqa: E402

from checkpoints import make_pair  # noqa: E402
from specedge import store  # noqa: E402
from specedge.bundle import Bundle  # noqa: E402
from specedge.exporter import Progress, export  # noqa: E402
from specedge.exporter.compare import partition, runner  # noqa: E402

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
    """Checkpoints and bundles by name, each made when first asked for."""

    def __init__(self, folder):
        self.folder = folder
        shipped = Path(__file__).parents[2] / "models" / "checkpoints"
        self.checkpoints = {"embedded": (shipped / "python-1m", shipped / "python-9m")}
        self.bundles = {"embedded": Bundle.read(store.embedded())}
        self.notes = {"embedded": []}

    def checkpoint(self, name):
        if name not in self.checkpoints:
            kind, options = PAIRS[name]
            self.checkpoints[name] = make_pair(self.folder / name, kind, **options)
        return self.checkpoints[name]

    def bundle(self, name):
        if name not in self.bundles:
            draft, target = self.checkpoint(name)
            progress = Progress()
            output = self.folder / name / "bundle"
            self.bundles[name] = export(draft, target, output, progress=progress)
            self.notes[name] = progress.notes
        return self.bundles[name]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    return Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(params=[*PAIRS, "embedded"])
def exported(request, pairs):
    """Each exported pair in turn."""
    return pairs.bundle(request.param)


@pytest.fixture
def checkpoint(pairs, tmp_path):
    """A copy of the gpt2 target's folder, to spoil."""
    import shutil

    return shutil.copytree(pairs.checkpoint("gpt2")[1], tmp_path / "checkpoint")


@pytest.fixture
def in_parts(monkeypatch):
    """Small models are played as large ones are."""
    monkeypatch.setattr(runner, "WHOLE_BYTES", 0)
    monkeypatch.setattr(partition, "PART_BYTES", 100_000)
