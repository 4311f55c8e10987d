"""Memory of a pair: estimated peak, available memory, and the error if it is exceeded.

ONNX Runtime packs each matrix for its kernels and releases the memory-mapped original. A table that
is only gathered from stays memory-mapped, unless the graph casts it. Estimates are for the CPU;
docs/benchmarks.md compares them with measurements.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path

from specedge.bundle import Bundle
from specedge.bundle.graph_scan import WeightUse, weights_of
from specedge.bundle.graph_variants import CACHE_TYPES, attention_ops, compute_dtype
from specedge.bundle.manifest import ENCODER, FUSE, OPEN, ModelEntry, chunk_length
from specedge.bundle.precision import QUANTIZED_DTYPES
from specedge.errors import DeviceError

from ..decoding.observed_states import WINDOW

PROCESS = 90 * 10**6  # Python, NumPy, ONNX Runtime and this package, without models
TOKENIZER = 11  # loaded size relative to the file's, measured with 150,000 entries
SAFETY_FACTOR = 0.9  # estimates may be 10% too large
CONTEXT_STEP = 256  # granularity and minimum of suggested context lengths
# Packed size of a weight in eighths of its size, by operator (8 for other products). ONNX Runtime
# fuses DequantizeLinear of older bundles into MatMulNBits, with a scale per block of 32. A packed
# block of 4 bits takes 28 instead of 20 bytes: a sum beside each scale, and the original scales.
_PACKED_EIGHTHS = {"Gemm": 8, "DequantizeLinear": 9, "MatMulNBits": 11, "QMoE": 11}
_FLOAT_PRODUCTS = ("FusedMatMul", "Gemm", "MatMul")
_LOOKUPS = ("Gather", "GatherBlockQuantized")  # operators that read rows of memory-mapped tables
# Bytes of a packed weight by type; 4 for floating point.
_PACKED_BYTES = {"int8": 1.0, "int8-block": 1.4, "int4": 0.7, "keep": 1.0}
_ROW_VALUES = 4.0  # intermediate values per token, relative to the square root of a layer's weights
_OUT_OF_MEMORY = (
    "bad_alloc",
    "bad allocation",
    "failed to allocate",
    "cannot allocate",
    "out of memory",
)


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of a loaded model whose context is full.

    Attributes:
        packed: Matrices, packed for kernels.
        unpacked: Weights that kernels read unpacked, without memory-mapped tables.
        opening: Extra bytes while the session opens: its largest matrix before packing.
        caches: Key-value caches of all slots, for the whole context.
        passes: Logits, and intermediate values of a pass and of sampling.
        constants: Constant states of all slots in an encoder-decoder.
    """

    id: str
    weights_dtype: str
    cache_dtype: str
    packed: int
    unpacked: int
    opening: int
    caches: int
    passes: int
    constants: int = 0

    @property
    def weights(self) -> int:
        """Bytes of the weights once the model is loaded."""
        return self.packed + self.unpacked

    @property
    def running(self) -> int:
        """Bytes while the model runs."""
        return self.weights + self.caches + self.constants + self.passes

    def with_float16_caches(self) -> ModelMemory:
        """Return the same model with caches in float16."""
        if self.cache_dtype != "float32":
            return self
        return replace(self, caches=self.caches // 2, constants=self.constants // 2)

    def with_int8_weights(self) -> ModelMemory:
        """Return the same model with weights in int8."""
        if self.weights_dtype in QUANTIZED_DTYPES:
            return self
        packed, unpacked, opening = self.packed // 4, self.unpacked // 4, self.opening // 4
        return replace(self, packed=packed, unpacked=unpacked, opening=opening)


@dataclass(frozen=True)
class PairMemory:
    """Bytes of a process that loads a pair and fills its context.

    `models` are the target and, if the bundle has one, the draft model, which is loaded first.
    """

    process: int
    tokenizer: int
    models: tuple[ModelMemory, ...]
    context_length: int
    slots: int = 1
    ops: str = "gqa"  # the target's attention

    @property
    def caches(self) -> int:
        """Bytes of the caches of all slots."""
        return sum(model.caches for model in self.models)

    @property
    def slot(self) -> int:
        """Bytes of the caches of one slot."""
        return (self.caches + self.constants) // self.slots

    @property
    def constants(self) -> int:
        """Bytes of the constant states of all slots."""
        return sum(model.constants for model in self.models)

    @property
    def opening(self) -> int:
        """Peak while the sessions open."""
        loaded = list(accumulate(model.weights for model in reversed(self.models)))
        openings = (model.opening for model in reversed(self.models))
        return self.process + max(map(sum, zip(loaded, openings, strict=True)))

    @property
    def running(self) -> int:
        """Peak during generation."""
        return self.process + self.tokenizer + sum(model.running for model in self.models)

    @property
    def peak(self) -> int:
        """Peak of loading and running."""
        return max(self.opening, self.running)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of the peak by purpose."""
        return {
            "packed weights": sum(model.packed for model in self.models),
            "memory-mapped weights": sum(model.unpacked for model in self.models),
            "caches": self.caches + self.constants,
            "passes": sum(model.passes for model in self.models),
            "tokenizer": self.tokenizer,
            "process": self.process,
            "while loading": self.peak - self.running,
        }

    def with_slots(self, slots: int) -> PairMemory:
        """Return the same pair with another number of slots."""
        changed = self.with_models(
            lambda model: replace(
                model,
                caches=model.caches * slots // self.slots,
                constants=model.constants * slots // self.slots,
            )
        )
        return replace(changed, slots=slots)

    def with_context_below(self, limit: int) -> PairMemory:
        """Return the pair with the longest context whose peak is below a limit, else itself."""
        share = (limit - self.running + self.caches) / self.caches
        length = int(self.context_length * share) // CONTEXT_STEP * CONTEXT_STEP
        if not CONTEXT_STEP <= length < self.context_length:
            return self
        shortened = self.with_models(
            lambda model: replace(model, caches=model.caches * length // self.context_length)
        )
        return replace(shortened, context_length=length)

    def with_models(self, change: Callable[[ModelMemory], ModelMemory]) -> PairMemory:
        """Return the same pair with each model changed."""
        return replace(self, models=tuple(map(change, self.models)))


def pair_memory(
    bundle: Bundle, ops: Mapping[str, str], slots: int = 1, max_length: int | None = None
) -> PairMemory:
    """Estimate the memory of loading and running a pair from its files.

    Cache rows beyond `max_length` take no memory, since pages are committed on the first write.

    Args:
        bundle: The bundle.
        ops: Graph variants by role.
        slots: Number of concurrent requests.
        max_length: Longest text in tokens; None is the context length.

    Raises:
        BundleError: A graph cannot be read.
    """
    length = bundle.context_length if max_length is None else max_length
    return PairMemory(
        process=PROCESS,
        tokenizer=TOKENIZER * bundle.files[bundle.tokenizer].size,
        models=tuple(
            model_memory(bundle, model, ops[role], slots, max_length)
            for role, model in bundle.models.items()
        ),
        context_length=length,
        slots=slots,
        ops=attention_ops(ops["target"]),
    )


def model_memory(
    bundle: Bundle, model: ModelEntry, ops: str, slots: int = 1, max_length: int | None = None
) -> ModelMemory:
    """Estimate the memory of one model from its manifest entry, its decoder and its encoder.

    Raises:
        BundleError: The graph cannot be read.
    """
    largest = bundle.files[model.weights].size  # ONNX Runtime rejects tensors beyond the file
    names = (name for name in ("decoder", ENCODER, OPEN, FUSE) if model.has(name, ops))
    weight_uses = chain.from_iterable(
        weights_of(bundle, model.graph(name, ops).file) for name in names
    )
    fitting = (weight for weight in weight_uses if weight.size <= largest)
    is_16_bit = compute_dtype(ops) != "float32"
    is_32_bit = model.weights_dtype == "float32"
    sizes = list(
        chain.from_iterable(_weight_bytes(weight, is_16_bit, is_32_bit) for weight in fitting)
    )
    packed = [size for size, is_packed in sizes if is_packed]
    length = min(max_length or model.capacity, model.capacity)
    return ModelMemory(
        id=model.source.id,
        weights_dtype=model.weights_dtype,
        cache_dtype=model.states_of(ops)[0].dtype,
        packed=sum(packed),
        unpacked=sum(size for size, is_packed in sizes if not is_packed),
        opening=max(packed, default=0),
        caches=slots * model.cache_size(ops) * length // model.capacity,
        passes=_pass_bytes(model, packed, length, bundle.num_draft_tokens, slots),
        constants=slots * model.cache_size(ops, "constant"),
    )


def _weight_bytes(
    weight: WeightUse, is_16_bit: bool = False, is_32_bit: bool = False
) -> Iterator[tuple[int, bool]]:
    """Yield the bytes that a session allocates for a weight, and True if a kernel packs them.

    ONNX Runtime casts 16-bit matrices to float32 on the CPU; float32 weights need no cast.
    """
    for steps, readers in weight.forms:
        is_widened = "Cast" in steps and "BitwiseXor" not in steps and not is_32_bit
        size = weight.size * (2 if is_widened else 1)
        products = [op for op in readers if "MatMul" in op or op in _PACKED_EIGHTHS]
        for op in products:  # each packs a copy
            is_cast = is_16_bit and not is_32_bit and op in _FLOAT_PRODUCTS and "Cast" not in steps
            yield size * (2 if is_cast else 1) * _PACKED_EIGHTHS.get(op, 8) // 8, True
        if any(op not in products and (steps or op not in _LOOKUPS) for op in readers):
            yield size, False


def _pass_bytes(
    model: ModelEntry, packed: list[int], capacity: int, num_draft_tokens: int, slots: int
) -> int:
    """Return the bytes of a pass over a chunk of a prompt.

    These are attention scores [heads, T, S], a layer's intermediate values, the logits of all pass
    lengths up to the verify pass for each slot, those of a pass over several slots, two
    distributions per row of the verify pass, and hidden states of the chunk, which a draft head
    also keeps for each slot.

    The manifest states neither the hidden size nor the number of query heads. They are derived from
    the LM head, which is assumed to be the largest matrix whose size does not occur in each layer.
    """
    size, num_layers = _PACKED_BYTES.get(model.weights_dtype, 4.0), len(model.layers)
    single = [num_bytes for num_bytes, count in Counter(packed).items() if count % num_layers]
    head = max(single or packed, default=0)
    hidden_size = head / size / model.padded_vocab_size
    layer_weights = (sum(packed) - head) / size / num_layers
    length = chunk_length(model.capacity)
    heads = hidden_size / int(model.states[0].shape[-1])
    prompt = length * (heads * capacity + _ROW_VALUES * layer_weights**0.5)
    if model.encoder is not None:
        rows = model.encoder.capacity
        prompt = max(prompt, rows * (heads * rows + _ROW_VALUES * layer_weights**0.5))
    rows = num_draft_tokens + 1 if model.mask_token is None else 2 * num_draft_tokens
    shared = slots * rows if slots > 1 else 0
    logits = model.padded_vocab_size * (slots * rows * (rows + 1) // 2 + shared + 4 * rows)
    hidden = 0
    if model.hidden is not None:
        hidden = length * (model.hidden.draft_size or model.hidden.size)
        if model.hidden.draft_size is not None:
            hidden += slots * WINDOW * model.hidden.size
    return int(4 * (prompt + logits + hidden))


def check_memory(need: PairMemory) -> None:
    """Check that a pair fits into the available memory.

    Raises:
        DeviceError: It does not fit.
    """
    available = available_bytes()
    if available is not None and not _fits(need, available):
        models = need.models[0].id + (" and its draft" if need.models[1:] else "")
        raise DeviceError(
            f"not enough memory for {models}: loading needs about {format_bytes(need.peak)} "
            f"({', '.join(f'{name} {format_bytes(size)}' for name, size in need.parts.items())}), "
            f"{format_bytes(available)} are available; free memory, or "
            f"{_advice(need, available)}"
        )


def fitting_slots(need: PairMemory, limit: int, share: float = 1.0) -> int:
    """Return the number of slots whose caches fit into the available memory, at most `limit`.

    `share` is this process's share of the memory.
    """
    available = available_bytes()
    if available is None:
        return limit
    size = int(share * available)
    fitting = (n for n in range(limit, 1, -1) if _fits(need.with_slots(n), size))
    return next(fitting, 1)


def _fits(need: PairMemory, available: int) -> bool:
    return SAFETY_FACTOR * (need.peak - need.process) <= available


def _advice(need: PairMemory, available: int) -> str:
    """Return the number of slots or the export options for which the available memory suffices."""
    if need.slots > 1:
        num_slots = fitting_slots(need, need.slots)
        if _fits(need.with_slots(num_slots), available):
            return f"use at most {num_slots} of {need.slots} slots"
    limit = available + need.process
    quantized = need.with_models(ModelMemory.with_int8_weights)
    smallest = quantized.with_models(ModelMemory.with_float16_caches)
    int8, caches = "--precision int8", f"--cache fp16, for --ops {need.ops}-{CACHE_TYPES['fp16']}"
    one_option = {
        _max_length_option(need, limit): need.with_context_below(limit),
        int8: quantized,
        caches: need.with_models(ModelMemory.with_float16_caches),
    }
    two_options = {
        f"{int8} {_max_length_option(quantized, limit)}": quantized.with_context_below(limit),
        f"{int8} {caches}": smallest,
    }
    max_length = _max_length_option(smallest, limit)
    three_options = {f"{int8} {max_length} {caches}": smallest.with_context_below(limit)}
    for alternatives in (one_option, two_options, three_options):
        options = [
            f"{option} (about {format_bytes(pair.peak)})"
            for option, pair in alternatives.items()
            if pair.peak <= limit
        ]
        if options:
            return f"export the pair again with {' or '.join(options)}"
    return "use a smaller model"


def _max_length_option(need: PairMemory, limit: int) -> str:
    return f"--max-length {need.with_context_below(limit).context_length}"


@contextmanager
def enough_memory(need: Callable[[], ModelMemory], device: str = "cpu") -> Iterator[None]:
    """Turn a MemoryError into a DeviceError with the needed and the available memory."""
    try:
        yield
    except MemoryError as error:
        size, model = available_bytes() if device == "cpu" else None, need()
        available = "less is available" if size is None else f"{format_bytes(size)} are available"
        where = "" if device == "cpu" else f" on {device}"
        raise DeviceError(
            f"not enough memory{where} for {model.id}: it needs about "
            f"{format_bytes(model.running)} (weights {format_bytes(model.weights)}, caches "
            f"{format_bytes(model.caches)}), {available}; "
            "free memory, or use a smaller model"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error is out of memory; ONNX Runtime has no exception type for it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY)


def format_bytes(size: int) -> str:
    """Format a number of bytes."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def available_bytes() -> int | None:
    """Return the memory available to this process in bytes; None if it is unknown.

    This is the minimum over the system, the limit of the process and its control groups, with swap
    and reclaimable page cache.
    """
    limits = []
    with suppress(OSError, ValueError, KeyError):
        meminfo = _numbers(Path("/proc/meminfo"))
        limits.append(1024 * (meminfo["MemAvailable"] + meminfo["SwapFree"]))
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
            limits.append(max(limit - pages * resource.getpagesize(), 0))
    with suppress(OSError):
        path = Path(Path("/proc/self/cgroup").read_text("utf-8").rpartition("::")[2].strip())
        for group in (path, *path.parents):
            with suppress(OSError, ValueError, KeyError):
                limits.append(
                    available_cgroup_bytes(Path("/sys/fs/cgroup") / group.relative_to("/"))
                )
    return min(limits, default=None)


def available_cgroup_bytes(group: Path) -> int:
    """Return the memory available within a control group in bytes.

    Raises:
        ValueError: The group has no limit.
    """
    limit = int((group / "memory.max").read_text("utf-8"))
    used = int((group / "memory.current").read_text("utf-8"))
    stat = _numbers(group / "memory.stat")
    return max(limit - used + stat["inactive_file"] + stat["active_file"], 0)


def _numbers(path: Path) -> dict[str, int]:
    """Parse a file whose lines have a name and a number."""
    lines = (line.replace(":", " ").split() for line in path.read_text("utf-8").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}


def return_freed_memory() -> None:
    """Return free pages of glibc's heap to the system; do nothing with other allocators.

    While a session packs weights, freed pages of unpacked ones remain between the packed ones: 420
    MB for 1.1 GB of weights. Options of malloc would apply to the whole process.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
