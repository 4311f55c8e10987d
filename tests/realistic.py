"""Random models with the magnitudes of trained ones.

A random model is initialized layer by layer during one pass over random tokens (Mishkin and Matas
2016, "All you need is a good init"), so that each layer gets realistic inputs. H hidden size, d
head size, n tokens.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

EMBEDDING = 0.1  # standard deviation of an ordinary channel
SPREAD = 3.0  # standard deviation of a row of logits
NUM_TOKENS = 64
SINK_SCORE, QUERY = 6.0, 4.0
PARTS = (1.0, -0.6)  # relative size of the two massive channels, as in LLaMA2-7B


@dataclass(frozen=True)
class Family:
    """Model family with the largest magnitudes of its trained models."""

    name: str
    massive: float  # activation (Sun et al. 2024, "Massive Activations in Large Language Models")
    gain: float = 10.0  # of a norm
    query_bias: float = 1.0
    key_bias: float = 1.0
    qk_gain: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_WINDOWS = {"sliding_window": 24, "layer_types": ("sliding_attention", "full_attention")}
FAMILIES = {
    "llama": Family("Llama", 2622),
    # Products of Qwen2.5's biases overflow float16 (llama.cpp, issue 7805).
    "qwen2": Family("Qwen2", 8000, query_bias=69, key_bias=175, options=_ROPE),
    "qwen3": Family("Qwen3", 8000, qk_gain=30, options=_ROPE),
    "gemma2": Family("Gemma2", 3000, gain=60, options={"tie_word_embeddings": True, **_WINDOWS}),
}


class Calibration:
    """Initialization of a random model during one pass, by hooks on every module."""

    def __init__(self, model: Any, family: Family, seed: int) -> None:
        self.model, self.family = model, family
        self.random = torch.Generator().manual_seed(seed)
        self.hidden = model.config.hidden_size
        channels = torch.randperm(self.hidden, generator=self.random)[:6].tolist()
        self.constant, *rest = channels
        self.outliers, self.start, self.massive = rest[:2], rest[2], rest[3:]
        self.ordinary = torch.ones(self.hidden, dtype=torch.bool)
        self.ordinary[channels] = False
        self.layers = model.model.layers
        self.layer, self.residual = 0, EMBEDDING
        self.massive_before = 0.0  # value of the massive channel before this layer
        self.head = model.get_output_embeddings()
        self.tied = self.head.weight is model.get_input_embeddings().weight
        # Residuals of trained models grow by 4.5% per layer (Heimersheim and Turner 2023).
        self.branch = min(0.2, 0.5 / len(self.layers) ** 0.5)
        self.early = min(1, (len(self.layers) - 1) // 3)  # layer that writes massive activations

    def run(self) -> None:
        """Set all weights in place."""
        for parameter in self.model.parameters():
            scale = 0.1 if parameter.ndim == 1 else self.hidden**-0.5
            parameter.copy_(scale * self.normal(parameter.shape))
        self._embeddings()
        weight = self.model.get_input_embeddings().weight
        # Massive activations begin at the first token and at delimiters (Sun et al. 2024).
        ids = torch.arange(0, len(weight), 16)
        weight[ids, self.start] = 30 * weight[:, self.ordinary].std()
        tokens = torch.randint(0, len(weight), (NUM_TOKENS,), generator=self.random)
        tokens[0] = 0
        self.special = torch.isin(tokens, ids)
        handles = [
            h for name, module in self.model.named_modules() if (h := self._hook(name, module))
        ]
        self.model(tokens[None], use_cache=False)
        for handle in filter(None, handles):
            handle.remove()
        self._spread_logits(tokens)

    def normal(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def lognormal(self, size: int, spread: float = 0.5) -> Tensor:
        return torch.exp(spread * self.normal(size))

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows without a massive activation. [..., n, H] -> [m, H]"""
        return x.reshape(NUM_TOKENS, -1)[~self.special]

    def massive_mean(self, x: Tensor, channel: int) -> float:
        """Return the mean of a channel in rows with a massive activation."""
        return float(x.reshape(NUM_TOKENS, -1)[self.special][:, channel].mean())

    def massive_change(self) -> float:
        """Return what this layer adds to the massive channel; the last one removes it."""
        if self.layer == self.early:
            return self.family.massive
        return -0.95 * self.massive_before if self.layer == len(self.layers) - 1 else 0.0

    def _norms_branches(self) -> bool:
        """Return True if norms follow attention and the feed-forward part, as in Gemma 2."""
        return hasattr(self.layers[0], "post_feedforward_layernorm")

    def _embeddings(self) -> None:
        """Set rows with different norms, some nearly zero, and outlier channels.

        Undertrained tokens have small rows (Land and Bartolo 2024). A few channels are a hundred
        times as large as others in every token (Xiao et al. 2022, SmoothQuant).
        """
        weight, scale = self.model.get_input_embeddings().weight, EMBEDDING
        if self.model.config.model_type.startswith("gemma"):
            scale /= self.hidden**0.5
        weight.copy_(scale * self.normal(weight.shape))
        weight.mul_(self.lognormal(len(weight))[:, None])
        weight[5::64] *= 0.01
        if not self.tied:
            self.head.weight.mul_(self.lognormal(len(weight), 0.3)[:, None])
        for channel, part in zip((self.constant, *self.outliers), (1, -0.6, 0.3), strict=True):
            weight[:, channel] = part * 100 * scale * (1 + 0.05 * self.normal(len(weight)))
        weight[:, [*self.massive, self.start]] = 0

    def _hook(self, name: str, module: nn.Module) -> Any:
        if module in [*self.layers]:
            hook = partial(self._enter, [*self.layers].index(module))
            return module.register_forward_pre_hook(hook, with_kwargs=True)
        if "Norm" in type(module).__name__:
            return module.register_forward_pre_hook(partial(self._set_norm, name))
        if isinstance(module, nn.Linear) and module is not self.head:
            return module.register_forward_pre_hook(partial(self._set_matrix, name))
        return None

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        self.layer = index
        self.residual = float(self.rows(x)[:, self.ordinary].abs().median()) / 0.6745
        self.massive_before = self.massive_mean(x, self.massive[0])

    def _set_norm(self, name: str, norm: Any, args: tuple[Tensor]) -> None:
        """Set gains from 0 to the family's largest that scale ordinary channels to about 1."""
        last = name.rpartition(".")[2]
        if last in ("q_norm", "k_norm"):
            return self._set_qk_norm(last, norm)
        x = args[0] / args[0].square().mean(-1, keepdim=True).sqrt()
        size = self.rows(x).square().mean(0).sqrt()
        gain = self.lognormal(self.hidden)
        if last.startswith("post_") and self._norms_branches():
            gain *= self.branch * self.residual
            if "feedforward" in last and (change := self.massive_change()):
                gain[self.massive] = abs(change / self.massive_mean(x, self.massive[0]))
        elif name == "model.norm":
            self.final = norm
            part = size * self.head.weight.square().mean(0).sqrt()
            gain *= (3 * part.median() / part).clamp(max=1) / size.median()
            gain[self.massive] *= 0.05
        else:
            gain = torch.minimum(gain / size[self.ordinary].median(), 20 / size)
            first, second = torch.arange(self.hidden)[self.ordinary][:2]
            gain[first], gain[second] = 0.0, self.family.gain
            gain.clamp_(max=self.family.gain)
            gain[self.massive] = 0.1
        _set_gain(norm, gain)
        return None

    def _set_qk_norm(self, last: str, norm: Any) -> None:
        """Set large gains in the slowest dimensions (Jin et al. 2025, "Massive Values")."""
        gain = self.lognormal(len(norm.weight), 0.3)
        d = len(gain)
        large, small = (-1, d // 2 - 1) if last == "q_norm" else (d // 2 - 1, -1)
        gain[large], gain[small] = self.family.qk_gain, 1 if small == -1 else 0.1
        _set_gain(norm, gain)

    def _set_matrix(self, name: str, module: nn.Linear, args: tuple[Tensor]) -> None:
        """Scale a matrix so that its output has the magnitude of a trained model's."""
        x, weight, last = args[0], module.weight, name.rpartition(".")[2]
        rows = self.rows(x)
        if last in ("o_proj", "down_proj"):
            _rescale(weight, rows, self.branch * self.residual)
        else:  # it reads the residual stream: reduce the weights of outlier channels
            size = rows.square().mean(0).sqrt()
            weight.mul_((size.median() / size.clamp(min=size.median())) ** 0.8)
            weight[:, [self.start, *self.massive]] *= 0.1
            _rescale(weight, rows, {"q_proj": 1.25, "k_proj": 1.25, "v_proj": 1.0}.get(last, 1.2))
        if last in ("q_proj", "k_proj"):
            self._set_sinks(last, weight, x)
            if module.bias is not None:
                self._set_bias(last, module.bias)
        if change := self.massive_change():
            self._set_massive(last, weight, x, change)

    def _set_sinks(self, last: str, weight: Tensor, x: Tensor) -> None:
        """Make half of the heads attend to massive activations (Xiao et al. 2023, attention sinks).

        The query is constant in its slowest dimension, where the key reads the massive channel.
        """
        attention = self.layers[self.layer].self_attn
        slowest = torch.arange(len(weight)).view(-1, attention.head_dim)[:, -1]
        family, share = self.family, self._bias_share()
        if last == "q_proj" and self.layer > self.early:
            heads = slowest[::2]
            constant = float(self.rows(x)[:, self.constant].mean())
            weight[heads] *= 0.05
            weight[heads, self.constant] = QUERY / family.qk_gain / constant
        if last == "k_proj":
            weight[slowest] *= 0.05  # what a large bias of the queries multiplies
            if self.layer > self.early:
                query = QUERY + share * family.query_bias
                score = SINK_SCORE / (attention.scaling * query)
                weight[slowest, self.massive[0]] = score / self.massive_mean(x, self.massive[0])

    def _bias_share(self) -> float:
        """Return 1 in the first and the last layer, whose biases are ten times the others'."""
        return 1.0 if self.layer in (0, len(self.layers) - 1) else 0.1

    def _set_bias(self, last: str, bias: Tensor) -> None:
        """Set biases that are large in the slowest dimension of each head."""
        largest = self.family.query_bias if last == "q_proj" else self.family.key_bias
        largest *= self._bias_share()
        bias.mul_(5)
        if largest > 1:
            heads = bias.view(-1, self.layers[self.layer].self_attn.head_dim)
            heads[:, -1] = largest * (0.5 + 0.5 * torch.rand(len(heads), generator=self.random))
            heads[0, -1] = largest

    def _set_massive(self, last: str, weight: Tensor, x: Tensor, change: float) -> None:
        """Make one neuron write large values to two channels (Yu et al. 2024, super weights)."""
        if last in ("gate_proj", "up_proj"):  # inactive below the constant channel's threshold
            source = self.start if self.layer == self.early else self.massive[0]
            weight[0] = 0
            weight[0, source] = 24 / self.massive_mean(x, source)
            weight[0, self.constant] = -12 / float(self.rows(x)[:, self.constant].mean())
        elif last == "down_proj":
            if self._norms_branches():
                change = math.copysign(50 * self.residual, change)  # the norm amplifies it
            weight[:, 0] = 0
            activation = self.massive_mean(x, 0)
            for channel, part in zip(self.massive, PARTS, strict=True):
                weight[channel] = 0
                weight[channel, 0] = part * change / activation

    def _spread_logits(self, tokens: Tensor) -> None:
        for _ in range(6):  # a softcap needs several iterations
            spread = float(self.model(tokens[None], use_cache=False).logits[0].std(1).median())
            if abs(spread / SPREAD - 1) < 0.05:
                break
            if self.tied:
                _set_gain(self.final, _gain(self.final) * (SPREAD / spread))
            else:
                self.head.weight.mul_(SPREAD / spread)


def _gain(norm: Any) -> Tensor:
    return norm.weight + int(type(norm).__name__.startswith("Gemma"))


def _set_gain(norm: Any, gain: Tensor) -> None:
    norm.weight.copy_(gain - int(type(norm).__name__.startswith("Gemma")))


def _rescale(weight: Tensor, x: Tensor, size: float) -> None:
    weight.mul_(size / (x @ weight.T).square().mean().sqrt())


def make_model(
    family: str, *, layers: int = 2, hidden: int = 64, heads: int = 4, vocab: int = 512,
    context: int = 256, seed: int = 0,
) -> Any:  # fmt: skip
    """Return a float32 model of a family with random weights of realistic magnitudes."""
    config_class = getattr(transformers, f"{FAMILIES[family].name}Config")
    options: dict[str, Any] = {
        "vocab_size": vocab, "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads, "query_pre_attn_scalar": hidden // heads,
        "intermediate_size": 2 * hidden, "max_position_embeddings": context,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False,
        **FAMILIES[family].options,
    }  # fmt: skip
    if types := options.get("layer_types"):
        options["layer_types"] = [types[i % len(types)] for i in range(layers)]
    parameters = inspect.signature(config_class).parameters
    for name in ("head_dim", "query_pre_attn_scalar"):
        if name not in parameters:
            del options[name]
    model = AutoModelForCausalLM.from_config(
        config_class(**options), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        Calibration(model, FAMILIES[family], seed).run()
    return model
