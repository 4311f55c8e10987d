"""Grow a small trained checkpoint into the shape of a published one. Development only.

    python tools/grow.py CHECKPOINT FOLDER --shape tinyllama-1.1b [--noise X]

FOLDER gets a checkpoint with that shape's sizes and so its times and memory, and with the text of
CHECKPOINT: two shapes grown from one CHECKPOINT are a pair whose acceptance the noise sets.
growth.py and growth_families.py have the arithmetic; docs/growing.md says what such figures do
not show.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from corpus import held_out, library_files
from growth import GrowthError
from growth_families import FAMILIES, settings
from muon import BFLOAT16
from shapes import SHAPES, write_weights

NAMES = {
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "tinyllama-1.1b": "TinyLlama/TinyLlama_v1.1",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-xl": "openai-community/gpt2-xl",
}
DTYPES = ("float32", "bfloat16", "float16")
NUM_RARE = 64  # tokens whose rows are mixed for those that the source lacks
WINDOW = 128  # tokens that the two models are compared on at a time
CARD = """Weights of the shape of {shape} that compute the text of a small trained model.

Made by `tools/grow.py` of specedge: times and memory are the shape's, text and acceptance are not.
Figures measured with it are to be labelled "grown".
"""


@dataclass(frozen=True)
class Agreement:
    """How far a grown model is the source, over held-out Python text."""

    positions: int
    top_token: float  # share of positions where the likeliest token is the source's
    overlap: float  # mean of 1 - TV: the acceptance rate at temperature 1
    largest_difference: float  # of logits, over the source's tokens
    new_tokens: float  # mean probability of tokens that the source lacks


def grow(
    source: Path, folder: Path, shape: dict[str, Any], noise: float, seed: int, dtype: torch.dtype
) -> None:
    """Write a checkpoint that computes the source's text with a shape's sizes.

    Raises GrowthError and OSError; `folder` is there when all is written, or not at all.
    """
    if folder.exists():
        raise GrowthError(f"{folder} exists; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    small = _config(source)
    raw = {**settings(small, shape), "dtype": str(dtype).removeprefix("torch.")}
    raw |= {"bos_token_id": small.bos_token_id, "eos_token_id": small.eos_token_id}
    large = AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(large)
    raw["architectures"] = [type(model).__name__]
    named = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    _check_space(folder.parent, sum(shape.numel() for _, shape in named) * dtype.itemsize)
    weights = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    growth = FAMILIES[small.model_type](weights, small, large, _rare(source), noise, seed)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        place = Path(temporary, "new")
        place.mkdir()
        (place / "config.json").write_text(json.dumps(raw, indent=2), "utf-8")
        _write_tokenizer(source, place, large.vocab_size)

        def pieces(name: str, shape: torch.Size) -> Iterator[Tensor]:
            found = growth.tensor(name, shape)
            assert found.shape == shape, name
            yield found.to(dtype).contiguous().flatten()

        write_weights(place, named, dtype, pieces)
        os.rename(place, folder)


def _config(source: Path) -> Any:
    if not (source / "config.json").is_file():
        raise GrowthError(f"{source} is no checkpoint: it has no config.json")
    return AutoConfig.from_pretrained(source)


def _rare(source: Path) -> Tensor:
    """The tokens that the source thinks least likely over held-out text. [NUM_RARE]"""
    logits = _logits(source, _held_out(source, 1024))
    return logits.log_softmax(-1).mean((0, 1)).argsort()[:NUM_RARE]


def _check_space(place: Path, size: int) -> None:
    free = shutil.disk_usage(place).free
    if size > free:
        raise GrowthError(
            f"{size / 1e9:.1f} GB are needed in {place}, {free / 1e9:.1f} GB are free"
        )


def _write_tokenizer(source: Path, folder: Path, vocab_size: int) -> None:
    """The source's tokenizer with entries that no text gives, up to a vocabulary's size."""
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    vocab = raw["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in raw["added_tokens"])}
    vocab |= {f"unused{i}": i for i in range(vocab_size) if i not in taken}
    path.write_text(json.dumps(raw, ensure_ascii=False), "utf-8")


def compare(source: Path, folder: Path, num_tokens: int) -> Agreement:
    """Compare a grown checkpoint with its source on modules that the source was not trained on."""
    ids = _held_out(source, num_tokens)
    a, b = (_logits(place, ids) for place in (source, folder))
    known, new = b[..., : a.shape[-1]], b.softmax(-1)[..., a.shape[-1] :]
    overlap = torch.minimum(a.softmax(-1), b.softmax(-1)[..., : a.shape[-1]]).sum(-1)
    return Agreement(
        positions=ids.numel(),
        top_token=float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        overlap=float(overlap.mean()),
        largest_difference=float((a - known).abs().max()),
        new_tokens=float(new.sum(-1).mean()),
    )


def _held_out(source: Path, num_tokens: int) -> Tensor:
    """The beginnings of modules that the source was not trained on. [windows, WINDOW]"""
    tokenizer = AutoTokenizer.from_pretrained(source)
    windows: list[list[int]] = []
    for text in _texts():
        tokens = tokenizer(text, truncation=True, max_length=WINDOW)["input_ids"]
        if len(tokens) == WINDOW and len(windows) * WINDOW < num_tokens:
            windows.append(tokens)
    return torch.tensor(windows)


@cache
def _texts() -> list[str]:
    return [text for name, text in library_files() if held_out(name)]


@torch.no_grad()
def _logits(folder: Path, ids: Tensor) -> Tensor:
    """[windows, WINDOW] -> [windows, WINDOW, V]"""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    if model.dtype == torch.float16 or not BFLOAT16:
        model = model.float()  # 16 bits are slow on such a CPU
    return torch.cat([model(row[None]).logits.float() for row in ids])


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--shape", "name", type=click.Choice(list(NAMES)), required=True)
@click.option("--noise", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of the random weights and the noise.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--vocab", type=int, help="Tokens, for pairs of shapes with different ones.")
@click.option("--tokens", default=1024, show_default=True, help="To compare on; 0 compares not.")
def main(
    checkpoint: Path,
    folder: Path,
    name: str,
    noise: float,
    seed: int,
    dtype: str,
    vocab: int | None,
    tokens: int,
) -> None:
    """Write FOLDER: a shape's checkpoint with CHECKPOINT's text; print how far it agrees."""
    shape = {**SHAPES[NAMES[name]], **({"vocab_size": vocab} if vocab else {})}
    facts: dict[str, Any] = {"shape": name, "noise": noise, "seed": seed, "vocab": vocab}
    try:
        grow(checkpoint, folder, shape, noise, seed, getattr(torch, dtype))
    except (GrowthError, OSError) as error:
        raise click.ClickException(str(error)) from error
    (folder / "README.md").write_text(CARD.format(shape=NAMES[name]), "utf-8")
    if tokens:
        facts["agreement"] = asdict(compare(checkpoint, folder, tokens))
    (folder / "grown.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    click.echo(json.dumps(facts))


if __name__ == "__main__":
    main()
