"""A graph in parts that are loaded one after another, so that a large model is never in memory.

ONNX Runtime keeps float32 copies of weights stored in less, and packed copies of what it
multiplies with: twice to four times a model's size. Of a part that is little.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import torch

from ..checkpoint.lazy_weights import Memory
from ..graph.weights import FILE, TYPES, mapped, pieces

PART_BYTES = 200_000_000  # of weights, in float32


@dataclass
class Part:
    """Consecutive nodes; what they read of earlier parts, and what later ones read of them."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    size: int = 0  # bytes of weights, in float32
    layer: int = 0  # how many layers' caches have been read at its end


class Split:
    """One graph file in parts; `first` names the inputs at which each part but the first begins.

    Without `first` it is cut where a layer's cache is first read, so that parts of like layers are
    alike, and so that no part has more than PART_BYTES, if more than one constant. What is computed
    from weights is `given` to a part, once for all graphs; else ONNX Runtime computes it, which it
    has to where it adds casts of its own: it would fold those out of what a given constant says of
    a file. So it would the bytes that it makes unsigned, so integers are never given.
    """

    def __init__(self, path: Path, first: list[str] | None = None, given: bool = True) -> None:
        self.folder, self._gives = path.parent, given
        self._model = onnx.load(path, load_external_data=False)
        graph = self._model.graph
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._types = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
        self._computed: dict[str, onnx.NodeProto] = {}
        for node in graph.node:
            if node.op_type in ("Cast", "Transpose", "Reshape") and self._is_large(node.input[0]):
                self._computed[node.output[0]] = node
        self.first: list[str] = []
        self.parts = self._cut(first)
        self._made: dict[str, tuple[int, int]] = {}  # a value's part, and its place there
        self._shared: set[str] = set()  # values that more than two layers read
        self._connect()

    def model(self, index: int) -> bytes:
        """A part as a model; it has to be given the constants that are `computed`."""
        part, model = self.parts[index], onnx.ModelProto()
        model.ir_version = self._model.ir_version
        model.opset_import.extend(self._model.opset_import)
        graph = model.graph
        graph.name = self._model.graph.name
        graph.input.extend(self._types[name] for name in part.inputs)
        graph.output.extend(self._types[name] for name in part.outputs)
        inner = {name for node in part.nodes for name in node.output} - set(part.outputs)
        graph.value_info.extend(self._types[name] for name in inner if name in self._types)
        computed = self._behind([name for name in part.constants if not self._is_given(name)])
        graph.node.extend([*computed, *part.nodes])
        made = {node.output[0] for node in computed}
        names = [*part.constants, *(name for node in computed for name in node.input)]
        for name in dict.fromkeys(name for name in names if name not in made):
            stored = self._stored.get(name)
            graph.initializer.append(stored or _given(name, self.shape(name), self._type(name)))
        return model.SerializeToString()

    def _behind(self, constants: list[str]) -> list[onnx.NodeProto]:
        """The nodes that compute constants from stored ones, in their order."""
        found: dict[str, onnx.NodeProto] = {}
        for name in constants:
            if (node := self._computed.get(name)) is not None:
                found |= {x.output[0]: x for x in self._behind([node.input[0]])}
                found[name] = node
        return [*found.values()]

    @contextlib.contextmanager
    def computed(self, index: int, memory: Memory) -> Iterator[dict[str, np.ndarray]]:
        """A part's constants that are computed and given, while the context lasts."""
        values = {}
        with contextlib.ExitStack() as stack:
            for name in self.parts[index].constants:
                if self._is_given(name):
                    value = self.compute(name)
                    kind = self._type(name)
                    room = stack.enter_context(memory.taken(value.numel(), kind))
                    rows = room.view(value.shape)
                    for piece in pieces(value, kind):
                        rows[: len(piece)] = piece
                        rows = rows[len(piece) :]
                    values[name] = room.view(value.shape).numpy()
            yield values

    def _is_given(self, name: str) -> bool:
        """Whether a part is given a constant, which is computed once."""
        return self._gives and name in self._computed and self._type(name) != torch.int8

    def compute(self, name: str) -> torch.Tensor:
        """A constant's numbers, as far as possible still in the file."""
        node = self._computed.get(name)
        if node is None:
            return mapped(self._stored[name], self.folder)
        value = self.compute(node.input[0])
        if node.op_type == "Cast":
            return value  # cast by whoever copies it
        if node.op_type == "Reshape":
            return value.reshape(tuple(onnx.numpy_helper.to_array(self._stored[node.input[1]])))
        (order,) = (list(a.ints) for a in node.attribute if a.name == "perm")
        return value.permute(order)

    def _type(self, name: str) -> torch.dtype:
        """What a constant is computed with: the type that it is cast to, or stored in."""
        node = self._computed.get(name)
        if node is None:
            return TYPES[self._stored[name].data_type]
        casts = [a.i for a in node.attribute if node.op_type == "Cast" and a.name == "to"]
        return TYPES[casts[0]] if casts else self._type(node.input[0])

    def form(self, index: int) -> tuple[tuple[object, ...], list[str]]:
        """What a part is but for names and weights, and its names in the order of their use.

        In parts of one form the names at the same places mean the same.
        """
        part = self.parts[index]
        places: dict[str, int] = {}
        found: list[object] = []
        for node in part.nodes:
            for name in (*node.input, *node.output):
                if name and name not in places:
                    places[name] = len(places)
                    found.append(self._kind(name, index))
            bare = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
            bare.attribute.extend(node.attribute)
            bare.input.extend(str(places.get(name, "")) for name in node.input)
            bare.output.extend(str(places.get(name, "")) for name in node.output)
            found.append(bare.SerializeToString(deterministic=True))
        return tuple(found), list(places)

    def _kind(self, name: str, index: int) -> object:
        """What a value is to a part, apart from its name; of weights no more than the shape."""
        if self._is_constant(name):
            return tuple(self.shape(name)) if self._is_weight(name) else self._source(name)
        part = self.parts[index]
        if name not in part.inputs:
            return name in part.outputs
        kind = self._types[name].type.SerializeToString(deterministic=True)
        if _layer(name):
            return kind
        # What many layers read, one of two masks perhaps, goes by its name; so do inputs.
        made_in, place = self._made.get(name, (0, 0))
        origin = name if name in self._shared or not made_in else (index - made_in, place)
        return kind, origin, name in part.outputs

    def weights(self, index: int) -> tuple[object, ...]:
        """Where a part's weights come from, in the order of their use."""
        return tuple(map(self._source, filter(self._is_weight, self.parts[index].constants)))

    def _is_weight(self, name: str) -> bool:
        tensor = self._stored.get(name)
        small = tensor is not None and tensor.data_type in TYPES and bool(tensor.dims)
        return small or self._is_large(name)

    def _source(self, name: str) -> object:
        """A constant's place in the file, or its numbers, and what is done to them."""
        if (node := self._computed.get(name)) is not None:
            bare = onnx.NodeProto(op_type=node.op_type, attribute=node.attribute)
            return bare.SerializeToString(deterministic=True), self._source(node.input[0])
        bare_tensor = onnx.TensorProto()
        bare_tensor.CopyFrom(self._stored[name])
        bare_tensor.ClearField("name")
        return bare_tensor.SerializeToString(deterministic=True)

    def shape(self, name: str) -> list[int]:
        stored = self._stored.get(name)
        return list(self.compute(name).shape if stored is None else stored.dims)

    def _is_constant(self, name: str) -> bool:
        return name in self._stored or name in self._computed

    def _is_large(self, name: str) -> bool:
        stored = self._stored.get(name)
        return name in self._computed or (stored is not None and bool(stored.external_data))

    def _cut(self, first: list[str] | None) -> list[Part]:
        parts, layers = [Part()], set[str]()
        for node in self._model.graph.node:
            if node.output[0] in self._computed:
                continue
            used = [n for n in dict.fromkeys(node.input) if n and self._is_constant(n)]
            large = [name for name in used if self._is_large(name)]
            more = sum(4 * self.compute(name).numel() for name in large)
            begins = [name for name in map(_layer, node.input) if name and name not in layers][:1]
            layers.update(begins)
            if first is not None:
                begins = [name for name in (*begins, *large[:1]) if [name] == first[:1]]
                first = first[len(begins) :]
            elif not begins and parts[-1].size and parts[-1].size + more > PART_BYTES:
                begins = large[:1]
            if begins:
                self.first += begins
                parts.append(Part())
            parts[-1].layer = len(layers)
            parts[-1].size += more
            parts[-1].nodes.append(node)
            parts[-1].constants += [n for n in used if n not in parts[-1].constants]
        return parts

    def _connect(self) -> None:
        """Find what each part reads from outside it and what is read of it there."""
        readers: defaultdict[str, set[int]] = defaultdict(set)
        later = {value.name for value in self._model.graph.output}  # read, behind a part
        for i, part in reversed([*enumerate(self.parts)]):
            reads = {n for x in part.nodes for n in x.input if n and not self._is_constant(n)}
            made = [name for node in part.nodes for name in node.output]
            self._made |= {name: (i, place) for place, name in enumerate(made)}
            part.inputs = sorted(reads - {*made})
            part.outputs = sorted(later & {*made} - {""})
            later |= reads
            for name in part.inputs:
                readers[name].add(part.layer)
        self._shared = {name for name, by in readers.items() if len(by) > 2}


def _layer(name: str) -> str:
    """The layer whose cache an input of the graph is: past_key_values.N; "" of what is none."""
    return name.rpartition(".")[0] if name.startswith("past_key_values.") else ""


def _given(name: str, shape: list[int], dtype: torch.dtype) -> onnx.TensorProto:
    """A constant that whoever loads the model gives; what it says of a file is not read."""
    kind = next(kind for kind, known in TYPES.items() if known == dtype)
    tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    size = math.prod(shape) * dtype.itemsize
    for key, text in (("location", FILE), ("offset", 0), ("length", size)):
        tensor.external_data.add(key=key, value=str(text))
    return tensor
