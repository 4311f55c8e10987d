"""Modules that trace to many nodes are swapped for ones that trace to a single node.

A swap is made for what a module computes, not for its name: each is tried on random input first.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .attention import operator

_CLOSE = 1e-6


def fix_rotary(model: nn.Module, context_length: int) -> bool:
    """Settle factors that change with a pass's last position, as they are at the context's end.

    Tells whether there were any that texts shorter than the context have otherwise (longrope).
    """
    changed = False
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
            continue
        before, positions = module.inv_freq, torch.arange(context_length)[None]
        module(torch.zeros(1), positions)
        changed |= not torch.equal(before, module.inv_freq)
        module.rope_type = "fixed"
    return changed


@contextlib.contextmanager
def swapped(model: nn.Module, context_length: int) -> Iterator[None]:
    """The same model out of fewer nodes while the context lasts."""
    undo: list[Callable[[], None]] = []
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if replacement := _replacement(child):
                    setattr(parent, name, replacement)
                    undo.append(lambda p=parent, n=name, c=child: setattr(p, n, c))  # type: ignore[misc]
        undo.extend(_swap_rotary(model, context_length))
        yield
    finally:
        for step in reversed(undo):
            step()


def _replacement(module: nn.Module) -> nn.Module | None:
    if isinstance(module, Conv1D):
        return _linear(module)
    if not list(module.parameters()) and not list(module.children()):
        return _activation(module)
    return _norm(module)


def _linear(module: Conv1D) -> nn.Linear:
    """Conv1D is a Linear stored the other way round; as Linear it becomes MatMul and Add."""
    linear = nn.Linear(module.nx, module.nf, device="meta")
    linear.weight = nn.Parameter(module.weight.T, requires_grad=False)
    linear.bias = module.bias
    return linear


def _activation(module: nn.Module) -> nn.Module | None:
    """The tanh GELU spelled out in steps becomes one node."""
    if "GELU" not in type(module).__name__:
        return None
    gelu = nn.GELU("tanh")
    return gelu if _same(module, gelu, torch.linspace(-8, 8, 4001)) else None


class _RmsNorm(nn.Module):
    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return operator(
            "RMSNormalization", (x, self.weight), x, x.shape, axis=-1, epsilon=self.epsilon
        )


def _norm(module: nn.Module) -> nn.Module | None:
    """Any module that is an RMS norm with its weight, or with one plus its weight (gemma)."""
    parameters = dict(module.named_parameters())
    epsilon = next(
        (
            v
            for n in ("variance_epsilon", "eps")
            if isinstance(v := getattr(module, n, None), float)
        ),
        None,
    )
    if list(parameters) != ["weight"] or module.weight.ndim != 1 or epsilon is None:
        return None
    size = module.weight.shape
    x = torch.randn(4, *size, generator=torch.Generator().manual_seed(0))
    for weight in (module.weight, 1 + module.weight):
        if _same(module, lambda x, w=weight: nn.functional.rms_norm(x, size, w, epsilon), x):
            return _RmsNorm(weight.detach(), epsilon)
    return None


class _RotaryTable(nn.Module):
    """cos and sin looked up by position: computed in the graph, their last bits depend on T.

    One pair [S, D] for each type of layer that a model tells apart, or one for None.
    """

    def __init__(self, tables: dict[str | None, tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.tables = tables
        for kind, (cos, sin) in tables.items():
            self.register_buffer(f"cos_{kind}", cos)
            self.register_buffer(f"sin_{kind}", sin)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tables = (getattr(self, f"{part}_{layer_type}") for part in ("cos", "sin"))
        return tuple(nn.functional.embedding(position_ids, t) for t in tables)  # type: ignore[return-value]


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two RotaryEmbedding nodes. 2 * [B, H, T, D], 2 * [B, T, D/2] -> 2 * [B, H, T, D]

    Where the tables are narrower than the heads, the rest of a head passes as it is.
    """
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = 2 * cos.shape[-1]
    part = {"rotary_embedding_dim": size, "num_heads": x.shape[1]} if size < x.shape[-1] else {}
    return operator("RotaryEmbedding", (x, cos, sin), x, x.shape, **part)


def _swap_rotary(model: nn.Module, context_length: int) -> list[Callable[[], None]]:
    """Swap the rotary tables, and the function that applies them where it is the usual one."""
    undo: list[Callable[[], None]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            code = sys.modules[type(child).__module__]
            names = [n for n in vars(code) if n.startswith("apply_") and "rotary" in n]
            table = _table(child, context_length) if names else None
            if table is None:
                continue
            if names == ["apply_rotary_pos_emb"]:
                apply = code.apply_rotary_pos_emb
                if (half := _half(table)) is not None and _applies_halves(apply, half):
                    table = half
                    code.apply_rotary_pos_emb = _rotate  # type: ignore[attr-defined]
                    undo.append(lambda m=code, a=apply: setattr(m, "apply_rotary_pos_emb", a))  # type: ignore[misc]
            setattr(parent, name, table)
            undo.append(lambda p=parent, n=name, c=child: setattr(p, n, c))  # type: ignore[misc]
    return undo


def _table(module: nn.Module, context_length: int) -> _RotaryTable | None:
    """Every position's cos and sin, [S, D], if the module computes [B, T, D] from positions."""
    kinds: list[str | None] = [None]
    parameters = list(inspect.signature(module.forward).parameters)
    if parameters == ["x", "position_ids", "layer_type"]:
        kinds = list(getattr(module, "layer_types", kinds))
    elif parameters != ["x", "position_ids"]:
        return None
    tables: dict[str | None, tuple[torch.Tensor, ...]] = {}
    for kind in kinds:
        with torch.no_grad():
            which = () if kind is None else (kind,)
            result = module(torch.zeros(1), torch.arange(context_length)[None], *which)
        if not isinstance(result, tuple) or len(result) != 2 or result[0].ndim != 3:
            return None
        tables[kind] = tuple(part[0].float().contiguous() for part in result)
    return _RotaryTable(tables)


def _half(table: _RotaryTable) -> _RotaryTable | None:
    """[S, D/2], where both halves are the same."""
    tables: dict[str | None, tuple[torch.Tensor, ...]] = {}
    for kind, pair in table.tables.items():
        halves = [part.chunk(2, -1) for part in pair]
        if not all(torch.equal(a, b) for a, b in halves):
            return None
        tables[kind] = tuple(a.contiguous() for a, _ in halves)
    return _RotaryTable(tables)


def _applies_halves(apply: Any, table: _RotaryTable) -> bool:
    """Whether a function rotates the first half of each head against the second."""
    whole_cos, whole_sin = next(iter(table.tables.values()))
    size, rows = whole_cos.shape[1], min(3, len(whole_cos))
    q, k = torch.randn(2, 1, 2, rows, 2 * size, generator=torch.Generator().manual_seed(0))
    cos, sin = whole_cos[-rows:], whole_sin[-rows:]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    try:
        found = apply(q, k, torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None])
    except Exception:  # a function of another kind
        return False
    return all(
        torch.allclose(a, rotated(b), rtol=0, atol=_CLOSE)
        for a, b in zip(found, (q, k), strict=True)
    )


def _same(module: Any, other: Any, x: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            return torch.allclose(module(x), other(x), rtol=_CLOSE, atol=_CLOSE)
    except Exception:  # a module of another kind
        return False
