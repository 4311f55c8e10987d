"""What an ONNX graph reaches for beyond itself, found before ONNX Runtime opens the file.

Opening a session reads whatever files the graph names, and folds constants, for ever if a Loop has
no end. So both are looked for first, in the bytes themselves: ONNX is a package of the export
extra, which the runtime does without, and the wire format of protobuf takes few lines. Reading is
strict: what two readers could understand in two ways, or not at all, is refused. As in protobuf, a
message in several pieces is all of them together; each piece is looked at.

Standard library only. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator

from .bundle import Bundle
from .errors import BundleError
from .manifest import CURE

CONTROL_FLOW = (b"If", b"Loop", b"Scan", b"SequenceMap")

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_MODEL = {"graph": 7, "training": 20, "function": 25}
_GRAPH = {"node": 1, "initializer": 5, "sparse": 15}
_FUNCTION = {"node": 7}
_NODE = {"op_type": 4, "attribute": 5}
_ATTRIBUTE = {"tensor": 5, "graph": 6, "tensors": 10, "graphs": 11, "sparse": 22, "sparses": 23}
_SPARSE = {"values": 1, "indices": 2}
_TENSOR = {"external_data": 13}
_ENTRY = {"key": 1, "value": 2}


class WireError(ValueError):
    """Bytes that are no graph that this reader takes; the message says what is wrong."""


def check_graph(bundle: Bundle, file: str) -> None:
    """Refuse a graph that holds other graphs, or names files that the bundle does not list."""
    path = bundle.path(file)
    if path.suffix != ".onnx":  # ONNX Runtime reads some other names as another format
        raise BundleError(f"{path}: a graph's name ends in .onnx; {CURE}")
    try:
        names = external_files(path.read_bytes())
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; {CURE}") from error
    except WireError as error:
        raise BundleError(f"{path}: {error}; {CURE}") from error
    folder = file.rpartition("/")[0]
    for name in sorted(names):
        if (f"{folder}/{name}" if folder else name) not in bundle.files:
            raise BundleError(f"{path}: it names the file {_shown(name)}, not listed; {CURE}")


def external_files(content: bytes) -> set[str]:
    """The names of the files that a graph's tensors lie in; WireError if it holds other graphs."""
    names: set[str] = set()
    for tensor in _tensors(memoryview(content)):
        for _, entry in _parts(tensor, _TENSOR):
            pairs = dict.fromkeys(_ENTRY, b"")
            for name, text in _parts(entry, _ENTRY):
                if pairs[name]:
                    raise WireError("an entry of external data has two of a kind")
                pairs[name] = bytes(text)
            if pairs["key"] == b"location":
                names.add(pairs["value"].decode("utf-8", "backslashreplace"))
    return names


def _tensors(model: memoryview) -> Iterator[memoryview]:
    """Every tensor of a model, wherever it may be."""
    for name, part in _parts(model, _MODEL):
        if name == "training":
            raise WireError("it holds a graph for training")
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
                raise WireError(f"it has a node {bytes(part).decode()}, which may run for ever")
            continue
        for kind, inner in _parts(part, _ATTRIBUTE):
            if kind in ("graph", "graphs"):
                raise WireError("it has a node with a graph inside, which may run for ever")
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
            raise WireError("it is no ONNX graph")
        if number in names and kind != _BYTES:
            raise WireError("it is no ONNX graph")
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        else:
            size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind, end + 1)  # groups are refused
        if at + size > end:
            raise WireError("it is no ONNX graph, or cut short")
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
    raise WireError("it is no ONNX graph, or cut short")


def _shown(name: str) -> str:
    return ascii(name if len(name) <= 100 else name[:97] + "...")
