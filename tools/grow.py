"""Expand a small Llama or T5 checkpoint to a larger shape that generates the same text.

    python tools/grow.py CHECKPOINT FOLDER --shape 7b [--noise X]

FOLDER has the size of the shape, and so its speed and memory. With `--noise 0` its logits are those
of CHECKPOINT except for rounding: the two are a draft and a target whose acceptance rate depends on
the noise. Label results that were measured with it "synthetic".

* The small residual stream is the first h channels of the large one, times `sqrt(H / h)`, so that
  its mean square is unchanged; all other channels are 0.
* Additional layers, heads and neurons read with random weights and write zeros.
* Rotary pairs are mapped to channels of the same frequency, and queries are scaled for the larger
  head's division by `sqrt(head_dim)`.
* T5 keeps its head size, and the position biases of its heads.
* Noise is added to all matrices that write to the stream, and to the embedding's other channels.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

_LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
SHAPES = {
    "1.5b": {"hidden_size": 2048, "intermediate_size": 5632, "head_dim": 64, **_LLAMA},
    "7b": {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128, **_LLAMA},
    "t5-base": {
        "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12
    },
}  # fmt: skip
SEED = 0  # of random weights and noise


class Growth:
    """Tensors of a large model, derived from those of a small one.

    An axis map is a pair of index tensors: entry `source[i]` of a small axis becomes entry
    `target[i]`.
    """

    def __init__(
        self,
        weights: dict[str, Tensor],
        noise: float,
        limits: dict[str, tuple[int, int]],
        embedding: str,
        num_writers: int,
    ) -> None:
        """Check the shape.

        Args:
            weights: Tensors of the small model.
            noise: Size of the noise.
            limits: Size of the small and of the large model by dimension.
            embedding: Name of the embedding.
            num_writers: Matrices that write to the stream in each layer.
        """
        for name, (required, available) in limits.items():
            if required > available:
                raise click.ClickException(
                    f"{name}: requires {required}, the shape has {available}"
                )
        self.weights, self.noise, self.embedding = weights, noise, weights[embedding]
        (h, size), (layers, count) = limits["hidden size"], limits["layers"]
        self.gain = (size / h) ** 0.5
        self.layers = {(2 * i + 1) * count // (2 * layers): i for i in range(layers)}
        self.num_writers = num_writers * count + 1
        self.neurons = (torch.arange(limits["neurons"][0]),) * 2

    def _embedding(self, name: str, shape: torch.Size) -> Tensor:
        table = self._noise(name, shape, 1)
        table[:, : self.embedding.shape[1]] = self.gain * self.embedding
        return table

    def _norm(self, shape: torch.Size, source: Tensor | None, gain: float) -> Tensor:
        """Return the weights of a norm, which undo the stream's scale."""
        weight = torch.ones(shape)
        if source is not None:
            weight[:] = source.mean()
            weight[: len(source)] = source
            weight /= gain
        return weight

    def _source(self, name: str) -> Tensor | None:
        """Return the small model's tensor; None in an additional layer."""
        number = re.search(r"\.(\d+)\.", name)
        if number is None:
            return self.weights[name]
        layer = self.layers.get(int(number[1]))
        return None if layer is None else self.weights[name.replace(number[0], f".{layer}.", 1)]

    def _random(self, name: str, shape: torch.Size) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{SEED} {name}".encode()))
        return torch.randn(shape, generator=generator)

    def _noise(self, name: str, shape: torch.Size, fan_in: int) -> Tensor:
        """Return noise whose sum over all writers has `noise` times the embedding's RMS."""
        if not self.noise:
            return torch.zeros(shape)
        size = self.embedding.square().mean().sqrt()
        parts = fan_in * self.num_writers
        return self._random(name, shape).mul_(float(self.noise * size / parts**0.5))

    def _reader(
        self, name: str, shape: torch.Size, source: Tensor | None, rows: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return a matrix that reads the stream. [out, h] -> shape"""
        matrix = self._random(name, shape).div_(shape[1] ** 0.5)
        if source is not None:
            matrix[rows[1][:, None], torch.arange(source.shape[1])] = source[rows[0]]
        return matrix

    def _writer(
        self, name: str, shape: torch.Size, source: Tensor | None, columns: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return a matrix that writes to the stream. [h, in] -> shape"""
        matrix = self._noise(name, shape, shape[1])
        if source is not None:
            matrix[: len(source), columns[1]] += self.gain * source[:, columns[0]]
        return matrix


class LlamaGrowth(Growth):
    """Tensors of a large Llama."""

    def __init__(self, weights: dict[str, Tensor], small: Any, large: Any, noise: float) -> None:
        group, small_group = (
            c.num_attention_heads // c.num_key_value_heads for c in (large, small)
        )
        copies = -(-small_group // group)  # of key heads whose queries need several groups
        limits = {
            "hidden size": (small.hidden_size, large.hidden_size),
            "neurons": (small.intermediate_size, large.intermediate_size),
            "layers": (small.num_hidden_layers, large.num_hidden_layers),
            "key heads": (small.num_key_value_heads * copies, large.num_key_value_heads),
        }
        super().__init__(weights, noise, limits, "model.embed_tokens.weight", 2)
        self.small, self.large, d, head_dim = small, large, small.head_dim, large.head_dim
        if head_dim % d or small.rope_parameters["rope_type"] != "default":
            raise click.ClickException(
                "the source must have rotary embedding without scaling, and a head size that "
                "divides the shape's"
            )
        pairs = torch.arange(d // 2) * (head_dim // d)
        rotary, straight = torch.cat([pairs, head_dim // 2 + pairs]), torch.arange(d)
        queries = torch.arange(small.num_attention_heads)
        rank = queries % small_group
        homes = (queries // small_group * copies + rank // group) * group + rank % group
        keys = torch.arange(small.num_key_value_heads).repeat_interleave(copies)
        self.queries = self._head_map(queries, homes, rotary)
        self.outputs = self._head_map(queries, homes, straight)
        self.keys = self._head_map(keys, torch.arange(len(keys)), rotary)
        self.values = self._head_map(keys, torch.arange(len(keys)), straight)

    def _head_map(self, source: Tensor, target: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
        old = source[:, None] * len(entries) + torch.arange(len(entries))
        new = target[:, None] * self.large.head_dim + entries
        return old.flatten(), new.flatten()

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """Return a tensor of the large model in float32."""
        part = name.split(".")[-2]
        source = self._source(name)
        match part:
            case "q_proj":
                return self._query(name, shape, source)
            case "k_proj":
                return self._reader(name, shape, source, self.keys)
            case "v_proj":
                return self._reader(name, shape, source, self.values)
            case "gate_proj" | "up_proj":
                return self._reader(name, shape, source, self.neurons)
            case "o_proj":
                return self._writer(name, shape, source, self.outputs)
            case "down_proj":
                return self._writer(name, shape, source, self.neurons)
            case "embed_tokens":
                return self._embedding(name, shape)
            case "lm_head":
                assert source is not None
                head = torch.zeros(shape)
                head[:, : source.shape[1]] = source
                return head
        tied = part == "norm" and self.large.tie_word_embeddings
        return self._norm(shape, source, self.gain**2 if tied else self.gain)

    def _query(self, name: str, shape: torch.Size, source: Tensor | None) -> Tensor:
        """Return a matrix of queries, whose additional channels have the size of the noise."""
        if source is None:
            return self._reader(name, shape, None, self.queries)
        scale = (self.large.head_dim / self.small.head_dim) ** 0.5
        matrix = self._reader(name, shape, scale * source, self.queries)
        unused = torch.zeros(shape[0], dtype=torch.bool)
        unused.view(-1, self.large.head_dim)[self.queries[1] // self.large.head_dim] = True
        unused[self.queries[1]] = False
        matrix[unused] *= self.noise
        return matrix


class T5Growth(Growth):
    """Tensors of a large T5."""

    def __init__(self, weights: dict[str, Tensor], small: Any, large: Any, noise: float) -> None:
        limits = {
            "hidden size": (small.d_model, large.d_model),
            "neurons": (small.d_ff, large.d_ff),
            "layers": (small.num_layers, large.num_layers),
            "heads": (small.num_heads, large.num_heads),
        }
        super().__init__(weights, noise, limits, "shared.weight", 3)
        layers = (small.num_layers, small.feed_forward_proj, small.scale_decoder_outputs)
        if layers != (small.num_decoder_layers, "relu", True):
            raise click.ClickException(
                "the source must have T5's first architecture: ReLU, a tied LM head, and as many "
                "decoder layers as encoder layers"
            )
        self.heads = (torch.arange(small.num_heads * small.d_kv),) * 2

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        """Return a tensor of the large model in float32."""
        source = self._source(name)
        match name.split(".")[-2]:
            case "q" | "k" | "v":
                return self._reader(name, shape, source, self.heads)
            case "o":
                return self._writer(name, shape, source, self.heads)
            case "wi":
                return self._reader(name, shape, source, self.neurons)
            case "wo":
                return self._writer(name, shape, source, self.neurons)
            case "shared":
                return self._embedding(name, shape)
            case "relative_attention_bias":  # the first layer's, for all layers
                table = torch.zeros(shape)
                table[:, : self.weights[name].shape[1]] = self.weights[name]
                return table
        # The tied LM head's scale is undone by the division of its input by sqrt(d_model).
        return self._norm(shape, source, self.gain)


def grow(source: Path, folder: Path, shape: str, noise: float) -> None:
    """Write a float16 checkpoint of a shape with the logits of a small one, a shard per layer."""
    small = AutoConfig.from_pretrained(source)
    expected = "t5" if shape.startswith("t5") else "llama"
    if small.model_type != expected:
        raise click.ClickException(f"the source must be a {expected}, not a {small.model_type}")
    growth_class, auto_class = {
        "llama": (LlamaGrowth, AutoModelForCausalLM),
        "t5": (T5Growth, AutoModelForSeq2SeqLM),
    }[expected]
    raw = {**small.to_dict(), **SHAPES[shape], "dtype": "float16"}
    large = AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = auto_class.from_config(large)
    weights = auto_class.from_pretrained(source, dtype=torch.float32).state_dict()
    growth = growth_class(weights, small, large, noise)
    folder.mkdir(parents=True)
    shards: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, parameter in model.named_parameters():
        number = re.search(r"\.(\d+)\.", name)
        file = f"model-{int(number[1]) + 1 if number else 0:05}.safetensors"
        shards.setdefault(file, []).append((name, parameter.shape))
    for file, tensors in shards.items():
        values = {n: growth.tensor(n, size).half().contiguous() for n, size in tensors}
        save_file(values, folder / file, {"format": "pt"})
    index = {name: file for file, tensors in shards.items() for name, _ in tensors}
    text = json.dumps({"metadata": {}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text, "utf-8")
    large.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(exists=False, path_type=Path))
@click.option("--shape", type=click.Choice(list(SHAPES)), required=True)
@click.option("--noise", type=click.FloatRange(0), default=0.0, show_default=True)
def main(checkpoint: Path, folder: Path, shape: str, noise: float) -> None:
    """Write FOLDER: a checkpoint of a larger shape with the text of CHECKPOINT."""
    if folder.exists():
        raise click.ClickException(f"{folder} exists; name another folder")
    grow(checkpoint, folder, shape, noise)
    click.echo(folder)


if __name__ == "__main__":
    main()
