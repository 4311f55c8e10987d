"""Time and memory of an export at the true size of a known model. Development only.

    python tools/measure_export.py gpt2-xl [--dtype float32] [--folder FOLDER]

The checkpoint is random, because only its shape matters here: it is written shard by shard, with
embeddings large enough that the logits spread as a trained model's do. Its draft is a small model
of the same family. The yardstick is a plain copy of the checkpoint's weights, file by file, with
nothing of them in the system's cache before.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from byte_level import END, train_tokenizer

_TINYLLAMA = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA_1B = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "rope_theta": 500000.0,
}  # fmt: skip
SHAPES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gpt2": (GPT2Config, {}, "float32"),
    "gpt2-xl": (GPT2Config, {"n_embd": 1600, "n_layer": 48, "n_head": 25}, "float32"),
    "llama-250m": (LlamaConfig, {**_TINYLLAMA, "num_hidden_layers": 3}, "bfloat16"),
    "tinyllama": (LlamaConfig, _TINYLLAMA, "bfloat16"),
    "llama-3.2-1b": (LlamaConfig, _LLAMA_1B, "bfloat16"),
}
SMALL = {
    GPT2Config: {"n_embd": 64, "n_layer": 1, "n_head": 2},
    LlamaConfig: {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
    },
}  # fmt: skip
SHARD = 500_000_000
MB, GB = 1e6, 1e9


def write_checkpoint(folder: Path, config: Any, dtype: torch.dtype, tokenizer: Any) -> None:
    """A random checkpoint, of which no more than a shard is ever in memory."""
    folder.mkdir(parents=True)
    config.bos_token_id = config.eos_token_id = 0
    config.dtype = dtype
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    where: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        if sum(t.nbytes for t in shards[-1].values()) > SHARD:
            _write_shard(folder, len(shards), shards[-1], where)
            shards.append({})
            shards[-2].clear()
        shards[-1][name] = _random(name, parameter.shape, config.vocab_size).to(dtype)
    _write_shard(folder, len(shards), shards[-1], where)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def _random(name: str, shape: torch.Size, vocab_size: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith("bias") else 1.0)
    deviation = 4 / shape[1] ** 0.5 if shape[0] == vocab_size else 0.02
    return torch.empty(shape).normal_(0, deviation)


def _write_shard(
    folder: Path, number: int, tensors: dict[str, torch.Tensor], where: dict[str, str]
) -> None:
    file = f"model-{number:05}.safetensors"
    save_file(tensors, folder / file, {"format": "pt"})
    where.update(dict.fromkeys(tensors, file))


def copy_seconds(folder: Path, output: Path) -> float:
    """What reading the weights and writing as many bytes takes."""
    files = sorted(folder.glob("*.safetensors"))
    _forget(files)
    start = time.perf_counter()
    with output.open("wb") as target:
        for file in files:
            with file.open("rb") as source:
                while piece := source.read(8 << 20):
                    target.write(piece)
    seconds = time.perf_counter() - start
    output.unlink()
    _forget(files)
    return seconds


def _forget(files: list[Path]) -> None:
    """Drop files from the system's cache, where it can be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Watch:
    """The peak memory of a process, asked for every few milliseconds: Linux only."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.peaks = {"VmHWM": 0, "RssAnon": 0, "RssFile": 0}
        self._process = process
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def done(self) -> dict[str, int]:
        """Bytes, when the process has ended."""
        self._thread.join()
        return self.peaks

    def _look(self) -> None:
        status = Path(f"/proc/{self._process.pid}/status")
        while self._process.poll() is None:
            try:
                lines = [line.split() for line in status.read_text().splitlines()]
            except OSError:
                break
            for key, *value in lines:
                if (name := key.rstrip(":")) in self.peaks:
                    self.peaks[name] = max(self.peaks[name], 1024 * int(value[0]))
            time.sleep(0.02)


@click.command()
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]))
@click.option("--folder", type=click.Path(path_type=Path), help="Where files of this size may go.")
def main(shape: str, dtype: str | None, folder: Path | None) -> None:
    """Export a random model of a known shape, and print what that took."""
    kind, options, stored = SHAPES[shape]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=train_tokenizer([inspect.getsource(inspect)], 512),
            bos_token=END,
            eos_token=END,
        )
        type_ = getattr(torch, dtype or stored)
        write_checkpoint(place / "target", kind(**options), type_, tokenizer)
        write_checkpoint(place / "draft", kind(**options | SMALL[kind]), type_, tokenizer)
        size = sum(file.stat().st_size for file in (place / "target").glob("*.safetensors"))
        copied = copy_seconds(place / "target", place / "copy")
        command = [sys.executable, "-m", "specedge", "export", "--output", str(place / "bundle")]
        command += ["--draft", str(place / "draft"), "--target", str(place / "target")]
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        watch = Watch(process)
        _, said = process.communicate()
        seconds = time.perf_counter() - start
        peaks = watch.done()
        used = os.times().children_user + os.times().children_system
        shutil.rmtree(place / "bundle", ignore_errors=True)
    click.echo(said)
    click.echo(f"{shape} in {type_}: {size / GB:.2f} GB of weights; exit {process.returncode}")
    click.echo(f"copying them takes {copied:.1f} s, the export {seconds:.1f} s")
    click.echo(f"it used {used:.1f} s of the processors' time, of which {os.cpu_count()} are here")
    for what, key in (
        ("resident memory, with pages of files", "VmHWM"),
        ("memory that is no file's", "RssAnon"),
    ):
        click.echo(f"peak {what}: {peaks[key] / GB:.2f} GB, {peaks[key] / size:.2f} of the weights")


if __name__ == "__main__":
    main()
