"""Pairs are exported once a session; without the export extra all of these tests are skipped."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from cases import exhaustive, slow

for package in ("torch", "transformers", "optimum", "onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason="needs the cpu and export extras")

import torch  # noqa: E402

import traces  # noqa: E402
from checkpoints import make_pair  # noqa: E402
from comparing import model_of, traced  # noqa: E402
from shared import build_once, run_folder  # noqa: E402
from specedge.bundle import Bundle, store  # noqa: E402
from specedge.exporter import Progress, export  # noqa: E402
from specedge.exporter.verification import partition, runner  # noqa: E402

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
            folder = build_once(
                self.folder / name, lambda folder: make_pair(folder, kind, **options)
            )
            self.checkpoints[name] = (folder / "draft", folder / "target")
        return self.checkpoints[name]

    def bundle(self, name):
        if name not in self.bundles:

            def build(folder):
                progress = Progress()
                export(
                    *self.checkpoint(name), folder,
                    ops="all", draft_precision="fp32", progress=progress,
                )  # fmt: skip
                notes.write_text(json.dumps(progress.notes), "utf-8")

            notes = self.folder / f"{name}.notes.json"
            self.bundles[name] = Bundle.read(build_once(self.folder / f"{name}-bundle", build))
            self.notes[name] = json.loads(notes.read_text("utf-8"))
        return self.bundles[name]


@pytest.fixture(scope="session", autouse=True)
def _traces(tmp_path_factory):
    with traces.remembered(run_folder(tmp_path_factory, "traces")):
        yield


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    return Pairs(run_folder(tmp_path_factory, "pairs"))


@pytest.fixture(scope="session")
def traced_model(tmp_path_factory):
    """Return a function that exports a small model in a graph variant, once for all files."""

    @functools.cache
    def traced_model(kind, ops):
        model = model_of(kind)
        folder = tmp_path_factory.mktemp(f"{kind}-{ops}")
        return model, traced(model, folder, ops)

    return traced_model


QUICK, SLOW = ("gpt2",), ("bfloat16",)  # the others are exhaustive


@pytest.fixture(
    params=[*QUICK, "embedded"]
    + [slow(x) for x in SLOW]
    + [exhaustive(x) for x in PAIRS if x not in (*QUICK, *SLOW)]
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
