"""Pairs for GPUs, exported once; without onnxruntime-gpu and a C compiler these are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import standin

STANDIN = Path(standin.__file__).parent
PAIRS = {
    "fp32-fp16": ("llama", {"kv_heads": 2, "tied": True}),
    "int8-fp16": ("llama", {"kv_heads": 2}),
    "int4-fp16": ("llama", {"kv_heads": 2}),
    "fp32-bf16": ("llama", {"kv_heads": 2, "tied": True}),
    "int8-fp32": ("gpt2", {}),
}


@pytest.fixture(scope="session")
def cuda():
    """The stand-in, loaded: from then on CUDA is not the real one in this process."""
    standin.load()
    return standin


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Folders of bundles by their weights' and their computing type."""
    pytest.importorskip("torch", reason="needs the export extra")
    from checkpoints import make_config, make_model, make_tokenizer, save
    from specedge.exporter import export

    made = {}

    def pair(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            kind, options = PAIRS[name]
            precision, compute = name.split("-")
            tokenizer = make_tokenizer(folder / "tokenizer")
            target = make_model(make_config(kind, context=256, **options))
            save(target, tokenizer, folder / "target")
            made[name] = export(
                "self:1", folder / "target", folder / "bundle", precision=precision, compute=compute
            ).folder
        return made[name]

    return pair


def run(*arguments, **environment):
    """The command line in a process that finds the stand-in where a GPU's machine has CUDA."""
    command = ["sh", str(STANDIN / "run.sh"), sys.executable, "-m", "specedge", *arguments]
    environment = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
