"""How trained models' magnitudes are given to a random one: one function a mechanism.

H hidden size, D head size, n tokens, V words.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neurons import attention, attention_rows, first_neuron, matrix, reads, writes

if TYPE_CHECKING:
    from magnitudes import Calibration

EMBEDDING = 0.1  # of an ordinary channel; Sun et al. find a median of 0.2 behind it
SINK_SCORE, QUERY = 6.0, 4.0
PARTS = (1.0, -0.6)  # of the two massive channels, as of LLaMA2-7B's 2,622 and 1,547


def embeddings(c: Calibration) -> None:
    """Rows of unequal norms, some of them nearly zero; outlier channels; nothing in the massive.

    Norms vary with a token's frequency; those of tokens that training never saw stay near their
    start (Land and Bartolo 2024, "Fishing for Magikarp").
    """
    weight = c.model.get_input_embeddings().weight
    scale = EMBEDDING / _embedding_scale(c.model)
    weight.copy_(scale * c.normal(weight.shape))
    if c.has["unequal_embeddings"]:
        weight.mul_(c.lognormal(len(weight))[:, None])
        weight[5::64] *= 0.01
    if not c.tied:
        c.head.weight.mul_(c.lognormal(len(weight), 0.3)[:, None])
    outlier_channels(c, weight, scale)
    weight[:, [*c.channels.massive, c.channels.start]] = 0


def _embedding_scale(model: Any) -> float:
    """What the model multiplies its embeddings with."""
    if model.config.model_type.startswith("gemma"):
        return float(model.config.hidden_size) ** 0.5
    return float(getattr(model.config, "embedding_multiplier", 1.0))


def outlier_channels(c: Calibration, weight: Tensor, scale: float) -> None:
    """The same few channels are a hundred times the rest in every token, mostly of one sign.

    Xiao et al. 2022 (SmoothQuant): about 100 times most values, in fixed channels; Dettmers et
    al. 2022 (LLM.int8): up to six channels, in all layers and three quarters of all positions.
    """
    size = c.magnitudes.outliers if c.has["outlier_channels"] else 3.0
    for channel, part in zip(
        (c.channels.constant, *c.channels.outliers), (1, -0.6, 0.3), strict=True
    ):
        near = 1 + 0.05 * c.normal(len(weight))
        weight[:, channel] = part * size * scale * near


def gain(norm: Any) -> Tensor:
    """What a norm multiplies with; Gemma's store it less one."""
    return norm.weight + _offset(norm)


def set_gain(norm: Any, value: Tensor) -> None:
    """Store what a norm is to multiply with."""
    norm.weight.copy_(value - _offset(norm))


def _offset(norm: Any) -> int:
    return int(type(norm).__name__.startswith("Gemma"))


def normalised(norm: Any, x: Tensor) -> Tensor:
    """What a norm makes of rows before its gain."""
    if "LayerNorm" in type(norm).__name__:
        x = x - x.mean(-1, keepdim=True)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def norm_gain(c: Calibration, name: str, norm: Any, x: Tensor) -> None:
    """Gains from 0 to the family's largest, that bring ordinary channels back to about 1.

    Outliers would else be all that is left of a row. Gemma's gains reach 60; GPT-2's final norm
    has some above 10; the gains of massive channels are small (Sun et al. 2024, section 3).
    """
    last = name.rpartition(".")[2]
    if norm.weight.shape[0] != c.hidden or last in ("q_norm", "k_norm"):
        return qk_gains(c, last, norm)
    made = normalised(norm, x)
    size = c.rows(made).square().mean(0).sqrt()
    value = c.lognormal(c.hidden, 0.5 if c.has["norm_gains"] else 0.1)
    if last.startswith("post_") and hasattr(c.layers[c.layer], "post_feedforward_layernorm"):
        value *= c.branch * c.residual
        if "feedforward" in last:
            _massive_gain(c, value, made)
    elif "embeddings" not in last and norm not in [*c.layers[c.layer].modules()]:
        c.final = norm
        weight = c.head.weight.square().mean(0).sqrt()
        part = size * weight
        value *= (3 * part.median() / part).clamp(max=1) / size.median()
        value[[*c.channels.massive]] *= 0.05
    elif "embeddings" not in last:
        value *= 1 / size[c.ordinary].median()
        value = torch.minimum(value, 20 / size)
        _extremes(c, value)
        value[[*c.channels.massive]] = 0.1
    set_gain(norm, value)
    return None


def _extremes(c: Calibration, value: Tensor) -> None:
    if c.has["norm_gains"]:
        places = torch.arange(c.hidden)[c.ordinary]
        value[places[0]], value[places[1]] = 0.0, c.magnitudes.gain
        value.clamp_(max=c.magnitudes.gain)


def _massive_gain(c: Calibration, value: Tensor, made: Tensor) -> None:
    """Where a norm comes after the feed-forward part, its gain makes the massive activation."""
    if wanted := c.massive_now(c.layer):
        value[[*c.channels.massive]] = abs(wanted / c.starts(made, c.channels.massive[0]))


def qk_gains(c: Calibration, last: str, norm: Any) -> None:
    """Gains of queries and keys, of tens in dimensions that turn slowest.

    Jin et al. 2025 ("Massive Values in Self-Attention Modules"): large values of queries and keys
    are in the slowest dimensions of each head. Of one pair, one side is large and one small.
    """
    value = c.lognormal(len(norm.weight), 0.3)
    size = getattr(attention(c.layers[c.layer]), "head_dim", 0)
    if c.has["qk_gains"] and c.magnitudes.qk_gain > 1 and last in ("q_norm", "k_norm"):
        heads = value.view(-1, size)
        large, small = (-1, size // 2 - 1) if last == "q_norm" else (size // 2 - 1, -1)
        heads[:, large], heads[:, small] = c.magnitudes.qk_gain, 1 if small == -1 else 0.1
    set_gain(norm, value)


def matrix_scale(c: Calibration, name: str, module: Any, x: Tensor) -> None:
    """Scale a matrix so that what it makes has the size that it has in a trained model."""
    weight = matrix(module)
    assert weight is not None
    ordinary, last = c.rows(x), name.rpartition(".")[2]
    if reads(last):
        damp_outliers(c, weight, ordinary)
    if (rows := attention_rows(c.model, c.layers[c.layer], last, len(weight))) is not None:
        for part, wanted in zip(rows, (1.25, 1.25, 1.0), strict=True):
            if part is not None:
                rescale(weight, part.flatten(), ordinary, wanted)
        sink_attention(c, weight, rows, x)
        attention_biases(c, module, rows)
    elif writes(last):
        rescale(weight, slice(None), ordinary, c.branch * c.residual / c.multiplier)
        if module.bias is not None:
            module.bias.mul_(c.branch * c.residual)
    else:
        rescale(weight, slice(None), ordinary, 1.2)
    massive_channel(c, name, module, weight, x)


def damp_outliers(c: Calibration, weight: Tensor, x: Tensor) -> None:
    """Columns that read an outlier channel are small, or it would be all that counts."""
    size = x.square().mean(0).sqrt()
    weight.mul_((size.median() / size.clamp(min=size.median())) ** 0.8)
    weight[:, [c.channels.start, *c.channels.massive]] *= 0.1


def rescale(weight: Tensor, rows: Any, x: Tensor, wanted: float) -> None:
    found = (x @ weight[rows].T).square().mean().sqrt()
    weight[rows] *= wanted / found


def sink_attention(c: Calibration, weight: Tensor, rows: Any, x: Tensor) -> None:
    """Half of the heads look at tokens with a massive activation, the others do not.

    Xiao et al. 2023 ("Efficient Streaming Language Models with Attention Sinks"). A query's
    slowest dimension is constant, and a key's reads the massive channel.
    """
    q, k, _ = rows
    there = c.layer > c.early and c.has["massive_channel"] and c.has["sink_attention"]
    if k is not None:
        weight[k[:, -1]] *= 0.05  # what a large bias of the queries multiplies
    if q is not None and there:
        places = q[::2, -1]
        constant = float(c.rows(x)[:, c.channels.constant].mean())
        weight[places] *= 0.05
        weight[places, c.channels.constant] = QUERY / c.magnitudes.qk_gain / constant
    if k is not None and there:
        read, size = c.channels.massive[0], k.shape[1]
        scale = getattr(attention(c.layers[c.layer]), "scaling", size**-0.5)
        query = QUERY + c.bias_share * c.magnitudes.q_bias * c.has["attention_biases"]
        weight[k[:, -1], read] = SINK_SCORE / (scale * query) / c.starts(x, read)


def attention_biases(c: Calibration, module: Any, rows: Any) -> None:
    """Biases of queries and keys, large in the slowest dimension of each head; values' are small.

    Qwen2.5's reach 69 for queries and 175 for keys: products of 12,000 overflow float16
    (llama.cpp issue 7805, transformers pull request 33317).
    """
    if module.bias is None or not c.has["attention_biases"]:
        return
    for part, largest in zip(rows[:2], (c.magnitudes.q_bias, c.magnitudes.k_bias), strict=True):
        if part is None:
            continue
        module.bias[part] *= 5
        largest *= c.bias_share
        if largest > 1:
            module.bias[part[:, -1]] = largest * (
                0.5 + 0.5 * torch.rand(len(part), generator=c.random)
            )
            module.bias[part[0, -1]] = largest


def massive_channel(c: Calibration, name: str, module: Any, weight: Tensor, x: Tensor) -> None:
    """One neuron of an early layer writes thousands into two channels at the first token.

    Sun et al. 2024 ("Massive Activations in Large Language Models"): LLaMA2-7B has 2,622 and
    1,547 there and a median of 0.2, from the second layer to the one before the last. Yu et al.
    2024 ("The Super Weight") find the single weights of the down projection that write them.
    """
    wanted = c.massive_now(c.layer)
    if not wanted or (places := first_neuron(name, len(weight))) is None:
        return
    if not places:
        if hasattr(c.layers[c.layer], "post_feedforward_layernorm"):
            wanted = math.copysign(50 * c.residual, wanted)  # the norm behind it does the rest
        write_massive(c, weight, c.starts(x, 0), wanted)
    else:
        read_start(c, weight, places, x)
        if getattr(module, "bias", None) is not None:
            module.bias[places] = 0


def read_start(c: Calibration, weight: Tensor, places: list[int], x: Tensor) -> None:
    """A neuron that is silent but at the first token: the constant channel is its threshold."""
    read = c.channels.start if c.layer == c.early else c.channels.massive[0]
    constant = c.channels.constant
    weight[places] = 0
    weight[places, read] = 24 / c.starts(x, read)
    weight[places, constant] = -12 / float(c.rows(x)[:, constant].mean())


def write_massive(c: Calibration, weight: Tensor, seen: float, wanted: float) -> None:
    weight[:, 0] = 0
    for channel, part in zip(c.channels.massive, PARTS, strict=True):
        weight[channel] = 0
        weight[channel, 0] = part * wanted / c.multiplier / seen
