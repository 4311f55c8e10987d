"""Which graph of a model is run, and whether it is what the manifest promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specedge.bundle import MANIFEST
from specedge.errors import BundleError
from specedge.manifest import CURE, OPS, Graph, Model
from specedge.signature import Signature, Tensor

ORT_TYPES = {"float32": "float", "int64": "int64"}


def choose_ops(model: Model, ops: str = "auto") -> str:
    """The op set to run. On the CPU `gqa` is the faster one: it reads no more of the cache than is
    filled. It is left out where `onnx` gives the same bits for more pass lengths.
    """
    if ops not in ("auto", *OPS):
        raise ValueError(f"ops must be auto, onnx or gqa, got {ops!r}")
    if ops == "auto":
        held = {name: {*found.row_independent_lengths} for name, found in model.parity.items()}
        return "gqa" if "gqa" in held and held["gqa"] >= held.get("onnx", set()) else "onnx"
    if ops not in model.parity:
        raise BundleError(
            f"{model.source.id} has no graphs in the op set '{ops}', only in "
            f"{', '.join(model.parity)}; leave --ops out, or export the pair with --ops {ops}"
        )
    return ops


def check_contract(session: Any, entry: Graph, signature: Signature, path: Path) -> None:
    """Refuse a graph whose inputs or outputs are not those that the manifest promises."""
    if unknown := signature.unknown:
        raise BundleError(
            f"{path}: this specedge does not know what its input {unknown[0]} is for; use the "
            "specedge that wrote it, or export the pair again"
        )
    promised = (
        (session.get_inputs(), signature.inputs),
        (session.get_outputs(), signature.outputs),
    )
    for values, tensors in promised:
        found = {value.name: _shown(value.type, value.shape) for value in values}
        wanted = {tensor.name: _promised(tensor, entry) for tensor in tensors}
        for name in sorted(wanted.keys() | found.keys()):
            if found.get(name) != wanted.get(name):
                raise BundleError(
                    f"{path}: {name} is {found.get(name, 'missing')}, {MANIFEST} wants "
                    f"{wanted.get(name, 'none')}; {CURE}"
                )


def _promised(tensor: Tensor, entry: Graph) -> str:
    shape = tensor.at(entry.batch, entry.length or 0)
    return _shown(f"tensor({ORT_TYPES.get(tensor.dtype, tensor.dtype)})", shape)


def _shown(kind: str, shape: list[Any]) -> str:
    """A type and shape; the length of a graph for any is T, as a name or nothing in the graph."""
    sizes = ", ".join(str(size) if isinstance(size, int) and size else "T" for size in shape)
    return f"{kind} [{sizes}]"
