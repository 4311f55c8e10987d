"""Rotary tables, looked up by position, and the functions that apply them."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from specedge.errors import ExportError

from .. import internals
from .attention import onnx_operator

_CLOSE = 1e-6


def patch_rotary(
    model: nn.Module, context_length: int, num_rows: int, stack: contextlib.ExitStack
) -> None:
    """Replace rotary modules by tables, and known functions that apply them by one node each.

    The originals are restored when the stack is closed. Tables have `num_rows` rows; those beyond
    the context repeat its last position.
    """
    positions = torch.arange(num_rows).clamp(max=context_length - 1)
    changes: list[tuple[Any, dict[str, Any]]] = []  # of which several may be of one function
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            code = sys.modules[type(child).__module__]
            names = internals.rotary_functions(code)
            if names and (replacement := _replacements(child, code, names, positions)):
                table, functions = replacement
                changes += [(parent, {name: table}), (code, functions)]
    for owner, values in changes:
        for name, new in values.items():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)


def _replacements(
    module: nn.Module, code: ModuleType, names: list[str], positions: torch.Tensor
) -> tuple[nn.Module, dict[str, Callable[..., Any]]] | None:
    """Return a table that replaces a module, and replacements of functions in its code."""
    if names == ["apply_rotary_emb"] and (pairs := _complex_table(module, positions)):
        apply = code.apply_rotary_emb  # type: ignore[attr-defined]
        axes = [axis for axis in (1, 2) if _rotates_pairs(apply, pairs, axis)]
        return (pairs, {names[0]: partial(_rotate_pairs, axis=axes[0])}) if axes else None
    table = _tabulate(module, positions)
    if table is None:
        return None
    half = _halve_table(table) if names == ["apply_rotary_pos_emb"] else None
    if half and _rotates_halves(code.apply_rotary_pos_emb, half):  # type: ignore[attr-defined]
        return half, {names[0]: _rotate}
    return table, {}


class _RotaryTable(nn.Module):
    """Lookup of cos and sin by position, bitwise equal for any T.

    One pair [S, D] for each layer type of the model, or one for None.
    """

    def __init__(self, tables: dict[str | None, tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.tables = tables
        for layer_type, (cos, sin) in tables.items():
            self.register_buffer(f"cos_{layer_type}", cos)
            self.register_buffer(f"sin_{layer_type}", sin)

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
    unsqueeze_dim: int = 1,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply two RotaryEmbedding nodes. 2 * [B, H, T, D], 2 * [B, T, D/2] -> 2 * [B, H, T, D]

    If the tables are narrower than the heads, rotary embedding is partial.
    """
    if unsqueeze_dim != 1:
        raise ExportError(f"its rotary tables are unsqueezed at axis {unsqueeze_dim}, not 1")
    return _rotate_one(q, cos, sin), _rotate_one(k, cos, sin)


def _rotate_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = 2 * cos.shape[-1]
    part = {"rotary_embedding_dim": size, "num_heads": x.shape[1]} if size < x.shape[-1] else {}
    return onnx_operator("RotaryEmbedding", (x, cos, sin), x, x.shape, **part)


def _tabulate(module: nn.Module, positions: torch.Tensor) -> _RotaryTable | None:
    """Tabulate a rotary module's cos and sin by position, [S, D]; None for other modules."""
    layer_types: list[str | None] = [None]
    parameters = list(inspect.signature(module.forward).parameters)
    if parameters == ["x", "position_ids", "layer_type"]:
        layer_types = list(getattr(module, "layer_types", layer_types))
    elif parameters != ["x", "position_ids"]:
        return None
    tables: dict[str | None, tuple[torch.Tensor, ...]] = {}
    for layer_type in layer_types:
        with torch.no_grad():
            which = () if layer_type is None else (layer_type,)
            result = module(torch.zeros(1), positions[None], *which)
        if not isinstance(result, tuple) or len(result) != 2 or result[0].ndim != 3:
            return None
        tables[layer_type] = tuple(part[0].float().contiguous() for part in result)
    return _RotaryTable(tables)


def _halve_table(table: _RotaryTable) -> _RotaryTable | None:
    """Return one half of a table whose halves are equal, else None. [S, D] -> [S, D/2]"""
    tables: dict[str | None, tuple[torch.Tensor, ...]] = {}
    for layer_type, pair in table.tables.items():
        halves = [part.chunk(2, -1) for part in pair]
        if not all(torch.equal(a, b) for a, b in halves):
            return None
        tables[layer_type] = tuple(a.contiguous() for a, _ in halves)
    return _RotaryTable(tables)


def _rotates_halves(apply: Any, table: _RotaryTable) -> bool:
    """Return True if a function rotates the first half of each head against the second."""
    whole_cos, whole_sin = next(iter(table.tables.values()))
    size, rows = whole_cos.shape[1], min(3, len(whole_cos))
    q, k = torch.randn(2, 1, 2, rows, 2 * size, generator=torch.Generator().manual_seed(0))
    cos, sin = whole_cos[-rows:], whole_sin[-rows:]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    tables = (torch.cat((part, part), -1)[None] for part in (cos, sin))
    return _returns((rotated(q), rotated(k)), apply, q, k, *tables)


def _returns(expected: tuple[torch.Tensor, ...], apply: Any, *arguments: torch.Tensor) -> bool:
    """Return True if a function, possibly with another signature, returns these results."""
    try:
        results = apply(*arguments)
    except Exception:
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=_CLOSE)
        for a, b in zip(results, expected, strict=True)
    )


class _ComplexTable(nn.Module):
    """Lookup of cos and sin by position as real and imaginary parts. [S, D/2, 2]

    torch 2.13 does not export complex numbers.
    """

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table.flatten(1))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(position_ids, self.table).unflatten(-1, (-1, 2))  # type: ignore[arg-type]


def _complex_table(module: nn.Module, positions: torch.Tensor) -> _ComplexTable | None:
    if list(inspect.signature(module.forward).parameters) != ["x", "position_ids"]:
        return None
    with torch.no_grad():
        result = module(torch.zeros(1), positions[None])
    if not isinstance(result, torch.Tensor) or not result.is_complex() or result.ndim != 3:
        return None
    return _ComplexTable(torch.view_as_real(result[0]).float().contiguous())


def _rotate_pairs(
    q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, axis: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply interleaved rotary embedding; `axis` is the heads'. 2 * [B, ..., D], [B, T, D/2, 2]"""
    cos, sin = table.unsqueeze(axis).unbind(-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    return rotated(q), rotated(k)


def _rotates_pairs(apply: Any, table: _ComplexTable, axis: int) -> bool:
    """Return True if a function is interleaved rotary embedding with heads on this axis."""
    rows = min(3, len(table.table))  # type: ignore[arg-type]
    positions = torch.arange(rows)[None]
    pairs = table(torch.zeros(1), positions)
    shape = [1, rows, 2 * pairs.shape[2]]
    shape.insert(axis, 4)
    q, k = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return _returns(_rotate_pairs(q, k, pairs, axis), apply, q, k, torch.view_as_complex(pairs))
