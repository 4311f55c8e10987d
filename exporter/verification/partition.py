"""Partition of a graph into subgraphs that are loaded one after another.

ONNX Runtime keeps float32 copies of half-precision weights, and packed copies of matrices: two to
four times a model's size, but little for a single subgraph. Layers that differ only in their
weights run the same kernels on the same shapes, so all checks run one layer of each form, and all
layers run in two passes. The form of a subgraph is its nodes and constants, without the values of
weights and without names.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import torch

from specedge.errors import ParityError

from ..checkpoint.lazy_tensors import LazyTensor
from ..checkpoint.placeholders import BufferPool
from ..graph.external_data import FILE, TORCH_TYPES, LazyWeights, chunks, map_tensor
from ..tracing.hidden_states import HIDDEN_STATES, RETURNED

PART_BYTES = 200_000_000  # maximum float32 weights of a subgraph
_CACHE = re.compile(r"(past_key_values|present)\.(\d+)\.([\w.]+)")


@dataclass
class Subgraph:
    """Consecutive nodes, the values read from earlier subgraphs, and those read by later ones."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    later: set[str] = field(default_factory=set)  # values read by later subgraphs
    size: int = 0  # bytes of weights, in float32
    layer: int = 0  # number of layers that have begun by its end


class PartitionedGraph:
    """Graph file that is split into subgraphs.

    `last` is the one that joins hidden states, which is in no layer; it is empty without them.

    Args:
        path: Graph file.
        first: Inputs at which the subgraphs after the first one begin. By default the graph is
            split where a layer's cache is first read, so that subgraphs of equal layers are equal,
            and where a subgraph with several constants would exceed PART_BYTES.
        passes_constants: True to compute values that depend only on weights once, and to pass them
            to sessions. False where ONNX Runtime adds casts, which it would fold with the
            placeholder of a passed constant. Int8 weights, which it may convert to unsigned ones,
            are never passed.
        lazy: Weights by offset that are passed as well.
    """

    def __init__(
        self,
        path: Path,
        first: list[str] | None = None,
        passes_constants: bool = True,
        lazy: LazyWeights | None = None,
    ) -> None:
        self.folder, self._passes_constants = path.parent, passes_constants
        self._lazy = lazy
        self._model = onnx.load(path, load_external_data=False)
        graph = self._model.graph
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._types = {v.name: v for v in (*graph.input, *graph.output, *graph.value_info)}
        self._computed: dict[str, onnx.NodeProto] = {}
        for node in graph.node:
            if node.op_type in ("Cast", "Transpose", "Reshape") and self._is_large(node.input[0]):
                self._computed[node.output[0]] = node
        self.first: list[str] = []
        self.last = self._last_subgraph()
        self.parts = self._split(first)
        self._origins: dict[str, tuple[int, int]] = {}  # layer of a value, and index from its end
        self._shared: set[str] = set()  # values that several layers read
        self._connect()

    def model(self, index: int) -> bytes:
        """Serialize a subgraph; the caller passes the constants of `computed` to the session."""
        return self.serialize(self.parts[index])

    def serialize(self, part: Subgraph) -> bytes:
        """Serialize a subgraph, as `model` does."""
        model = onnx.ModelProto()
        model.ir_version = self._model.ir_version
        model.opset_import.extend(self._model.opset_import)
        graph = model.graph
        graph.name = self._model.graph.name
        graph.input.extend(self._types[name] for name in part.inputs)
        graph.output.extend(self._types[name] for name in part.outputs)
        inner = {name for node in part.nodes for name in node.output} - set(part.outputs)
        graph.value_info.extend(self._types[name] for name in inner if name in self._types)
        computed = self._producers([name for name in part.constants if not self._is_passed(name)])
        graph.node.extend([*computed, *part.nodes])
        computed_names = {node.output[0] for node in computed}
        names = [*part.constants, *(name for node in computed for name in node.input)]
        for name in dict.fromkeys(name for name in names if name not in computed_names):
            stored = self._stored.get(name)
            graph.initializer.append(
                stored or _passed_constant(name, self.shape(name), self._type(name))
            )
        return model.SerializeToString()

    def _producers(self, constants: list[str]) -> list[onnx.NodeProto]:
        """Return the nodes that compute constants from stored ones, in order."""
        nodes: dict[str, onnx.NodeProto] = {}
        for name in constants:
            if (node := self._computed.get(name)) is not None:
                nodes |= {x.output[0]: x for x in self._producers([node.input[0]])}
                nodes[name] = node
        return [*nodes.values()]

    @contextlib.contextmanager
    def computed(self, index: int, memory: BufferPool) -> Iterator[dict[str, torch.Tensor]]:
        """Compute the constants that are passed to a subgraph's session, in borrowed buffers."""
        values = {}
        with contextlib.ExitStack() as stack:
            for name in self.parts[index].constants:
                if self._is_passed(name):
                    value, dtype = self.compute(name), self._type(name)
                    if isinstance(value, LazyTensor) and value.stored == dtype:
                        values[name] = value.read().contiguous()
                        continue
                    buffer = stack.enter_context(memory.borrow(value.numel(), dtype))
                    rows = buffer.view(value.shape)
                    for piece in chunks(value, dtype):
                        rows[: len(piece)] = piece
                        rows = rows[len(piece) :]
                    values[name] = buffer.view(value.shape)
            yield values

    def _is_passed(self, name: str) -> bool:
        """Return True if a constant is computed once and passed to sessions."""
        if self._lazy and self._is_large(name) and isinstance(self.compute(name), LazyTensor):
            return True
        return self._passes_constants and name in self._computed and self._type(name) != torch.int8

    def compute(self, name: str) -> torch.Tensor:
        """Return a constant, memory-mapped and without its casts."""
        node = self._computed.get(name)
        if node is None:
            return map_tensor(self._stored[name], self.folder, self._lazy)
        value = self.compute(node.input[0])
        if node.op_type == "Cast":
            return value  # `computed` casts it
        if node.op_type == "Reshape":
            return value.reshape(tuple(onnx.numpy_helper.to_array(self._stored[node.input[1]])))
        (order,) = (list(a.ints) for a in node.attribute if a.name == "perm")
        return value.permute(order)

    def _type(self, name: str) -> torch.dtype:
        """Return the type that a constant is cast to, or stored in."""
        node = self._computed.get(name)
        if node is None:
            return TORCH_TYPES[self._stored[name].data_type]
        casts = [a.i for a in node.attribute if node.op_type == "Cast" and a.name == "to"]
        return TORCH_TYPES[casts[0]] if casts else self._type(node.input[0])

    def form(self, index: int) -> tuple[tuple[object, ...], list[str]]:
        """Describe a subgraph without names and weights, and list its names in order of use.

        In subgraphs of equal form the names at the same positions correspond.
        """
        part = self.parts[index]
        indices: dict[str, int] = {}
        descriptions: list[object] = []
        for node in part.nodes:
            for name in (*node.input, *node.output):
                if name and name not in indices:
                    indices[name] = len(indices)
                    descriptions.append(self._describe_value(name, index))
            bare = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
            bare.attribute.extend(node.attribute)
            bare.input.extend(str(indices.get(name, "")) for name in node.input)
            bare.output.extend(str(indices.get(name, "")) for name in node.output)
            descriptions.append(bare.SerializeToString(deterministic=True))
        return tuple(descriptions), list(indices)

    def _describe_value(self, name: str, index: int) -> object:
        """Describe a value in a subgraph without its name; weights by their shape."""
        if self._is_constant(name):
            return tuple(self.shape(name)) if self._is_weight(name) else self._source(name)
        part = self.parts[index]
        if layer := _CACHE.fullmatch(name):
            return layer[1], part.layer - int(layer[2]), layer[3]
        if name not in part.inputs:
            return name in part.outputs
        value_type = self._types[name].type.SerializeToString(deterministic=True)
        # Graph inputs, and values that many layers read, such as masks, are identified by name.
        produced_in, position = self._origins.get(name, (0, 0))
        is_relative = produced_in and name not in self._shared
        origin = (part.layer - produced_in, position) if is_relative else name
        return value_type, origin, name in part.outputs

    def weights(self, index: int) -> tuple[object, ...]:
        """Return the sources of a subgraph's weights, in order of use."""
        return tuple(map(self._source, filter(self._is_weight, self.parts[index].constants)))

    def _is_weight(self, name: str) -> bool:
        tensor = self._stored.get(name)
        small = tensor is not None and tensor.data_type in TORCH_TYPES and bool(tensor.dims)
        return small or self._is_large(name)

    def _source(self, name: str) -> object:
        """Return a constant's location or data, and the nodes applied to it."""
        if (node := self._computed.get(name)) is not None:
            bare = onnx.NodeProto(op_type=node.op_type, attribute=node.attribute)
            return bare.SerializeToString(deterministic=True), self._source(node.input[0])
        bare_tensor = onnx.TensorProto()
        bare_tensor.CopyFrom(self._stored[name])
        bare_tensor.ClearField("name")
        return bare_tensor.SerializeToString(deterministic=True)

    def shape(self, name: str) -> list[int]:
        """Return a constant's shape."""
        stored = self._stored.get(name)
        return list(self.compute(name).shape if stored is None else stored.dims)

    def _is_constant(self, name: str) -> bool:
        return name in self._stored or name in self._computed

    def _is_large(self, name: str) -> bool:
        stored = self._stored.get(name)
        return name in self._computed or (stored is not None and bool(stored.external_data))

    def _last_subgraph(self) -> Subgraph:
        """Return the nodes that only join hidden states, which many layers compute."""
        outputs = (value.name for value in self._model.graph.output)
        name = next((name for name in outputs if name in RETURNED), HIDDEN_STATES)
        part = Subgraph(outputs=[name])
        nodes = {output: node for node in self._model.graph.node for output in node.output}
        while (node := nodes.get(name)) is not None:
            part.nodes.insert(0, node)
            part.constants += [n for n in node.input if self._is_constant(n)]
            part.inputs = sorted({n for n in node.input if n} - {*part.constants})
            if node.op_type in ("Concat", "Sum"):
                break
            (name,) = part.inputs
        return part

    def _split(self, first: list[str] | None) -> list[Subgraph]:
        parts, layers = [Subgraph()], set[str]()
        skipped = {*self._computed, *(node.output[0] for node in self.last.nodes)}
        for node in self._model.graph.node:
            if node.output[0] in skipped:
                continue
            used = [n for n in dict.fromkeys(node.input) if n and self._is_constant(n)]
            large = [name for name in used if self._is_large(name)]
            more = sum(4 * self.compute(name).numel() for name in large)
            begins = [name for name in map(_layer_of, node.input) if name and name not in layers]
            begins = begins[:1]
            layers.update(begins)
            if first is not None:
                begins = [name for name in (*begins, *large[:1]) if [name] == first[:1]]
                first = first[len(begins) :]
            elif not begins and parts[-1].size and parts[-1].size + more > PART_BYTES:
                begins = large[:1]
            if begins:
                self.first += begins
                parts.append(Subgraph())
            parts[-1].layer = len(layers)
            parts[-1].size += more
            parts[-1].nodes.append(node)
            parts[-1].constants += [n for n in used if n not in parts[-1].constants]
        return parts

    def _connect(self) -> None:
        """Find each subgraph's inputs and outputs."""
        readers: defaultdict[str, set[int]] = defaultdict(set)
        graph_outputs = {value.name for value in self._model.graph.output}
        later = {*self.last.inputs}
        num_after: defaultdict[int, int] = defaultdict(int)  # values of a layer in later subgraphs
        for part in reversed(self.parts):
            reads = {n for x in part.nodes for n in x.input if n and not self._is_constant(n)}
            produced = [name for node in part.nodes for name in node.output]
            for name in reversed(produced):
                self._origins[name] = part.layer, num_after[part.layer]
                num_after[part.layer] += 1
            part.inputs = sorted(reads - {*produced})
            part.outputs = sorted((graph_outputs | later) & {*produced} - {""})
            part.later = later
            later = later | reads
            for name in part.inputs:
                readers[name].add(part.layer)
        self._shared = {name for name, layers in readers.items() if len(layers) > 1}


def _layer_of(name: str) -> str:
    """Return the layer of a cache input, past_key_values.N; "" for other values."""
    return ".".join(name.split(".")[:2]) if name.startswith("past_key_values.") else ""


def _passed_constant(name: str, shape: list[int], dtype: torch.dtype) -> onnx.TensorProto:
    """Return a placeholder of a constant that the caller passes to the session."""
    data_type = next(number for number, type_ in TORCH_TYPES.items() if type_ == dtype)
    tensor = onnx.TensorProto(name=name, data_type=data_type, dims=shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    size = math.prod(shape) * dtype.itemsize
    for key, text in (("location", FILE), ("offset", 0), ("length", size)):
        tensor.external_data.add(key=key, value=str(text))
    return tensor


def check_forms(role: str, whole: Path, first: Path, kinds: Sequence[int]) -> None:
    """Check that a graph has the nodes of its first layers in each layer of the same kind.

    Args:
        role: "target" or "draft".
        whole: Graph of all layers.
        first: Graph of the first layers, up to `ObservedLayers.num_representative`.
        kinds: First layer of the kind of each layer.

    Raises:
        ParityError: A layer differs in more than its weights.
    """
    forms, first_forms = (_forms_by_layer(PartitionedGraph(path)) for path in (whole, first))
    num_layers, num_first = len(kinds), len(first_forms) - 1
    middle = itertools.pairwise(kinds[2 : num_first - 1])
    after_pairs = {pair: i + 3 for i, pair in enumerate(middle)}
    for layer in range(num_layers + 1):
        if layer < 3:
            source = layer
        elif layer < num_layers - 1:
            source = after_pairs[kinds[layer - 1], kinds[layer]]
        else:
            source = layer - num_layers + num_first
        expected = first_forms[source]
        if layer < len(forms) and source != layer:  # weights of another layer
            forms[layer] = [(form, None) for form, _ in forms[layer]]
            expected = [(form, None) for form, _ in expected]
        if layer >= len(forms) or forms[layer] != expected:
            raise ParityError(
                f"{role}: after {layer} layers {whole.name} differs from the verified graph of the "
                f"first {num_first} layers"
            )


def _forms_by_layer(split: PartitionedGraph) -> list[list[tuple[object, object]]]:
    """Return forms and weights of subgraphs, by the number of layers begun by their end."""
    forms: list[list[tuple[object, object]]] = [[] for _ in range(split.parts[-1].layer + 1)]
    for i, part in enumerate(split.parts):
        forms[part.layer].append((split.form(i)[0], split.weights(i)))
    return forms


@dataclass(frozen=True)
class RepresentativeParts:
    """Subgraphs that are skipped by passes through representative ones only.

    `names` map, by file, values of skipped subgraphs to the values that replace them.
    """

    skipped: frozenset[int]
    names: Mapping[str, Mapping[str, str]]


def find_representatives(splits: Mapping[str, PartitionedGraph]) -> RepresentativeParts | None:
    """Select subgraphs that include all forms; None if none of them can be skipped.

    After a subgraph, those up to another one of its form are skipped, if the results of the first
    one can replace those of the last. `splits` are the files of one graph variant, the decoder
    first, split at the same values.
    """
    count = len(next(iter(splits.values())).parts)
    numbers: dict[object, int] = {}
    forms = [numbers.setdefault(_form_in_all_files(splits, index), index) for index in range(count)]
    skipped = set[int]()
    names: dict[str, dict[str, str]] = {file: {} for file in splits}
    index = 0
    while index < count:
        seen = {form for i, form in enumerate(forms[: index + 1]) if i not in skipped}
        for last in range(count - 1, index, -1):
            between = {*forms[index + 1 : last + 1]}
            if forms[last] != forms[index] or not between <= seen | {*forms[last + 1 :]}:
                continue
            maps = {file: _map_names(split, index, last) for file, split in splits.items()}
            if all(mapping is not None for mapping in maps.values()):
                skipped |= {*range(index + 1, last + 1)}
                for file, mapping in maps.items():
                    names[file] |= mapping or {}
                index = last
                break
        index += 1
    return RepresentativeParts(frozenset(skipped), names) if skipped else None


def _form_in_all_files(splits: Mapping[str, PartitionedGraph], index: int) -> tuple[object, ...]:
    """Return a subgraph's form in every file, with weights that differ from the decoder's."""
    forms: list[object] = []
    (decoder, *_) = splits.values()
    for split in splits.values():
        if index < len(split.parts):
            weights, decoder_weights = split.weights(index), decoder.weights(index)
            forms.append((split.form(index)[0], weights if weights != decoder_weights else None))
        else:
            forms.append(None)
    return tuple(forms)


def _map_names(split: PartitionedGraph, index: int, last: int) -> dict[str, str] | None:
    """Map values that are read after a subgraph `last` to those of subgraph `index` of its form.

    None if values of subgraphs between them are read as well.
    """
    if last >= len(split.parts):
        return {}
    skipped = {name for part in split.parts[index + 1 : last + 1] for name in part.outputs}
    read = {name for part in split.parts[last + 1 :] for name in part.inputs} & skipped
    before, after = (split.form(i)[1] for i in (index, last))
    if not read <= {*after}:
        return None
    return {name: before[after.index(name)] for name in read}
