"""Conversion of manifests of bundle format 9, in which models have cache layers and no states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..strict_json import JsonError, build

FORMAT = 9


@dataclass(frozen=True)
class _CacheLayer:
    heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True)
class _Cache:
    dtype: str
    capacity: int
    layers: tuple[_CacheLayer, ...]


def upgrade(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest of format 9 as one of format 10.

    Keys that neither format has remain, and are rejected by the reader.

    Raises:
        JsonError: A part that is converted is missing, of another type, or of format 10.
    """
    if "models" in manifest:
        raise JsonError("key 'models' is unknown")
    converted = dict(manifest)
    target, draft, token_ids = (_pop(converted, key, key) for key in ("target", "draft", "id_map"))
    models = {"target": _model(target, "target", None)}
    if draft is not None:
        models["draft"] = _model(draft, "draft", token_ids)
    elif token_ids is not None:
        raise JsonError("key 'id_map' needs a draft, and draft is null")
    if converted.get("hosts") is not None:
        hosts = dict(_object(converted["hosts"], "hosts"))
        graphs = [dict(graph) for graph in _objects(hosts.get("graphs"), "hosts.graphs")]
        for graph in graphs:
            graph["signature"] = _signature(graph.get("signature"), "hosts.graphs.signature")
        converted["hosts"] = hosts | {"graphs": graphs}
    return converted | {"models": models}


def _model(value: Any, key: str, token_ids: Any) -> dict[str, Any]:
    model = dict(_object(value, key))
    cache = build(_Cache, _pop(model, "cache", f"{key}.cache"), f"{key}.cache")
    if unknown := model.keys() & {"capacity", "states", "token_ids"}:
        raise JsonError(f"key '{key}.{min(unknown)}' is unknown")
    states = [
        {"name": f"{i}.{name}", "kind": "rows", "dtype": cache.dtype,
         "shape": ["B", layer.heads, "S", size]}
        for i, layer in enumerate(cache.layers)
        for name, size in (("key", layer.key_size), ("value", layer.value_size))
    ]  # fmt: skip
    model["source"] = _renamed(model.get("source"), f"{key}.source", "licence", "license")
    model["parity"] = {
        ops: _renamed(report, f"{key}.parity", "row_independent_lengths", "invariant_lengths")
        for ops, report in _object(model.get("parity"), f"{key}.parity").items()
    }
    model["signatures"] = {
        name: _signature(signature, f"{key}.signatures")
        for name, signature in _object(model.get("signatures"), f"{key}.signatures").items()
    }
    model["graphs"] = [dict(graph) for graph in _objects(model.get("graphs"), f"{key}.graphs")]
    for graph in model["graphs"]:
        if (batch := _pop(graph, "batch", f"{key}.graphs.batch")) != 1:
            raise JsonError(f"key '{key}.graphs.batch' must be 1, got {batch!r}")
    model = _renamed(model, key, "quantisation", "quantization")
    return model | {"capacity": cache.capacity, "states": states, "token_ids": token_ids}


def _signature(value: Any, key: str) -> dict[str, Any]:
    return {
        end: [_port(port, key) for port in _objects(ports, key)]
        for end, ports in _object(value, key).items()
    }


def _port(value: dict[str, Any], key: str) -> dict[str, Any]:
    port = _renamed(value, key, "buffer", "state")
    if port.get("role") == "state":
        raise JsonError(f"key '{key}' has a port with role state, which format 10 has")
    return port | ({"role": "state"} if port.get("role") == "cache" else {})


def _renamed(value: Any, key: str, old: str, new: str) -> dict[str, Any]:
    """Return an object with one key renamed."""
    renamed = dict(_object(value, key))
    if new in renamed:
        raise JsonError(f"key '{key}.{new}' is unknown")
    return renamed | {new: _pop(renamed, old, f"{key}.{old}")}


def _pop(value: dict[str, Any], name: str, key: str) -> Any:
    if name not in value:
        raise JsonError(f"key '{key}' is missing")
    return value.pop(name)


def _object(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise JsonError(f"key '{key}' must be an object")
    return value


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise JsonError(f"key '{key}' must be an array")
    return [_object(item, key) for item in value]
