"""Conversion of manifests of bundle format 9, in which models have cache layers and no states."""

from __future__ import annotations

from typing import Any

from ..strict_json import JsonError

FORMAT = 9


def upgrade(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest of format 9 as one of format 10.

    Keys that neither format has remain, and are rejected by the reader.

    Raises:
        JsonError: A part that is converted is missing or of another type.
    """
    try:
        target, draft = manifest.pop("target"), manifest.pop("draft")
        models = {"target": _model(target, None)}
        token_ids = manifest.pop("id_map")
        if draft is not None:
            models["draft"] = _model(draft, token_ids)
        elif token_ids is not None:
            raise JsonError("key 'id_map' needs a draft, and draft is null")
        if hosts := manifest.get("hosts"):
            hosts["graphs"] = [
                graph | {"signature": _signature(graph["signature"])} for graph in hosts["graphs"]
            ]
    except (KeyError, TypeError, AttributeError) as error:
        raise JsonError(f"not a manifest of format {FORMAT}: {error}") from error
    return manifest | {"models": models}


def _model(model: dict[str, Any], token_ids: str | None) -> dict[str, Any]:
    cache = model.pop("cache")
    states = [
        {
            "name": f"{i}.{name}",
            "kind": "rows",
            "dtype": cache["dtype"],
            "shape": ["B", layer["heads"], "S", layer[f"{name}_size"]],
        }
        for i, layer in enumerate(cache["layers"])
        for name in ("key", "value")
    ]
    model["source"] = _renamed(model["source"], "licence", "license")
    model["parity"] = {
        ops: _renamed(report, "row_independent_lengths", "invariant_lengths")
        for ops, report in model["parity"].items()
    }
    model["signatures"] = {name: _signature(s) for name, s in model["signatures"].items()}
    model["graphs"] = [
        {name: value for name, value in graph.items() if name != "batch"}
        for graph in model["graphs"]
    ]
    fields = {"capacity": cache["capacity"], "states": states, "token_ids": token_ids}
    return _renamed(model, "quantisation", "quantization") | fields


def _signature(signature: dict[str, Any]) -> dict[str, Any]:
    return {name: [_port(port) for port in ports] for name, ports in signature.items()}


def _port(port: dict[str, Any]) -> dict[str, Any]:
    role = "state" if port["role"] == "cache" else port["role"]
    return _renamed(port, "buffer", "state") | {"role": role}


def _renamed(value: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return an object with one key renamed."""
    return {name: item for name, item in value.items() if name != old} | {new: value[old]}
