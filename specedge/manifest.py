"""The parts of a bundle's manifest; each refuses what contradicts itself.

The whole, and the format's number, are in `bundle.py`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from .errors import BundleError
from .precision import DTYPES, PRECISIONS, QUANTISED, Precision, precision_of
from .signature import Signature, Tensor

CURE = "export the pair again, or copy the bundle again"
OPS = ("onnx", "gqa")
PREFILL_LENGTH = 64  # tokens of the prefill graph
GRAPHS = ("decoder", "step", "catchup", "verify", "prefill")  # what this format knows by name


@dataclass(frozen=True)
class File:
    """What a file must be."""

    size: int
    sha256: str

    def __post_init__(self) -> None:
        if self.size < 0 or not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError("a file has a size of at least 0 and 64 lowercase hexadecimal digits")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint came from: a hub id or a folder's name, with its commit and licence."""

    id: str
    revision: str | None
    licence: str | None

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            check_line(name, text)


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
class Cache:
    """The KV cache: S = `capacity` rows, one entry a layer."""

    dtype: str
    capacity: int
    layers: tuple[CacheLayer, ...]

    def __post_init__(self) -> None:
        _check_dtype(self.dtype)
        if self.capacity < 1 or not self.layers:
            raise ValueError("a cache has at least one row and one layer")


@dataclass(frozen=True)
class Graph:
    """One ONNX file: `length` new tokens a pass (null: any), and which signature it has."""

    name: str
    ops: str
    batch: int
    length: int | None
    signature: str
    file: str

    def __post_init__(self) -> None:
        if self.ops not in OPS:
            raise ValueError(f"ops is one of {', '.join(OPS)}, got '{self.ops}'")
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,39}", self.name):
            raise ValueError(f"name is up to 40 of a-z, 0-9, - and _, got '{self.name}'")
        if self.batch < 1 or (self.length is not None and self.length < 1):
            raise ValueError("batch and length are at least 1")
        if self.name in GRAPHS and (self.length is None) is not (self.name == "decoder"):
            raise ValueError("decoder takes any length, and step, catchup, verify, prefill one")


@dataclass(frozen=True)
class Parity:
    """What the export measured against the PyTorch model.

    `structure_error` compares both in float64, where only a graph that is another model differs; it
    is relative to the row of logits, or of one head's keys or values. The others are of float32,
    against the same float64 and relative to the largest value of the output: the graph's and
    float32's own, which is PyTorch's and that of three runs with other kernels' roundings.
    `error_ratio` is the largest of the graph's errors as a multiple of that in the same row,
    `tolerance` what `--tolerance` allowed instead. `num_left_out` counts tokens left out because
    rounding could have chosen other experts. `row_independent_lengths` are the pass lengths T whose
    rows had the same bits as one pass over all of them. `versions` are those of the packages that
    took part.
    """

    structure_error: float
    logits_error: float
    cache_error: float
    float32_logits_error: float
    float32_cache_error: float
    error_ratio: float
    tolerance: float | None
    logits_std: float
    num_positions: int
    num_left_out: int
    row_independent_lengths: tuple[int, ...]
    versions: dict[str, str]

    def __post_init__(self) -> None:
        numbers = {n: v for n, v in vars(self).items() if isinstance(v, int | float)}
        if low := [name for name, value in numbers.items() if not 0 <= value < math.inf]:
            raise ValueError(f"{low[0]} is at least 0 and finite")
        if min(self.row_independent_lengths, default=1) < 1:
            raise ValueError("row_independent_lengths are at least 1")
        for text in (*self.versions, *self.versions.values()):
            check_line("versions", text)

    def summary(self, precision: Precision) -> str:
        """Both questions and their answers in one line."""
        allowed = f"limit {precision.multiple:g}"
        if self.tolerance is not None:
            allowed = f"--tolerance {self.tolerance:g}"
        return (
            f"matches the model to {self.structure_error:.0e} in float64; in float32 logits are "
            f"off by {self.logits_error:.1e} "
            f"(float32 itself by up to {self.float32_logits_error:.1e}), "
            f"caches by {self.cache_error:.1e} ({self.float32_cache_error:.1e}), the worst row by "
            f"{self.error_ratio:.1f} times float32's own ({allowed}); "
            f"{self.num_positions} positions"
        )

    def bound(self, precision: Precision) -> float:
        """How far from exact a right graph may be, relative to the largest value."""
        if self.tolerance is not None:
            return self.tolerance
        own = max(self.float32_logits_error, self.float32_cache_error)
        return precision.multiple * own + precision.floor


@dataclass(frozen=True)
class Quantisation:
    """What rounding an op set's weights and inputs to integers cost, measured on a text.

    `perplexity` is the model's, `original_perplexity` that of the float graph it was made of;
    `agreement` is how often their likeliest tokens are the same, `divergence` the mean
    Kullback-Leibler divergence in nats, `error` the largest difference of a value of logits or
    cache, in the largest value. Of the groups of matrices that read one input `num_smoothed` had
    channels' sizes moved, `num_cut` have several scales a row, `num_in_blocks` one for every block
    of numbers, `num_left` are not rounded; `exceptions` say of each that is not as the precision
    has it what was done and why.
    `product_error` is the worst product's, root of the mean square over the product's own;
    `plain_product_error` what it would be with neither.
    """

    text: str
    num_tokens: int
    perplexity: float
    original_perplexity: float
    agreement: float
    divergence: float
    error: float
    num_smoothed: int
    num_cut: int
    num_left: int
    num_in_blocks: int
    product_error: float
    plain_product_error: float
    exceptions: tuple[str, ...]

    def __post_init__(self) -> None:
        for line in (self.text, *self.exceptions):
            check_line("text and exceptions", line)
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} is at least 0 and finite")

    def summary(self) -> str:
        """All of it in one line."""
        return (
            f"perplexity {self.perplexity:.4g} on {self.num_tokens} tokens of {self.text}, in "
            f"float {self.original_perplexity:.4g}; the likeliest token is the same in "
            f"{self.agreement:.1%}, KL {self.divergence:.2g}; the worst product is off by "
            f"{self.product_error:.1%} (rounded plainly {self.plain_product_error:.1%}; "
            f"{self.num_smoothed} smoothed, {self.num_cut} cut, {self.num_in_blocks} in blocks, "
            f"{self.num_left} not rounded)"
        )


@dataclass(frozen=True)
class Model:
    """One exported model. It reads `vocab_size` tokens: of the target's tokenizer, as many as the
    model has an embedding for. Logits have `padded_vocab_size` columns, of which the first
    `vocab_size` are these tokens, or fewer, for which the bundle has an id map.

    `num_experts` are those of a layer, 0 where no layer chooses among any. `graphs` come in one or
    two op sets, each with a report in `parity`; `signatures` are what they take and give. Where
    weights are integers each op set has a report in `quantisation`, too; parity's errors are then
    those of the float graphs that were rounded.
    """

    source: Source
    architecture: str
    num_parameters: int
    num_experts: int
    vocab_size: int
    padded_vocab_size: int
    context_length: int
    dtype: str
    weights_dtype: str
    cache: Cache
    weights: str
    signatures: dict[str, Signature]
    graphs: tuple[Graph, ...]
    parity: dict[str, Parity]
    quantisation: dict[str, Quantisation]

    def __post_init__(self) -> None:
        check_line("architecture", self.architecture)
        _check_dtype(self.dtype)
        if self.weights_dtype not in (*DTYPES, *QUANTISED):
            known = ", ".join((*DTYPES, *QUANTISED))
            raise ValueError(f"weights_dtype is one of {known}, got '{self.weights_dtype}'")
        if (self.weights_dtype in QUANTISED) is not bool(self.quantisation):
            raise ValueError("quantisation has a report where weights are integers, and only there")
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
        if self.quantisation and self.quantisation.keys() != ops:
            raise ValueError("each op set in graphs has an entry in quantisation, or none has")
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

    def _check_signature(self, graph: Graph) -> None:
        found = self.signatures.get(graph.signature)
        if found is None:
            raise ValueError(f"{graph.name} has no '{graph.signature}' among signatures")
        wanted = signatures(self.cache, self.padded_vocab_size)[kind_of(graph.name)]
        if graph.name in GRAPHS and not found.has(wanted):
            raise ValueError(f"{graph.name}'s signature is not that of cache and logits")

    def parity_line(self, ops: str) -> str:
        """What the export found of an op set's graphs, in one line."""
        found = self.parity[ops].summary(self.precision)
        if ops in self.quantisation:
            cost = self.quantisation[ops].summary()
            return f"{self.weights_dtype}: {cost}; before that it {found}"
        return found

    def bound(self, ops: str) -> float:
        """How far from exact a right graph of an op set may be, relative to the largest value."""
        if ops in self.quantisation:
            return 2 * self.quantisation[ops].error  # of texts that were not tried
        return self.parity[ops].bound(self.precision)

    @property
    def precision(self) -> Precision:
        """What the model computes in; BundleError where this specedge does not know it."""
        return precision_of(self.source.id, self.dtype, self.cache.dtype)

    def graph(self, name: str, ops: str) -> Graph:
        """The graph of a name in an op set: `decoder` takes any length, others have one."""
        for graph in self.graphs:
            if (graph.name, graph.ops) == (name, ops):
                return graph
        have = ", ".join(f"{g.name} ({g.ops})" for g in self.graphs)
        raise BundleError(f"no graph '{name}' for the op set '{ops}', only {have}; {CURE}")


def chunk_length(capacity: int) -> int:
    """How many tokens of a prompt a pass of the decoder reads, over a cache of so many rows.

    Wider passes read weights less often: 256 take 13 to 25% less than 64. But attention holds
    scores of every token for every row of the cache.
    """
    return max(PREFILL_LENGTH, min(256, 2**21 // capacity))


def kind_of(graph: str) -> str:
    """Which of `signatures` a graph has that this format knows by name."""
    return {"decoder": "chosen_logits", "prefill": "caches_alone"}.get(graph, "with_logits")


def signatures(cache: Cache, num_columns: int) -> dict[str, Signature]:
    """What graphs take and give: logits of the rows that are asked for, of all rows, or of none."""
    inputs = [
        Tensor("input_ids", "tokens", None, "int64", ("B", "T")),
        Tensor("past_length", "past_length", None, "int64", ("B",)),
    ]
    first = Tensor("logits_from", "logits_from", None, "int64", (1,))
    logits = Tensor("logits", "logits", None, "float32", ("B", "T", num_columns))
    chosen = replace(logits, shape=("B", "R", num_columns))
    caches = []
    for i, layer in enumerate(cache.layers):
        for part, size in (("key", layer.key_size), ("value", layer.value_size)):
            buffer, shape = f"{i}.{part}", ("B", layer.heads, cache.capacity, size)
            inputs.append(Tensor(f"past_key_values.{buffer}", "cache", buffer, cache.dtype, shape))
            caches.append(Tensor(f"present.{buffer}", "cache", buffer, cache.dtype, shape))
    return {
        "chosen_logits": Signature((*inputs[:2], first, *inputs[2:]), (chosen, *caches)),
        "with_logits": Signature(tuple(inputs), (logits, *caches)),
        "caches_alone": Signature(tuple(inputs), tuple(caches)),
    }


def check_line(name: str, text: str | None) -> None:
    """Refuse text that could write over a terminal or pass for two lines."""
    if text is not None and (len(text) > 500 or re.search(r"[\x00-\x1f\x7f-\x9f]", text)):
        raise ValueError(f"{name} is one line of at most 500 characters, none of them for control")


def _check_dtype(name: str) -> None:
    if name not in DTYPES:
        raise ValueError(f"a dtype is float32, float16 or bfloat16, got '{name}'")
