"""The magnitudes of trained models, given to random ones: one small function a mechanism.

A random model is calibrated in one pass over random tokens, matrix after matrix as they run (as
in Mishkin and Matas 2016, "All you need is a good init"): each reads what the earlier ones make
of the magnitudes, and none makes the model chaotic. H hidden size, d head size, n tokens, V words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expert_magnitudes import expert_inputs, expert_outputs
from mechanisms import (
    EMBEDDING,
    embeddings,
    gain,
    matrix_scale,
    norm_gain,
    set_gain,
)
from neurons import decoder_layers, matrix

MECHANISMS = (
    "unequal_embeddings",
    "outlier_channels",
    "norm_gains",
    "attention_biases",
    "qk_gains",
    "massive_channel",
    "sink_attention",
)
SPREAD = 3.0  # of a row of logits
NUM_TOKENS = 64


@dataclass(frozen=True)
class Magnitudes:
    """How large what becomes in a family; 0 where it has no such thing."""

    massive: float = 2500.0
    outliers: float = 100.0
    gain: float = 10.0
    q_bias: float = 1.0
    k_bias: float = 1.0
    qk_gain: float = 1.0


@dataclass(frozen=True)
class Channels:
    """Channels of the residual that have a part of their own, distinct."""

    constant: int
    outliers: tuple[int, int]
    start: int
    massive: tuple[int, int]


class Calibration:
    """One pass through a random model, in which every module is given its magnitudes."""

    def __init__(
        self, model: Any, magnitudes: Magnitudes, seed: int, mechanisms: Collection[str]
    ) -> None:
        self.model, self.magnitudes = model, magnitudes
        self.has = {name: name in mechanisms for name in MECHANISMS}
        self.random = torch.Generator().manual_seed(seed)
        hidden = model.config.get_text_config().hidden_size
        c, *rest = torch.randperm(hidden, generator=self.random)[:6].tolist()
        self.channels = Channels(c, (rest[0], rest[1]), rest[2], (rest[3], rest[4]))
        self.layers = decoder_layers(model)
        self.hidden, self.layer, self.residual = hidden, 0, EMBEDDING
        self.held = 0.0  # what the massive channel holds before the last layer
        self.head = model.get_output_embeddings()
        self.tied = self.head.weight is model.get_input_embeddings().weight
        self.multiplier = getattr(model.config, "residual_multiplier", 1.0)

    def run(self) -> None:
        """Give all weights their magnitudes, in place."""
        self._draw()
        special = self._start_tokens()
        size = self.model.get_input_embeddings().num_embeddings
        tokens = torch.randint(0, size, (NUM_TOKENS,), generator=self.random)
        tokens[0] = 0
        self.special = torch.isin(tokens, special)
        if self.by_position:
            self.special = torch.arange(NUM_TOKENS) == 0
        handles = [
            handle for name, m in self.model.named_modules() for handle in self._hook(name, m)
        ]
        self.model(tokens[None], use_cache=False)
        for handle in handles:
            handle.remove()
        self._spread_logits(tokens)

    def _draw(self) -> None:
        for parameter in self.model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.1 * self.normal(parameter.shape))
            else:
                parameter.copy_(self.normal(parameter.shape) / self.hidden**0.5)
        embeddings(self)
        self.by_position = False
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and name.endswith(("wpe", "embed_positions")):
                self._positions(module)

    def _positions(self, module: nn.Embedding) -> None:
        """Learned positions: the first is where the massive activation begins."""
        weight = module.weight
        weight.copy_(0.5 * EMBEDDING * self.normal(weight.shape))
        weight[:, [*self.channels.massive, self.channels.start]] = 0
        weight[getattr(module, "offset", 0), self.channels.start] = 30 * EMBEDDING
        self.by_position = True

    def _start_tokens(self) -> Tensor:
        """The ids that begin a massive activation: the first, and every sixteenth, as delimiters.

        Sun et al. find them at the first token and, in some models, at ".", "and", "of".
        """
        weight = self.model.get_input_embeddings().weight
        ids = torch.arange(0, len(weight), 16)
        if not self.by_position:
            weight[ids, self.channels.start] = 30 * weight[:, self.ordinary].std()
        return ids

    @property
    def ordinary(self) -> Tensor:
        """The channels without a part of their own."""
        c = self.channels
        kept = torch.ones(self.hidden, dtype=torch.bool)
        kept[[c.constant, *c.outliers, c.start, *c.massive]] = False
        return kept

    def normal(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def lognormal(self, size: int, spread: float = 0.5) -> Tensor:
        """Positive numbers around 1."""
        return torch.exp(spread * self.normal(size))

    def rows(self, x: Tensor) -> Tensor:
        """Rows without a massive activation, flat. [..., n, H] -> [m, H]"""
        return x.reshape(NUM_TOKENS, -1)[~self.special]

    def starts(self, x: Tensor, channel: int) -> float:
        """The mean of a channel in rows that have a massive activation."""
        return float(x.reshape(NUM_TOKENS, -1)[self.special][:, channel].mean())

    @property
    def early(self) -> int:
        """The layer that makes the massive activation: the second, the first of few."""
        return min(1, (len(self.layers) - 1) // 3)

    @property
    def branch(self) -> float:
        """What a branch adds, of the residual: less in a deep model, as trained ones start.

        Residuals of trained models grow by 4.5% a layer (GPT-2 XL, Heimersheim and Turner 2023).
        """
        return min(0.2, 0.5 / len(self.layers) ** 0.5)

    @property
    def bias_share(self) -> float:
        """What part of the family's largest biases this layer has: middle ones have a tenth."""
        return 1.0 if self.layer in (0, len(self.layers) - 1) else 0.1

    def massive_now(self, layer: int) -> float:
        """What a layer's feed-forward part adds to the massive channel; the last takes it away."""
        if not self.has["massive_channel"]:
            return 0.0
        if layer == self.early:
            return self.magnitudes.massive
        return -0.95 * self.held if layer == len(self.layers) - 1 else 0.0

    def _hook(self, name: str, module: nn.Module) -> list[Any]:
        if module in [*self.layers]:
            index = [*self.layers].index(module)
            return [
                module.register_forward_pre_hook(
                    functools.partial(self._enter, index), with_kwargs=True
                )
            ]
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            return [self._before(module, functools.partial(norm_gain, self, name))]
        if hasattr(module, "down_proj") and isinstance(module.down_proj, nn.Parameter):
            return [
                self._before(module, functools.partial(expert_inputs, self)),
                module.register_forward_hook(functools.partial(expert_outputs, self)),
            ]
        if module is self.head or isinstance(module, nn.Embedding) or matrix(module) is None:
            return []
        return [self._before(module, functools.partial(matrix_scale, self, name))]

    def _before(self, module: nn.Module, change: Callable[[Any, Tensor], None]) -> Any:
        return module.register_forward_pre_hook(
            lambda module, args: change(module, args[0].detach())
        )

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.layer = index
        self.residual = float(self.rows(hidden)[:, self.ordinary].abs().median()) / 0.6745
        self.held = self.starts(hidden, self.channels.massive[0])

    def _spread_logits(self, tokens: Tensor) -> None:
        for _ in range(6):  # a softcap makes it more than one
            found = float(self.model(tokens[None], use_cache=False).logits[0].std(1).median())
            if abs(found / SPREAD - 1) < 0.05:
                break
            if not self.tied:
                self.head.weight.mul_(SPREAD / found)
            else:
                set_gain(self.final, gain(self.final) * (SPREAD / found))
                if getattr(self.final, "bias", None) is not None:
                    self.final.bias.mul_(SPREAD / found)


def apply(
    model: nn.Module,
    magnitudes: Magnitudes,
    seed: int = 0,
    mechanisms: Collection[str] = MECHANISMS,
) -> nn.Module:
    """Give a float32 model random weights with a family's magnitudes, in place."""
    unknown = sorted({*mechanisms} - {*MECHANISMS})
    if unknown:
        raise ValueError(f"mechanisms must be of {', '.join(MECHANISMS)}; got {', '.join(unknown)}")
    with torch.no_grad():
        Calibration(model.eval(), magnitudes, seed, mechanisms).run()
    return model
