"""Mixtures of experts without gathering expert matrices by token.

In `gqa` ONNX Runtime's MoE node multiplies each row by the matrices of its experts. For an expert
with a single row it has another kernel, which is not bitwise equal, so every row is passed twice.
In other variants, and for unsupported activations, all experts are one wide MLP whose activations
are weighted by the router, mostly with 0: each matrix is read once per pass.

T rows of H values, E experts with I inner values, k experts a row.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specedge.errors import ExportError

from ..checkpoint.placeholders import WeightSources
from .attention import current_pass

_FIRST, _LAST = "experts_first", "experts_last"
_CLOSE = 1e-6
_PROBED = 64


@dataclass(frozen=True)
class Swiglu:
    """G * sigmoid(alpha * G) * (U + beta) of a gate G and an up projection U clipped at `limit`."""

    alpha: float
    beta: float
    limit: float | None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Apply it. 2 * [..., I] -> [..., I]"""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


class ExpertsModule:
    """Experts module of transformers, by its private attributes.

    Gate and up projections are one matrix per expert, concatenated or interleaved. Here they are
    interleaved, [I, 2], or [I, 1] without gates.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.gated: bool = module.has_gate
        self._alternating: bool = not module.is_concatenated
        self._first = "gate_up_proj" if self.gated else "up_proj"

    def matrices(self, sources: WeightSources | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the matrices. [E, I, 2 or 1, H], [E, H, I]

        With `sources` views of placeholders are placeholders.
        """
        sources = sources or WeightSources()

        def turned(matrices: torch.Tensor) -> torch.Tensor:
            return matrices.transpose(1, 2) if self._module.is_transposed else matrices

        first, last = getattr(self._module, self._first), self._module.down_proj
        return sources.view(first, lambda x: self._in_turn(turned(x))), sources.view(last, turned)

    def biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the biases, if any. [E, I, 2 or 1], [E, H]"""
        if not self._module.has_bias:
            return None
        first = getattr(self._module, f"{self._first}_bias")
        return self._in_turn(first), self._module.down_proj_bias

    def activation(self, inner: torch.Tensor) -> torch.Tensor:
        """Apply the activation. [..., I, 2 or 1] -> [..., I]"""
        if not self.gated:
            return self._module.act_fn(inner[..., 0])
        order = inner if self._alternating else inner.transpose(-1, -2)
        return self._module._apply_gate(order.flatten(-2))

    def swiglu(self) -> Swiglu | None:
        """Fit the activation to the MoE node's SwiGLU numerically; None if it is another one."""
        if not self.gated:
            return None
        generator = torch.Generator("cpu").manual_seed(0)
        inner = 20 * torch.randn(_PROBED, 4, 2, generator=generator, device="cpu")
        expected = self.activation(inner)
        alphas = {1.0, *self._numbers("alpha", "swiglu_alpha")}
        limits = (None, *self._numbers("limit", "swiglu_limit"))
        for alpha, beta, limit in itertools.product(alphas, (0.0, 1.0), limits):
            candidate = Swiglu(alpha, beta, limit)
            if torch.allclose(candidate(*inner.unbind(-1)), expected, rtol=_CLOSE, atol=_CLOSE):
                return candidate
        return None

    def _in_turn(self, first: torch.Tensor) -> torch.Tensor:
        """Interleave gate and up projections. [E, 2 * I or I, ...] -> [E, I, 2 or 1, ...]"""
        if self.gated and not self._alternating:
            return first.unflatten(1, (2, -1)).transpose(1, 2)
        return first.unflatten(1, (-1, 1 + self.gated))

    def _numbers(self, *names: str) -> list[float]:
        values = (getattr(self._module, name, None) for name in names)
        return [float(number) for number in values if isinstance(number, int | float)]


def find_experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that use transformers' experts interface."""
    return [m for m in model.modules() if hasattr(m, "has_gate") and hasattr(m, "down_proj")]


def prepare_experts(
    model: torch.nn.Module,
    stack: contextlib.ExitStack,
    sources: WeightSources | None = None,
) -> Callable[..., torch.Tensor]:
    """Return the experts function of a traced pass, to register with transformers.

    Until the stack is closed, matrices are buffers in the layout that all graph variants share.
    """
    swiglus = {}
    for module in find_experts(model):
        experts = ExpertsModule(module)
        swiglus[module] = experts.swiglu()
        for name, matrices in zip((_FIRST, _LAST), experts.matrices(sources), strict=True):
            module.register_buffer(name, matrices, persistent=False)
            stack.callback(delattr, module, name)

    def forward(
        module: Any, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts. [T, H], [T, k], [T, k] -> [T, H]"""
        if getattr(module, "has_post_expert_norm", False):
            raise ExportError(
                "its experts' outputs are normalized one by one, which is not supported"
            )
        if current_pass().ops == "none":
            return torch.zeros_like(rows)
        experts, swiglu = ExpertsModule(module), swiglus[module]
        first, last = getattr(module, _FIRST), getattr(module, _LAST)
        routing = routing_weights(chosen, weights, len(first))
        if current_pass().ops == "gqa" and swiglu is not None:
            return _compute_sparse(
                first, last, experts.biases(), swiglu, rows, routing, chosen.shape[1]
            )
        return _compute_dense(first, last, experts, rows, routing)

    return forward


def routing_weights(chosen: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    """Return the routing weight of every expert, 0 if not chosen. [T, k], [T, k] -> [T, E]"""
    hit = chosen[..., None] == torch.arange(number)
    return torch.where(hit, weights[..., None], 0.0).sum(1)


def _compute_dense(
    first: torch.Tensor,
    last: torch.Tensor,
    experts: ExpertsModule,
    rows: torch.Tensor,
    routing: torch.Tensor,
) -> torch.Tensor:
    """Compute all experts as one wide MLP, [E * I * 2, H] and [E * I, H]."""
    number, size, width, _ = first.shape
    inner = torch.nn.functional.linear(rows, first.flatten(0, 2))
    inner = inner.reshape(-1, number, size, width)
    if (biases := experts.biases()) is not None:
        inner = inner + biases[0]
    inner = experts.activation(inner) * routing[..., None]
    # Not `last.transpose`: `fold_transposes` would store the matrix once more for this variant.
    side_by_side = last[None].transpose(2, 3).reshape(number * size, -1)
    output = torch.matmul(inner.flatten(1), side_by_side)
    return output if biases is None else output + torch.matmul(routing, biases[1])


def _compute_sparse(
    first: torch.Tensor,
    last: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    swiglu: Swiglu,
    rows: torch.Tensor,
    routing: torch.Tensor,
    k: int,
) -> torch.Tensor:
    """Add one MoE node over duplicated rows; it applies softmax to logarithms of the weights."""
    logits = torch.log(routing)
    twice = torch.stack((rows, rows)), torch.cat((logits, logits))
    matrices: tuple[torch.Tensor | None, ...] = (first.flatten(1, 2), None, last)
    if biases is not None:
        matrices = (first.flatten(1, 2), biases[0].flatten(1), last, biases[1])
    attributes = {
        "k": k, "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": swiglu.alpha,
        "activation_beta": swiglu.beta, "normalize_routing_weights": 1,
    }  # fmt: skip
    if swiglu.limit is not None:
        attributes["swiglu_limit"] = swiglu.limit
    output = torch.onnx.ops.symbolic(
        "com.microsoft::MoE",
        (*twice, *matrices),
        attrs=attributes,
        dtype=rows.dtype,
        shape=(2, *rows.shape),
        version=1,
    )
    return output[0] * routing.sum(1, keepdim=True)


def moe_reference(
    rows: torch.Tensor,
    logits: torch.Tensor,
    first: torch.Tensor,
    first_bias: torch.Tensor | None,
    last: torch.Tensor,
    last_bias: torch.Tensor | None,
    attributes: dict[str, Any],
) -> torch.Tensor:
    """Compute the MoE node above in any type of `rows`, with matrices that may be narrower.

    [..., H], [T, E], [E, 2 * I, H], [E, 2 * I], [E, H, I], [E, H] -> [..., H]
    """
    swiglu = Swiglu(
        attributes["activation_alpha"],
        attributes["activation_beta"],
        attributes.get("swiglu_limit"),
    )
    flat = rows.flatten(0, -2)
    weights, chosen = torch.softmax(logits.to(rows.dtype), -1).topk(attributes["k"])
    routing = routing_weights(chosen, weights / weights.sum(-1, keepdim=True), len(first))
    total = torch.zeros_like(flat)
    for e in range(len(first)):
        inner = flat @ first[e].to(rows.dtype).T
        inner = inner if first_bias is None else inner + first_bias[e]
        outer = swiglu(inner[:, ::2], inner[:, 1::2]) @ last[e].to(rows.dtype).T
        outer = outer if last_bias is None else outer + last_bias[e]
        total += outer * routing[:, e, None]
    return total.view(rows.shape)
