"""The parts of a bundle's manifest; each refuses what contradicts itself.

The whole, and the format's number, are in `bundle.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from ..errors import BundleError
from .gpu_signatures import ONE_CALL, SCORED, one_call, with_best
from .op_sets import (
    OP_SETS,
    OPS,
    attention_ops,
    cache_dtype,
    compute_dtype,
    describe_dtypes,
    has_compute_type,
    is_qdq,
    is_reduced_precision,
)
from .precision import DTYPES, PRECISIONS, QUANTIZED_DTYPES, Precision, precision_of
from .reports import ParityReport, QuantizationReport, check_single_line
from .signature import Signature, TensorSpec

REEXPORT_HINT = "export the pair again, or copy the bundle again"
PREFILL_LENGTH = 64  # tokens of the prefill graph
ANY_LENGTH = ("decoder", SCORED, *ONE_CALL)
GRAPHS = (*ANY_LENGTH, "step", "catchup", "verify", "prefill")  # known by name


@dataclass(frozen=True)
class FileEntry:
    """What a file must be."""

    size: int
    sha256: str

    def __post_init__(self) -> None:
        if self.size < 0 or not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError("a file has a size of at least 0 and 64 lowercase hexadecimal digits")


@dataclass(frozen=True)
class CheckpointSource:
    """Where a checkpoint came from: a hub id or a folder's name, with its commit and licence."""

    id: str
    revision: str | None
    license: str | None = field(metadata={"key": "licence"})

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            check_single_line(name, text)


@dataclass(frozen=True)
class CacheLayer:
    """One layer's buffers: keys [B, heads, S, key_size], values [B, heads, S, value_size]."""

    heads: int
    key_size: int
    value_size: int

    def __post_init__(self) -> None:
        if min(self.heads, self.key_size, self.value_size) < 1:
            raise ValueError("heads, key_size and value_size are at least 1")


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache: S = `capacity` rows, one entry a layer."""

    dtype: str
    capacity: int
    layers: tuple[CacheLayer, ...]

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        if self.capacity < 1 or not self.layers:
            raise ValueError("a cache has at least one row and one layer")

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        row = sum(layer.heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return DTYPES[self.dtype] * self.capacity * row


@dataclass(frozen=True)
class GraphEntry:
    """One ONNX file: `length` new tokens a pass (null: any), and which signature it has."""

    name: str
    ops: str
    batch: int
    length: int | None
    signature: str
    file: str

    def __post_init__(self) -> None:
        if self.ops not in OP_SETS:
            raise ValueError(f"ops is one of {', '.join(OP_SETS)}, got '{self.ops}'")
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,39}", self.name):
            raise ValueError(f"name is up to 40 of a-z, 0-9, - and _, got '{self.name}'")
        if self.batch < 1 or (self.length is not None and self.length < 1):
            raise ValueError("batch and length are at least 1")
        if self.name in GRAPHS and (self.length is None) is not (self.name in ANY_LENGTH):
            raise ValueError(
                f"{', '.join(ANY_LENGTH)} take any length, and step, catchup, verify, prefill one"
            )


@dataclass(frozen=True)
class ModelEntry:
    """One exported model. It reads `vocab_size` tokens: of the target's tokenizer, as many as the
    model has an embedding for. Logits have `padded_vocab_size` columns, of which the first
    `vocab_size` are these tokens, or fewer, for which the bundle has an id map.

    `num_experts` are those of a layer, 0 where no layer chooses among any. `graphs` come in op
    sets, each with a report in `parity`; `signatures` are what they take and give. `dtype` and the
    cache's are those of the op sets whose names have none. Each op set of integers, or that
    computes in 16 bits, has a report in `quantisation`, too; parity's errors are then those of the
    float graphs that were rounded.
    """

    source: CheckpointSource
    architecture: str
    num_parameters: int
    num_experts: int
    vocab_size: int
    padded_vocab_size: int
    context_length: int
    dtype: str
    weights_dtype: str
    cache: CacheLayout
    weights: str
    signatures: dict[str, Signature]
    graphs: tuple[GraphEntry, ...]
    parity: dict[str, ParityReport]
    quantization: dict[str, QuantizationReport] = field(metadata={"key": "quantisation"})

    def __post_init__(self) -> None:
        check_single_line("architecture", self.architecture)
        _check_dtype(self.dtype)
        if self.weights_dtype not in (*DTYPES, *QUANTIZED_DTYPES):
            known = ", ".join((*DTYPES, *QUANTIZED_DTYPES))
            raise ValueError(f"weights_dtype is one of {known}, got '{self.weights_dtype}'")
        if min(self.vocab_size, self.padded_vocab_size) < 1:
            raise ValueError("vocab_size and padded_vocab_size are at least 1")
        if not 1 <= self.context_length <= self.cache.capacity:
            raise ValueError("context_length is at least 1 and at most the cache's capacity")
        names = [(graph.name, graph.ops) for graph in self.graphs]
        if len(set(names)) != len(names):
            raise ValueError("graphs has no name twice for one op set")
        ops = {ops for name, ops in names if name == "decoder"}
        if not ops or ops != {ops for _, ops in names} or ops != self.parity.keys():
            raise ValueError("each op set in graphs has a decoder and an entry in parity")
        if ops.isdisjoint(OPS):
            raise ValueError("one op set in graphs has a name without a type")
        if self.quantization.keys() != {
            one for one in ops if is_reduced_precision(one, self.weights_dtype)
        }:
            raise ValueError(
                "quantisation has a report where weights are integers or an op set has a type of "
                "16 bits, and only there"
            )
        if min(self.num_parameters, self.num_experts) < 0:
            raise ValueError("num_parameters and num_experts are at least 0")
        for graph in self.graphs:
            self._check_signature(graph)
        if precision := PRECISIONS.get(self.dtype):
            for report in self.parity.values():
                if report.tolerance is None and report.error_ratio > precision.multiple:
                    raise ValueError(
                        f"error_ratio is at most {precision.multiple:g} without a tolerance"
                    )

    def _check_signature(self, graph: GraphEntry) -> None:
        found = self.signatures.get(graph.signature)
        if found is None:
            raise ValueError(f"{graph.name} has no '{graph.signature}' among signatures")
        cache = self.cache_layout(graph.ops)
        wanted = signatures(cache, self.padded_vocab_size)[signature_name(graph.name)]
        if graph.name == SCORED:
            wanted = with_best(wanted, self.num_columns)
        if graph.name in ONE_CALL:
            wanted = one_call(graph.name, wanted, self.num_columns, found.num_drafted)
        if graph.name in GRAPHS and not found.has(wanted):
            raise ValueError(f"{graph.name}'s signature is not that of cache and logits")

    @property
    def num_columns(self) -> int:
        """How many columns of the logits are tokens."""
        return min(self.vocab_size, self.padded_vocab_size)

    def cache_layout(self, ops: str) -> CacheLayout:
        """The cache that an op set's graphs take."""
        return (
            self.cache if ops == attention_ops(ops) else replace(self.cache, dtype=cache_dtype(ops))
        )

    def supports_gpu(self, ops: str) -> bool:
        """Whether GPUs have kernels for an op set: no products of bytes, and GroupQueryAttention in
        16 bits alone.
        """
        if cache_dtype(ops) != compute_dtype(ops) or (
            self.weights_dtype in QUANTIZED_DTYPES and not has_compute_type(ops)
        ):
            return False
        is_wide = attention_ops(ops) == "gqa" and compute_dtype(ops) == "float32"
        return not is_wide and not is_qdq(ops)

    def supports_engines(self, ops: str) -> bool:
        """Whether engines can be compiled of an op set: integers take a form of their own."""
        if is_qdq(ops):
            return True
        return self.supports_gpu(ops) and self.weights_dtype not in QUANTIZED_DTYPES

    def op_set(self, ops: str) -> str | None:
        """The op set of a name, if the model has it; of float weights the one without a type
        computes in float32.
        """
        plain = attention_ops(ops)
        same = cache_dtype(ops) == cache_dtype(plain) and not is_reduced_precision(
            plain, self.weights_dtype
        )
        return next((name for name in (ops, *[plain] * same) if name in self.parity), None)

    @property
    def cpu_ops(self) -> str:
        """The better op set on the CPU: `gqa` reads no more of the cache than is filled. It is left
        out where `onnx` gives the same bits for more pass lengths.
        """
        held = {name: {*found.invariant_lengths} for name, found in self.parity.items()}
        return "gqa" if "gqa" in held and held["gqa"] >= held.get("onnx", set()) else "onnx"

    def describe_parity(self, ops: str) -> str:
        """What the export found of an op set's graphs, in one line."""
        found = self.parity[ops].summary(self.precision)
        if ops in self.quantization:
            cost = self.quantization[ops].summary()
            return f"{self.weights_dtype}{describe_dtypes(ops)}: {cost}; before that it {found}"
        return found

    def bound(self, ops: str) -> float:
        """How far from exact a right graph of an op set may be, relative to the largest value."""
        if ops in self.quantization:
            return 2 * self.quantization[ops].error  # of texts that were not tried
        return self.parity[ops].bound(self.precision)

    @property
    def precision(self) -> Precision:
        """What the model computes in; BundleError where this specedge does not know it."""
        return precision_of(self.source.id, self.dtype, self.cache.dtype)

    def has(self, name: str, ops: str) -> bool:
        """Whether there is a graph of a name in an op set."""
        return any((graph.name, graph.ops) == (name, ops) for graph in self.graphs)

    def graph(self, name: str, ops: str) -> GraphEntry:
        """The graph of a name in an op set: `decoder` takes any length, others have one."""
        for graph in self.graphs:
            if (graph.name, graph.ops) == (name, ops):
                return graph
        have = ", ".join(f"{g.name} ({g.ops})" for g in self.graphs)
        raise BundleError(f"no graph '{name}' for the op set '{ops}', only {have}; {REEXPORT_HINT}")


def chunk_length(capacity: int) -> int:
    """How many tokens of a prompt a pass of the decoder reads, over a cache of so many rows.

    Wider passes read weights less often: 256 take 13 to 25% less than 64. But attention holds
    scores of every token for every row of the cache.
    """
    return max(PREFILL_LENGTH, min(256, 2**21 // capacity))


def signature_name(graph: str) -> str:
    """Which of `signatures` a graph has that this format knows by name."""
    kinds = dict.fromkeys(ANY_LENGTH, "chosen_logits") | {"prefill": "caches_alone"}
    return kinds.get(graph, "with_logits")


def signatures(cache: CacheLayout, num_columns: int) -> dict[str, Signature]:
    """What graphs take and give: logits of the rows that are asked for, of all rows, or of none."""
    inputs = [
        TensorSpec("input_ids", "tokens", None, "int64", ("B", "T")),
        TensorSpec("past_length", "past_length", None, "int64", ("B",)),
    ]
    first = TensorSpec("logits_from", "logits_from", None, "int64", (1,))
    logits = TensorSpec("logits", "logits", None, "float32", ("B", "T", num_columns))
    chosen = replace(logits, shape=("B", "R", num_columns))
    caches = []
    for i, layer in enumerate(cache.layers):
        for part, size in (("key", layer.key_size), ("value", layer.value_size)):
            buffer, shape = f"{i}.{part}", ("B", layer.heads, cache.capacity, size)
            inputs.append(
                TensorSpec(f"past_key_values.{buffer}", "cache", buffer, cache.dtype, shape)
            )
            caches.append(TensorSpec(f"present.{buffer}", "cache", buffer, cache.dtype, shape))
    return {
        "chosen_logits": Signature((*inputs[:2], first, *inputs[2:]), (chosen, *caches)),
        "with_logits": Signature(tuple(inputs), (logits, *caches)),
        "caches_alone": Signature(tuple(inputs), tuple(caches)),
    }


def _check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise ValueError(f"a dtype is float32, float16 or bfloat16, got '{name}'")
