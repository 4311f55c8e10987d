"""Security scan of ONNX files before ONNX Runtime opens them.

Opening a session reads any file that the graph names, and folds constants, which never ends if a
Loop does not terminate. This module checks for both in the protobuf wire format, without the onnx
package of the export extra. Parsing is strict: ambiguous input is rejected. As in protobuf, a
message in several pieces is their concatenation; each piece is checked.

Standard library only. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import BundleError
from .bundle import Bundle
from .manifest import REEXPORT_HINT

# Constant-folded when a session is created; BitwiseXor and Pad follow a cast of int8 to bytes.
FOLDED_OPS = ("BitwiseXor", "Cast", "Pad", "Reshape", "Transpose")
CONTROL_FLOW = (b"If", b"Loop", b"Scan", b"SequenceMap")

T = TypeVar("T")

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_MODEL = {"graph": 7, "training": 20, "function": 25}
_GRAPH = {"node": 1, "initializer": 5, "sparse": 15}
_FUNCTION = {"node": 7}
_NODE = {"op_type": 4, "attribute": 5}
_WIRED = {"input": 1, "output": 2, "op_type": 4}
_ATTRIBUTE = {"tensor": 5, "graph": 6, "tensors": 10, "graphs": 11, "sparse": 22, "sparses": 23}
_SPARSE = {"values": 1, "indices": 2}
_TENSOR = {"external_data": 13}
_NAMED = {"name": 8}
_ENTRY = {"key": 1, "value": 2}


class GraphFormatError(ValueError):
    """File that is not an ONNX graph, or that has forbidden contents."""


@dataclass(frozen=True)
class WeightUse:
    """Tensor of a weights file: its size in bytes and its forms with the operators that read them.

    A form is a sequence of constant-folded operators: ("Cast", "Transpose") is the tensor cast and
    transposed, () the tensor itself.
    """

    size: int
    forms: list[tuple[tuple[str, ...], list[str]]]


def check_graph(bundle: Bundle, file: str) -> None:
    """Raise BundleError for a graph with subgraphs or with files that the bundle does not list."""
    path = bundle.path(file)
    if path.suffix != ".onnx":  # ONNX Runtime detects the format by the extension
        raise BundleError(f"{path}: the name of a graph must end in .onnx; {REEXPORT_HINT}")
    names = _read(path, external_files)
    folder = file.rpartition("/")[0]
    for name in sorted(names):
        if (f"{folder}/{name}" if folder else name) not in bundle.files:
            raise BundleError(
                f"{path}: it refers to {_shown(name)}, which the manifest does not list; "
                f"{REEXPORT_HINT}"
            )


def weights_of(bundle: Bundle, file: str) -> list[WeightUse]:
    """Return the tensors of the weights file that a graph of a bundle reads."""
    return _read(bundle.path(file), parse_weights)


def _read(path: Path, reader: Callable[[bytes], T]) -> T:
    """Apply a parser to a file; raise BundleError if it is not an ONNX graph."""
    try:
        return reader(path.read_bytes())
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; {REEXPORT_HINT}") from error
    except GraphFormatError as error:
        raise BundleError(f"{path}: {error}; {REEXPORT_HINT}") from error


def parse_weights(content: bytes) -> list[WeightUse]:
    """Return the tensors of the weights file that a graph reads."""
    readers: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for _, graph in _parts(memoryview(content), {"graph": _MODEL["graph"]}):
        for field_name, part in _parts(graph, _GRAPH):
            if field_name == "node":
                fields = [(field, _text(value)) for field, value in _parts(part, _WIRED)]
                first = dict(reversed(fields))
                for name in {value for field, value in fields if field == "input"}:
                    readers[name].append((first.get("op_type", ""), first.get("output", "")))
            elif field_name == "initializer":
                size = dict(_entries(part)).get(b"length", b"")
                name = next((_text(value) for _, value in _parts(part, _NAMED)), "")
                if size.isdigit() and len(size) < 19:
                    sizes[name] = int(size)
    return [WeightUse(size, list(_forms(name, readers))) for name, size in sizes.items()]


def _text(value: memoryview) -> str:
    return bytes(value).decode("utf-8", "backslashreplace")


def _forms(
    name: str, readers: dict[str, list[tuple[str, str]]], steps: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the forms of a tensor with the operators that read each."""
    nodes = readers.get(name, [])
    yield steps, [op_type for op_type, _ in nodes if op_type not in FOLDED_OPS]
    for op_type, output in nodes:
        if op_type in FOLDED_OPS and op_type not in steps:
            yield from _forms(output, readers, (*steps, op_type))


def external_files(content: bytes) -> set[str]:
    """Return the external files of a graph; raise GraphFormatError for subgraphs."""
    names: set[str] = set()
    for tensor in _tensors(memoryview(content)):
        for key, value in _entries(tensor):
            if key == b"location":
                names.add(value.decode("utf-8", "backslashreplace"))
    return names


def _entries(tensor: memoryview) -> Iterator[tuple[bytes, bytes]]:
    """Yield the external-data entries of a tensor."""
    for _, entry in _parts(tensor, _TENSOR):
        pairs = dict.fromkeys(_ENTRY, b"")
        for name, text in _parts(entry, _ENTRY):
            if pairs[name]:
                raise GraphFormatError("an external-data entry has a repeated field")
            pairs[name] = bytes(text)
        yield pairs["key"], pairs["value"]


def _tensors(model: memoryview) -> Iterator[memoryview]:
    """Yield every tensor of a model."""
    for name, part in _parts(model, _MODEL):
        if name == "training":
            raise GraphFormatError("it contains a training graph")
        for field_name, inner in _parts(part, _GRAPH if name == "graph" else _FUNCTION):
            if field_name == "node":
                yield from _node_tensors(inner)
            elif field_name == "sparse":
                yield from (values for _, values in _parts(inner, _SPARSE))
            else:
                yield inner


def _node_tensors(node: memoryview) -> Iterator[memoryview]:
    for name, part in _parts(node, _NODE):
        if name == "op_type":
            if bytes(part) in CONTROL_FLOW:
                raise GraphFormatError(
                    f"it has a node {bytes(part).decode()}, which may not terminate"
                )
            continue
        for field_name, inner in _parts(part, _ATTRIBUTE):
            if field_name in ("graph", "graphs"):
                raise GraphFormatError("it has a node with a subgraph, which may not terminate")
            if field_name in ("sparse", "sparses"):
                yield from (values for _, values in _parts(inner, _SPARSE))
            else:
                yield inner


def _parts(message: memoryview, fields: dict[str, int]) -> Iterator[tuple[str, memoryview]]:
    """Yield the requested length-delimited fields of a message in order."""
    names = {number: name for name, number in fields.items()}
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise GraphFormatError("it is not an ONNX graph")
        if number in names and wire_type != _BYTES:
            raise GraphFormatError("it is not an ONNX graph")
        if wire_type == _VARINT:
            _, at = _varint(message, at)
            continue
        if wire_type == _BYTES:
            size, at = _varint(message, at)
        else:
            sizes = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}
            size = sizes.get(wire_type, end + 1)  # groups are not supported
        if at + size > end:
            raise GraphFormatError("it is not an ONNX graph, or it is truncated")
        if number in names:
            yield names[number], message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return a base-128 varint and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise GraphFormatError("it is not an ONNX graph, or it is truncated")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 100 else name[:97] + "...")
