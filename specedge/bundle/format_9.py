"""Conversion of manifests of bundle format 9, in which models have cache layers and no states."""

from __future__ import annotations

from typing import Any

from ..strict_json import JsonError

FORMAT = 9
_MODEL_KEYS = {"capacity", "states", "token_ids", "quantization"}  # of format 10 only


def upgrade(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest of format 9 as one of format 10.

    The reader of format 10 checks what is not converted, and rejects unknown keys.

    Raises:
        JsonError: A part that is converted is missing, of another type, or of format 10.
    """
    converted = dict(manifest)
    try:
        target, draft, token_ids = (converted.pop(key) for key in ("target", "draft", "id_map"))
        models = {"target": _model(target, None)}
        if draft is not None:
            models["draft"] = _model(draft, token_ids)
        hosts = converted.get("hosts")
        for graph in [] if hosts is None else hosts["graphs"]:
            graph["signature"] = _signature(graph["signature"])
    except KeyError as error:
        raise JsonError(f"key {error} is missing in format {FORMAT}") from error
    except (AttributeError, TypeError) as error:
        raise JsonError(f"a part of format {FORMAT} has another type: {error}") from error
    if "models" in manifest or (draft is None and token_ids is not None):
        raise JsonError(f"format {FORMAT} has no key 'models', and id_map only with a draft")
    return converted | {"models": models}


def _model(model: dict[str, Any], token_ids: Any) -> dict[str, Any]:
    cache = {**model["cache"]}
    dtype, capacity, layers = (cache.pop(key) for key in ("dtype", "capacity", "layers"))
    if unknown := (model.keys() & _MODEL_KEYS) | cache.keys():
        raise JsonError(f"key '{min(unknown)}' of a model is unknown in format {FORMAT}")
    if any(graph.pop("batch") != 1 for graph in model["graphs"]):
        raise JsonError(f"key 'batch' of a graph must be 1 in format {FORMAT}")
    states = [
        {"name": f"{i}.{name}", "kind": "rows", "dtype": dtype,
         "shape": ["B", layer["heads"], "S", layer[f"{name}_size"]]}
        for i, layer in enumerate(layers)
        for name in ("key", "value")
    ]  # fmt: skip
    kept = {key: value for key, value in model.items() if key not in ("cache", "quantisation")}
    return kept | {
        "source": _renamed(model["source"], "licence", "license"),
        "parity": {
            ops: _renamed(report, "row_independent_lengths", "invariant_lengths")
            for ops, report in model["parity"].items()
        },
        "signatures": {name: _signature(ports) for name, ports in model["signatures"].items()},
        "quantization": model["quantisation"],
        "capacity": capacity,
        "states": states,
        "token_ids": token_ids,
    }


def _signature(signature: dict[str, Any]) -> dict[str, Any]:
    return {end: [_port(port) for port in ports] for end, ports in signature.items()}


def _port(port: dict[str, Any]) -> dict[str, Any]:
    role = {"role": "state"} if port["role"] == "cache" else {}
    return _renamed(port, "buffer", "state") | role


def _renamed(value: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return an object with one key renamed."""
    if new in value:
        raise JsonError(f"key '{new}' is unknown in format {FORMAT}")
    return {key: entry for key, entry in value.items() if key != old} | {new: value[old]}
