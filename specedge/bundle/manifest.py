"""Parts of a bundle's manifest, with consistency checks.

The manifest as a whole and the format version are in `bundle.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..errors import BundleError
from ..strict_json import OPTIONAL
from .batched_signature import BATCHED, batched
from .gpu_signatures import ONE_CALL, SCORED, one_call, with_best
from .graph_variants import (
    GRAPH_VARIANTS,
    OPS,
    attention_ops,
    cache_dtype,
    compute_dtype,
    describe_dtypes,
    has_compute_type,
    has_single_rows,
    is_qdq,
    is_reduced_precision,
)
from .precision import CACHE_DTYPES, DTYPE, DTYPES, ERROR_MULTIPLE, QUANTIZED_DTYPES
from .reports import ParityReport, QuantizationReport, check_single_line
from .signature import Port, Signature

REEXPORT_HINT = "export or copy the bundle again"
PREFILL_LENGTH = 64  # tokens of the prefill graph
STATE_KINDS = ("rows", "constant")
# Graphs of an encoder-decoder, which run once per source.
ENCODER, OPEN, FEATURES = "encoder", "open", "features"
FUSE = "fuse"  # graph of a draft model that reads hidden states of the target
SAMPLING_RATE, HOP_LENGTH = 16_000, 160  # of audio in Hz, and samples per frame of a spectrogram
ANY_LENGTH = ("decoder", BATCHED, SCORED, *ONE_CALL, ENCODER, OPEN, FEATURES, FUSE)
GRAPHS = (*ANY_LENGTH, "step", "catchup", "verify", "prefill")  # defined by the format


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 of a file."""

    size: int
    sha256: str

    def __post_init__(self) -> None:
        if self.size < 0 or not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(
                "a file must have a size of at least 0 and a SHA-256 of 64 lowercase "
                "hexadecimal digits"
            )


@dataclass(frozen=True)
class CheckpointSource:
    """Hub id or folder name of a checkpoint, with its commit and license."""

    id: str
    revision: str | None
    license: str | None

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            check_single_line(name, text)


@dataclass(frozen=True)
class State:
    """Tensor that a pass reads and updates, such as the keys of a layer, [B, H, S, D].

    Attributes:
        name: Name within the model; "{layer}.key" and "{layer}.value" for key-value caches,
            "{layer}.cross.key" and "{layer}.cross.value" for those of cross-attention.
        kind: "rows": a pass writes one row per token along S, and a smaller `past_length` rolls
            back. "constant": the graph `open` writes it once per source, and passes read its first
            `source_length` rows along E.
        dtype: Element type in graph variants whose names have no type.
        shape: Sizes; "B" is the batch, "S" the model's capacity and "E" the encoder's.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", self.name) or len(self.name) > 90:
            raise ValueError(
                f"a state's name must be up to 90 of a-z, 0-9, _ and dots between them, got "
                f"'{self.name}'"
            )
        if self.kind not in STATE_KINDS:
            kinds = ", ".join(STATE_KINDS)
            raise ValueError(f"state {self.name}: kind must be {kinds}, got '{self.kind}'")
        _check_dtype(self.dtype, CACHE_DTYPES)
        rows = "S" if self.kind == "rows" else "E"
        if len(self.shape) != 4 or self.shape[::2] != ("B", rows):
            raise ValueError(f"state {self.name}: shape must be B, a number, {rows} and a number")
        if any(isinstance(size, str) or size < 1 for size in self.shape[1::2]):
            raise ValueError(f"state {self.name}: sizes must be at least 1")

    def sizes(self, capacity: int, batch: int = 1) -> tuple[int, ...]:
        """Return the shape for a capacity, the model's or its encoder's, and batch size."""
        values = {"B": batch, "S": capacity, "E": capacity}
        return tuple(values[size] if isinstance(size, str) else size for size in self.shape)


@dataclass(frozen=True)
class EncoderEntry:
    """Encoder of an encoder-decoder model.

    Attributes:
        max_length: Longest source, in tokens; of log-mel spectrograms, their number of frames.
        num_mel_bins: Mel bins of the spectrograms that it reads; None if it reads tokens.
        hidden_size: Size of its hidden states.
        capacity: Rows of each constant state, E, which are at most that many hidden states.
    """

    max_length: int
    num_mel_bins: int | None
    hidden_size: int
    capacity: int

    def __post_init__(self) -> None:
        sizes = (self.max_length, self.num_mel_bins or 1, self.hidden_size, self.capacity)
        if min(sizes) < 1:
            raise ValueError(
                "max_length, num_mel_bins, hidden_size and capacity must be at least 1"
            )
        if self.num_mel_bins is None and self.capacity < self.max_length:
            raise ValueError("capacity must be at least max_length where the source is tokens")

    @property
    def reads_speech(self) -> bool:
        """True if the source is a log-mel spectrogram."""
        return self.num_mel_bins is not None

    @property
    def source_shape(self) -> tuple[int, int] | None:
        """Shape of spectrograms, [mel bins, frames]; None if the source is tokens."""
        return None if self.num_mel_bins is None else (self.num_mel_bins, self.max_length)

    @property
    def signatures(self) -> dict[str, tuple[Port, ...]]:
        """Ports of the source, of the hidden states, and of audio, by role."""
        source = Port("source", "source", None, "int64", ("B", "N"))
        rows: int | str = "N"
        audio = Port("audio", "audio", None, "float32", ("B", self.num_samples))
        if self.source_shape is not None:
            shape = ("B", *self.source_shape)
            source, rows = replace(source, dtype="float32", shape=shape), self.capacity
        hidden = Port("hidden", "hidden", None, "float32", ("B", rows, self.hidden_size))
        return {"source": (source,), "hidden": (hidden,), "audio": (audio,)}

    @property
    def num_samples(self) -> int:
        """Samples of audio that a log-mel spectrogram has."""
        return HOP_LENGTH * self.max_length


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states that the target's passes return, or that a draft model reads.

    Attributes:
        layers: Layers of the target, counted from 0, whose inputs are concatenated. The number of
            layers stands for the last layer's output, and one more for that of the final norm.
        size: Number of channels of the concatenated states, F.
        draft_size: Number of channels H of the states that passes of a draft model read and return;
            None for a target. The graph `fuse` computes them from those of the target, unless they
            are the same.
    """

    layers: tuple[int, ...]
    size: int
    draft_size: int | None = None

    def __post_init__(self) -> None:
        if not self.layers or any(layer < 0 for layer in self.layers):
            raise ValueError("layers must have at least one index, none of them below 0")
        if min(self.size, self.draft_size or 1) < 1:
            raise ValueError("size and draft_size must be at least 1")

    @property
    def signature(self) -> Signature:
        """Signature of the graph `fuse`."""
        read = Port("hidden", "hidden", None, "float32", ("B", "T", self.size))
        fused = Port("fused", "hidden", None, "float32", ("B", "T", self.draft_size or self.size))
        return Signature((read,), (fused,))

    @property
    def ports(self) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
        """Additional inputs and outputs of a model's passes."""
        if self.draft_size is None:
            return (), self.signature.inputs
        read = replace(self.signature.inputs[0], shape=("B", "T", self.draft_size))
        return (read,), (replace(read, name="next_hidden"),)


@dataclass(frozen=True)
class DraftTokenizer:
    """Tokenizer of a draft model whose tokens are not the target's.

    Attributes:
        file: File of the tokenizer.
        readings: File with the draft's tokens for each token of the target.
        prefix: Tokens that the tokenizer adds at the beginning of a text.
    """

    file: str
    readings: str
    prefix: tuple[int, ...]


@dataclass(frozen=True)
class GraphEntry:
    """ONNX file of a graph: pass length (None: any), graph variant and name of its signature."""

    name: str
    ops: str
    length: int | None
    signature: str
    file: str

    def __post_init__(self) -> None:
        if self.ops not in GRAPH_VARIANTS:
            raise ValueError(f"ops must be one of {', '.join(GRAPH_VARIANTS)}, got '{self.ops}'")
        if not re.fullmatch(r"[a-z][a-z0-9_-]{0,39}", self.name):
            raise ValueError(f"name must be up to 40 of a-z, 0-9, - and _, got '{self.name}'")
        if self.length is not None and self.length < 1:
            raise ValueError("length must be at least 1")
        if self.name in GRAPHS and (self.length is None) is not (self.name in ANY_LENGTH):
            raise ValueError(
                f"{', '.join(ANY_LENGTH)} must have no length, and step, catchup, verify, "
                "prefill must have one"
            )


CONFIDENCE_BOUNDS = (0.2, 0.35, 0.5, 0.7, 0.85, 0.95)  # of classes of a largest probability


@dataclass(frozen=True)
class MeasuredAcceptance:
    """Acceptance rates of a draft model at temperature 0 and 1, measured on a few texts.

    Attributes:
        greedy: Rate at temperature 0.
        sampled: Rate at temperature 1.
        greedy_by_confidence: Rate at temperature 0 by class of the draft's largest probability,
            whose bounds are `CONFIDENCE_BOUNDS`; empty if it was not measured.
        sampled_by_confidence: The same at temperature 1.
    """

    greedy: float
    sampled: float
    greedy_by_confidence: tuple[float, ...] = field(default=(), metadata=OPTIONAL)
    sampled_by_confidence: tuple[float, ...] = field(default=(), metadata=OPTIONAL)

    def __post_init__(self) -> None:
        if not all(0 <= rate <= 1 for rate in (self.greedy, self.sampled)):
            raise ValueError("greedy and sampled must be between 0 and 1")
        for rates in (self.greedy_by_confidence, self.sampled_by_confidence):
            if len(rates) not in (0, len(CONFIDENCE_BOUNDS) + 1):
                raise ValueError(
                    "greedy_by_confidence and sampled_by_confidence must have "
                    f"{len(CONFIDENCE_BOUNDS) + 1} rates or none"
                )
            if not all(0 <= rate <= 1 for rate in rates):
                raise ValueError("rates by confidence must be between 0 and 1")


@dataclass(frozen=True)
class ModelEntry:
    """Exported model.

    Attributes:
        source: Origin of the checkpoint.
        architecture: Name of the architecture.
        num_parameters: Number of parameters.
        num_experts: Experts per layer; 0 for a dense model.
        vocab_size: Token ids of the target's tokenizer, or of `tokenizer`, that the model has
            embeddings for.
        padded_vocab_size: Columns of the logits, of which the first `vocab_size` are tokens; fewer
            columns than tokens need `token_ids`.
        context_length: Largest number of tokens of a text.
        dtype: Compute type of the graph variants whose names have none.
        weights_dtype: Type of the stored weights.
        capacity: Rows of each state, S.
        states: Tensors that a pass reads and updates.
        weights: Weights file.
        token_ids: File with the target's token ids of a reduced vocabulary (pruned LM head); None
            if column j of the logits is token j.
        signatures: Inputs and outputs of graphs by signature name.
        graphs: Graphs of all graph variants.
        parity: Verification against PyTorch by graph variant; with quantized weights, of the float
            graphs.
        quantization: Quantization reports of graph variants with quantized weights, or with a type
            of 8 or 16 bits.
        acceptance: Measured acceptance rates of a draft model.
        encoder: Encoder, if the model has cross-attention. A draft model without the graph
            `encoder` reads the hidden states of the target's.
        hidden: Hidden states that its passes return for a draft model, or read.
        tokenizer: Tokenizer of a draft model, unless it is the target's. The model reads tokens of
            this tokenizer, and its logits are those of `token_ids`.
        mask_token: Token that stands for each unknown token in a pass of a draft model that drafts
            all tokens of a round at once; None for one pass per token.
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
    capacity: int
    states: tuple[State, ...]
    weights: str
    token_ids: str | None
    signatures: dict[str, Signature]
    graphs: tuple[GraphEntry, ...]
    parity: dict[str, ParityReport]
    quantization: dict[str, QuantizationReport]
    acceptance: MeasuredAcceptance | None = field(default=None, metadata=OPTIONAL)
    encoder: EncoderEntry | None = field(default=None, metadata=OPTIONAL)
    hidden: HiddenStates | None = field(default=None, metadata=OPTIONAL)
    tokenizer: DraftTokenizer | None = field(default=None, metadata=OPTIONAL)
    mask_token: int | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        check_single_line("architecture", self.architecture)
        _check_dtype(self.dtype)
        if self.weights_dtype not in (*DTYPES, *QUANTIZED_DTYPES):
            dtypes = ", ".join((*DTYPES, *QUANTIZED_DTYPES))
            raise ValueError(f"weights_dtype must be one of {dtypes}, got '{self.weights_dtype}'")
        if min(self.vocab_size, self.padded_vocab_size) < 1:
            raise ValueError("vocab_size and padded_vocab_size must be at least 1")
        if not 1 <= self.context_length <= self.capacity:
            raise ValueError("context_length must be at least 1 and at most the capacity")
        if len({state.name for state in self.states}) < len(self.states):
            raise ValueError("states must not repeat a name")
        if len({state.dtype for state in self.states}) != 1:
            raise ValueError("states must have at least one state, and all of them one dtype")
        names = [(graph.name, graph.ops) for graph in self.graphs]
        if len(set(names)) != len(names):
            raise ValueError("graphs must not repeat a name within a graph variant")
        ops = {ops for name, ops in names if name == "decoder"}
        if not ops or ops != {ops for _, ops in names} or ops != self.parity.keys():
            raise ValueError(
                "each graph variant in graphs must have a decoder and an entry in parity"
            )
        if ops.isdisjoint(OPS):
            raise ValueError("one graph variant in graphs must have a name without a type")
        if self.quantization.keys() != {
            name for name in ops if is_reduced_precision(name, self.weights_dtype)
        }:
            raise ValueError(
                "quantization must have a report for each graph variant with integer weights, or "
                "with a type of 8 or 16 bits, and for no other"
            )
        if bool(self.constants) is not (self.encoder is not None):
            raise ValueError("a model has constant states if and only if it has an encoder")
        if self.encoder and (lacking := next((x for x in ops if (OPEN, x) not in names), None)):
            raise ValueError(f"graphs has no '{OPEN}' in the graph variant '{lacking}'")
        self._check_hidden(names)
        if self.mask_token is not None and self.mask_token < 0:
            raise ValueError("mask_token must be at least 0")
        if min(self.num_parameters, self.num_experts) < 0:
            raise ValueError("num_parameters and num_experts must be at least 0")
        for graph in self.graphs:
            self._check_signature(graph)
        for report in self.parity.values() if self.dtype == DTYPE else ():
            if report.tolerance is None and report.error_ratio > ERROR_MULTIPLE:
                raise ValueError(
                    f"error_ratio must be at most {ERROR_MULTIPLE:g} without a tolerance"
                )

    @property
    def reads_hidden(self) -> bool:
        """True for a draft model that reads hidden states of the target."""
        return self.hidden is not None and self.hidden.draft_size is not None

    def _check_hidden(self, names: list[tuple[str, str]]) -> None:
        hidden = self.hidden
        reads_other_states = hidden is not None and hidden.draft_size not in (None, hidden.size)
        fusing = {ops for name, ops in names if name == FUSE}
        if fusing and (hidden is None or hidden.draft_size is None):
            raise ValueError(f"graphs has '{FUSE}', and the model reads no hidden states")
        if reads_other_states and (lacking := sorted({ops for _, ops in names} - fusing)):
            raise ValueError(f"graphs has no '{FUSE}' in the graph variant '{lacking[0]}'")

    def _check_signature(self, graph: GraphEntry) -> None:
        signature = self.signatures.get(graph.signature)
        if signature is None:
            raise ValueError(f"{graph.name} has no '{graph.signature}' among signatures")
        if graph.name not in GRAPHS:
            return
        if graph.name in (ENCODER, OPEN) and self.encoder is None:
            raise ValueError(f"graphs has '{graph.name}', and the model has no encoder")
        if graph.name == FEATURES and not (self.encoder and self.encoder.reads_speech):
            raise ValueError(f"graphs has '{FEATURES}', and the model reads no spectrograms")
        expected = self.format_signatures(graph.ops)[signature_name(graph.name)]
        if graph.name == BATCHED:
            expected = batched(expected)
        if graph.name == SCORED:
            expected = with_best(expected, self.num_columns)
        if graph.name in ONE_CALL:
            if signature.num_drafted > len(signature.outputs):  # each step has outputs of its own
                raise ValueError(f"{graph.file}: its signature has outputs of too few steps")
            expected = one_call(graph.name, expected, self.num_columns, signature.num_drafted)
        if difference := signature.difference(expected):
            raise ValueError(
                f"{graph.file}: its signature does not match its states and logits: {difference}"
            )

    @property
    def num_columns(self) -> int:
        """Number of columns of the logits that are tokens."""
        return min(self.vocab_size, self.padded_vocab_size)

    @property
    def layers(self) -> tuple[tuple[State, ...], ...]:
        """States that passes write, by layer."""
        layers: dict[str, list[State]] = {}
        for state in self.states:
            if state.kind == "rows":
                layers.setdefault(state.name.partition(".")[0], []).append(state)
        return tuple(map(tuple, layers.values()))

    @property
    def constants(self) -> tuple[State, ...]:
        """States that are written once per source."""
        return tuple(state for state in self.states if state.kind == "constant")

    def state_shape(self, state: State, batch: int = 1) -> tuple[int, ...]:
        """Return the shape of a state. [B, H, S or E, D]"""
        if state.kind == "constant" and self.encoder is not None:
            return state.sizes(self.encoder.capacity, batch)
        return state.sizes(self.capacity, batch)

    def states_of(self, ops: str) -> tuple[State, ...]:
        """Return the states of a graph variant."""
        if ops == attention_ops(ops):
            return self.states
        return tuple(replace(state, dtype=cache_dtype(ops)) for state in self.states)

    def cache_size(self, ops: str, kind: str = "rows") -> int:
        """Return the bytes of the states of a kind of one text in a graph variant."""
        return sum(
            CACHE_DTYPES[state.dtype] * math.prod(self.state_shape(state))
            for state in self.states_of(ops)
            if state.kind == kind
        )

    def format_signatures(self, ops: str) -> dict[str, Signature]:
        """Return the signatures that the format defines for a graph variant, by name."""
        sizes = self.capacity, self.padded_vocab_size
        return signatures(self.states_of(ops), *sizes, self.encoder, self.hidden)

    def supports_gpu(self, ops: str) -> bool:
        """Return True if CUDA has kernels for a graph variant.

        It has none for int8 products, and GroupQueryAttention only in 16 bits.
        """
        if cache_dtype(ops) != compute_dtype(ops) or (
            self.weights_dtype in QUANTIZED_DTYPES and not has_compute_type(ops)
        ):
            return False
        is_float32_gqa = attention_ops(ops) == "gqa" and compute_dtype(ops) == "float32"
        return not is_float32_gqa and not is_qdq(ops)

    def min_gpu_length(self, ops: str) -> int:
        """Return the shortest pass to run on a GPU; shorter ones are padded.

        Products with integer weights are not bitwise equal for other lengths in any case, and
        slower for two rows than for one before ONNX Runtime 1.31.
        """
        return 2 if has_single_rows(ops) and self.weights_dtype not in QUANTIZED_DTYPES else 1

    def supports_engines(self, ops: str) -> bool:
        """Return True if TensorRT engines can be compiled from a graph variant."""
        if is_qdq(ops):
            return True
        return self.supports_gpu(ops) and self.weights_dtype not in QUANTIZED_DTYPES

    def graph_variant(self, ops: str) -> str | None:
        """Return the model's graph variant for a name, or None.

        For float weights, the graph variant without a type is the one that computes in float32.
        """
        plain = attention_ops(ops)
        is_same = cache_dtype(ops) == cache_dtype(plain) and not is_reduced_precision(
            plain, self.weights_dtype
        )
        names = (ops, plain) if is_same else (ops,)
        return next((name for name in names if name in self.parity), None)

    @property
    def cpu_ops(self) -> str:
        """Faster graph variant on the CPU.

        `gqa` reads only the filled part of the cache. It is not used if `onnx` is batch-invariant
        for more pass lengths.
        """
        lengths = {name: {*report.invariant_lengths} for name, report in self.parity.items()}
        return (
            "gqa" if "gqa" in lengths and lengths["gqa"] >= lengths.get("onnx", set()) else "onnx"
        )

    def describe_parity(self, ops: str) -> str:
        """Return the verification results of a graph variant as one line."""
        summary = self.parity[ops].summary()
        if ops in self.quantization:
            quality = self.quantization[ops].summary()
            name = f"{self.weights_dtype}{describe_dtypes(ops)}"
            return f"{name}: {quality}; before quantization: {summary}"
        return summary

    def bound(self, ops: str) -> float:
        """Return the largest error of a graph variant, relative to the largest value."""
        if ops in self.quantization:
            return 2 * self.quantization[ops].error  # other texts may have larger errors
        return self.parity[ops].bound

    def has(self, name: str, ops: str) -> bool:
        """Return True if a graph variant has a graph of that name."""
        return any((graph.name, graph.ops) == (name, ops) for graph in self.graphs)

    def has_graph(self, name: str) -> bool:
        """Return True if any graph variant has a graph of that name."""
        return any(graph.name == name for graph in self.graphs)

    def graph(self, name: str, ops: str) -> GraphEntry:
        """Return a graph of a graph variant; raise BundleError if there is none."""
        for graph in self.graphs:
            if (graph.name, graph.ops) == (name, ops):
                return graph
        names = ", ".join(f"{g.name} ({g.ops})" for g in self.graphs)
        raise BundleError(
            f"no graph '{name}' in the graph variant '{ops}'; there are {names}; {REEXPORT_HINT}"
        )


def has_mixed_shapes(layers: Iterable[Iterable[State]]) -> bool:
    """Return True if keys and values of a layer differ in shape, unlike GroupQueryAttention's."""
    return any(len({state.shape for state in states}) > 1 for states in layers)


def chunk_length(capacity: int) -> int:
    """Return the pass length of prefill for a cache of `capacity` rows.

    Longer passes read the weights less often: 256 tokens take 13 to 25% less time than four passes
    of 64. The length is limited by the memory of attention scores, [heads, T, S].
    """
    return max(PREFILL_LENGTH, min(256, 2**21 // capacity))


def signature_name(graph: str) -> str:
    """Return the name of the signature of a graph that the format defines."""
    names = dict.fromkeys(ANY_LENGTH, "chosen_logits") | {"prefill": "caches_alone"}
    names |= {ENCODER: "hidden_states", OPEN: "constant_states", FEATURES: "log_mel", FUSE: FUSE}
    return names.get(graph, "with_logits")


def key_value_states(
    layer: int, keys: tuple[int, int], values: tuple[int, int], dtype: str
) -> tuple[State, ...]:
    """Return the states of a layer's key-value cache.

    Args:
        layer: Index of the layer.
        keys: Heads and size of the keys.
        values: Heads and size of the values.
        dtype: Element type.
    """
    sizes = (("key", keys), ("value", values))
    return tuple(
        State(f"{layer}.{name}", "rows", dtype, ("B", heads, "S", size))
        for name, (heads, size) in sizes
    )


def cross_attention_states(
    layer: int, keys: tuple[int, int], values: tuple[int, int], dtype: str
) -> tuple[State, ...]:
    """Return the constant states of a layer's cross-attention, as `key_value_states`."""
    return tuple(
        replace(
            state,
            name=state.name.replace(".", ".cross."),
            kind="constant",
            shape=("B", state.shape[1], "E", state.shape[3]),
        )
        for state in key_value_states(layer, keys, values, dtype)
    )


def signatures(
    states: tuple[State, ...],
    capacity: int,
    num_columns: int,
    encoder: EncoderEntry | None = None,
    hidden: HiddenStates | None = None,
) -> dict[str, Signature]:
    """Return the signatures that the format defines, by name.

    They differ in the logits: of the rows from `logits_from`, of all rows, or of none. Those of an
    encoder-decoder have the constant states as further inputs, and there are two or three more.
    Hidden states are those of all rows.
    """
    inputs = [
        Port("input_ids", "tokens", None, "int64", ("B", "T")),
        Port("past_length", "past_length", None, "int64", ("B",)),
    ]
    if encoder is not None:
        inputs.append(Port("source_length", "source_length", None, "int64", ("B",)))
    hidden_inputs, hidden_outputs = ((), ()) if hidden is None else hidden.ports
    inputs += hidden_inputs
    num_positions = len(inputs)
    first = Port("logits_from", "logits_from", None, "int64", (1,))
    logits = Port("logits", "logits", None, "float32", ("B", "T", num_columns))
    chosen = replace(logits, shape=("B", "R", num_columns))
    outputs = [*hidden_outputs]
    constants: list[Port] = []
    for state in states:
        is_constant = encoder is not None and state.kind == "constant"
        rows = encoder.capacity if encoder is not None and is_constant else capacity
        shape: tuple[int | str, ...] = ("B", *state.sizes(rows)[1:])
        port = Port(f"past_key_values.{state.name}", "state", state.name, state.dtype, shape)
        inputs.append(port)
        written = replace(port, name=f"present.{state.name}")
        (constants if is_constant else outputs).append(written)
    positions, caches = inputs[:num_positions], inputs[num_positions:]
    result = {
        "chosen_logits": Signature((*positions, first, *caches), (chosen, *outputs)),
        "with_logits": Signature(tuple(inputs), (logits, *outputs)),
        "caches_alone": Signature(tuple(inputs), tuple(outputs)),
    }
    if hidden is not None and hidden.draft_size is not None:
        result[FUSE] = hidden.signature
    if encoder is not None:
        ports = encoder.signatures
        result["hidden_states"] = Signature(ports["source"], ports["hidden"])
        result["constant_states"] = Signature(ports["hidden"], tuple(constants))
        if encoder.reads_speech:
            result["log_mel"] = Signature(ports["audio"], ports["source"])
    return result


def _check_dtype(name: str, dtypes: Iterable[str] = DTYPES) -> None:
    if name not in dtypes:
        raise ValueError(f"a dtype must be one of {', '.join(dtypes)}, got '{name}'")
