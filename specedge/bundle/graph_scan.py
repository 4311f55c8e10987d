"""What an ONNX graph reaches for beyond itself, found before ONNX Runtime opens the file.

Opening a session reads whatever files the graph names, and folds constants, for ever if a Loop has
no end. So both are looked for first, in the bytes themselves: ONNX is a package of the export
extra, which the runtime does without, and the wire format of protobuf takes few lines. Reading is
strict: what two readers could understand in two ways, or not at all, is refused. As in protobuf, a
message in several pieces is all of them together; each piece is looked at.

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

FOLDED_OPS = ("Cast", "Reshape", "Transpose")  # of a weight a session computes them once
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
    """Bytes that are no graph that this reader takes; the message says what is wrong."""


@dataclass(frozen=True)
class WeightUse:
    """A tensor of a weights file: its bytes there, and its forms with the operators that read them.

    A session computes forms once: that of ("Cast", "Transpose") is the tensor cast and transposed,
    that of () the tensor itself.
    """

    size: int
    forms: list[tuple[tuple[str, ...], list[str]]]


def check_graph(bundle: Bundle, file: str) -> None:
    """Refuse a graph that holds other graphs, or names files that the bundle does not list."""
    path = bundle.path(file)
    if path.suffix != ".onnx":  # ONNX Runtime reads some other names as another format
        raise BundleError(f"{path}: a graph's name ends in .onnx; {REEXPORT_HINT}")
    names = _read(path, external_files)
    folder = file.rpartition("/")[0]
    for name in sorted(names):
        if (f"{folder}/{name}" if folder else name) not in bundle.files:
            raise BundleError(
                f"{path}: it names the file {_shown(name)}, not listed; {REEXPORT_HINT}"
            )


def weights_of(bundle: Bundle, file: str) -> list[WeightUse]:
    """What a graph of a bundle reads of its weights file."""
    return _read(bundle.path(file), parse_weights)


def _read(path: Path, reader: Callable[[bytes], T]) -> T:
    """What a reader finds in a graph's file; BundleError if it finds no graph."""
    try:
        return reader(path.read_bytes())
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; {REEXPORT_HINT}") from error
    except GraphFormatError as error:
        raise BundleError(f"{path}: {error}; {REEXPORT_HINT}") from error


def parse_weights(content: bytes) -> list[WeightUse]:
    """What a graph reads of its weights file; WireError where it is no graph."""
    readers: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for _, graph in _parts(memoryview(content), {"graph": _MODEL["graph"]}):
        for kind, part in _parts(graph, _GRAPH):
            if kind == "node":
                fields = [(field, _text(value)) for field, value in _parts(part, _WIRED)]
                first = dict(reversed(fields))
                for name in {value for field, value in fields if field == "input"}:
                    readers[name].append((first.get("op_type", ""), first.get("output", "")))
            elif kind == "initializer":
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
    """Of a tensor and what is computed of it alone: the steps to it, and what reads it."""
    found = readers.get(name, [])
    yield steps, [op_type for op_type, _ in found if op_type not in FOLDED_OPS]
    for op_type, output in found:
        if op_type in FOLDED_OPS and op_type not in steps:
            yield from _forms(output, readers, (*steps, op_type))


def external_files(content: bytes) -> set[str]:
    """The names of the files that a graph's tensors lie in; WireError if it holds other graphs."""
    names: set[str] = set()
    for tensor in _tensors(memoryview(content)):
        for key, value in _entries(tensor):
            if key == b"location":
                names.add(value.decode("utf-8", "backslashreplace"))
    return names


def _entries(tensor: memoryview) -> Iterator[tuple[bytes, bytes]]:
    """What a tensor says of the file that it lies in."""
    for _, entry in _parts(tensor, _TENSOR):
        pairs = dict.fromkeys(_ENTRY, b"")
        for name, text in _parts(entry, _ENTRY):
            if pairs[name]:
                raise GraphFormatError("an entry of external data has two of a kind")
            pairs[name] = bytes(text)
        yield pairs["key"], pairs["value"]


def _tensors(model: memoryview) -> Iterator[memoryview]:
    """Every tensor of a model, wherever it may be."""
    for name, part in _parts(model, _MODEL):
        if name == "training":
            raise GraphFormatError("it holds a graph for training")
        for kind, inner in _parts(part, _GRAPH if name == "graph" else _FUNCTION):
            if kind == "node":
                yield from _node_tensors(inner)
            elif kind == "sparse":
                yield from (values for _, values in _parts(inner, _SPARSE))
            else:
                yield inner


def _node_tensors(node: memoryview) -> Iterator[memoryview]:
    for name, part in _parts(node, _NODE):
        if name == "op_type":
            if bytes(part) in CONTROL_FLOW:
                raise GraphFormatError(
                    f"it has a node {bytes(part).decode()}, which may run for ever"
                )
            continue
        for kind, inner in _parts(part, _ATTRIBUTE):
            if kind in ("graph", "graphs"):
                raise GraphFormatError("it has a node with a graph inside, which may run for ever")
            if kind in ("sparse", "sparses"):
                yield from (values for _, values in _parts(inner, _SPARSE))
            else:
                yield inner


def _parts(message: memoryview, wanted: dict[str, int]) -> Iterator[tuple[str, memoryview]]:
    """The wanted fields of a message, all of which hold bytes, in their order."""
    names = {number: name for name, number in wanted.items()}
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number < 2**29:
            raise GraphFormatError("it is no ONNX graph")
        if number in names and kind != _BYTES:
            raise GraphFormatError("it is no ONNX graph")
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        else:
            size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind, end + 1)  # groups are refused
        if at + size > end:
            raise GraphFormatError("it is no ONNX graph, or cut short")
        if number in names:
            yield names[number], message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, the low ones first, and where the next thing is."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise GraphFormatError("it is no ONNX graph, or cut short")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 100 else name[:97] + "...")
