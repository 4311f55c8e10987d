"""How much memory a pair needs, and the error where less is left.

ONNX Runtime holds a matrix once, packed for its kernels, and drops the pages that it came from. A
table of which only rows are taken stays in the file, unless it is cast: then all of it is an array.
The figures are of the CPU; docs/benchmarks.md has what was measured beside them.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from specedge.bundle import Bundle
from specedge.bundle.graph_scan import WeightUse, weights_of
from specedge.bundle.manifest import ModelEntry, chunk_length
from specedge.bundle.op_sets import CACHE_TYPES, attention_ops, compute_dtype
from specedge.bundle.precision import QUANTIZED_DTYPES
from specedge.errors import DeviceError

PROCESS = 90 * 10**6  # Python, numpy, ONNX Runtime and this package, whatever the pair
TOKENIZER = 11  # a loaded tokenizer in its file's size, measured with 150,000 entries
CERTAIN = 0.9  # a prediction may be too large by the rest
SHORTEST = 256  # tokens of a context that an advice may leave, and what it is a multiple of
# Products that are not named so, or hold more than a weight, with eighths of it: of integers that
# are widened ONNX Runtime makes MatMulNBits, which has a scale for 32 of them. Packed blocks of 4
# bits have a sum beside each scale, and the scales stay as they were: 28 bytes where 20 lay.
_PRODUCTS = {"Gemm": 8, "DequantizeLinear": 9, "MatMulNBits": 11, "QMoE": 11}
_SIZES = {"int8": 1.0, "int8-block": 1.4, "int4": 0.7}  # bytes of a packed number; of floats 4
_WIDTHS = 4.0  # values of a row that a layer's pass holds, in the root of its matrices' numbers
_SIGNS = ("bad_alloc", "bad allocation", "failed to allocate", "cannot allocate", "out of memory")


@dataclass(frozen=True)
class ModelMemory:
    """Bytes of one loaded model when its context is full.

    packed: matrices as kernels want them
    lying: weights that are read as they lie, but for tables whose rows are taken from the file
    opening: what is there beside them while the session opens: its largest matrix, not yet packed
    caches: keys and values of the whole context, of every slot
    passes: logits, and what a pass and drawing from it compute
    """

    id: str
    weights_dtype: str
    cache_dtype: str
    packed: int
    lying: int
    opening: int
    caches: int
    passes: int

    @property
    def weights(self) -> int:
        """What is held of the weights once the model is loaded."""
        return self.packed + self.lying

    @property
    def running(self) -> int:
        """All that is held while it runs."""
        return self.weights + self.caches + self.passes

    def halved(self) -> ModelMemory:
        """The same model with caches in float16."""
        return replace(self, caches=self.caches // 2) if self.cache_dtype == "float32" else self

    def rounded(self) -> ModelMemory:
        """The same model with weights in int8."""
        if self.weights_dtype in QUANTIZED_DTYPES:
            return self
        packed, lying, opening = self.packed // 4, self.lying // 4, self.opening // 4
        return replace(self, packed=packed, lying=lying, opening=opening)


@dataclass(frozen=True)
class PairMemory:
    """Bytes of a process that loads a pair and fills its context.

    The draft is loaded first; it is None where the bundle has none.
    """

    process: int
    tokenizer: int
    target: ModelMemory
    draft: ModelMemory | None
    context_length: int
    slots: int = 1
    ops: str = "gqa"  # the target's attention

    @property
    def models(self) -> tuple[ModelMemory, ...]:
        """The models that are loaded."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def caches(self) -> int:
        """The caches of all slots."""
        return sum(model.caches for model in self.models)

    @property
    def slot(self) -> int:
        """The caches of one slot."""
        return self.caches // self.slots

    @property
    def opening(self) -> int:
        """The peak while the sessions open."""
        target = self.target.weights + self.target.opening
        if self.draft is None:
            return self.process + target
        return self.process + self.draft.weights + max(self.draft.opening, target)

    @property
    def running(self) -> int:
        """The peak while it generates."""
        return self.process + self.tokenizer + sum(model.running for model in self.models)

    @property
    def peak(self) -> int:
        """The most at any time."""
        return max(self.opening, self.running)

    @property
    def parts(self) -> dict[str, int]:
        """The peak by what it is for."""
        return {
            "packed weights": sum(model.packed for model in self.models),
            "weights as they lie": sum(model.lying for model in self.models),
            "caches": self.caches,
            "passes": sum(model.passes for model in self.models),
            "tokenizer": self.tokenizer,
            "process": self.process,
            "while loading": self.peak - self.running,
        }

    def rounded(self) -> PairMemory:
        """The same pair with weights in int8."""
        return self._each(ModelMemory.rounded)

    def halved(self) -> PairMemory:
        """The same pair with caches in float16."""
        return self._each(ModelMemory.halved)

    def shorter(self, limit: int) -> PairMemory:
        """The same pair with the longest context that keeps its peak below a limit, or as it is."""
        share = (limit - self.running + self.caches) / self.caches
        length = int(self.context_length * share) // SHORTEST * SHORTEST
        if not SHORTEST <= length < self.context_length:
            return self
        shortened = self._each(
            lambda model: replace(model, caches=model.caches * length // self.context_length)
        )
        return replace(shortened, context_length=length)

    def _each(self, change: Callable[[ModelMemory], ModelMemory]) -> PairMemory:
        """Return the same pair with each model changed."""
        draft = None if self.draft is None else change(self.draft)
        return replace(self, target=change(self.target), draft=draft)


def pair_memory(
    bundle: Bundle, ops: Mapping[str, str], slots: int = 1, max_length: int | None = None
) -> PairMemory:
    """Predict what loading and running a pair takes, by its files. Raises BundleError.

    `ops` are the op sets by role.
    Rows of a cache past `max_length` take nothing: the system gives memory when it is written.
    """
    length = bundle.context_length if max_length is None else max_length
    models = {
        role: model_memory(bundle, model, ops[role], slots, max_length)
        for role, model in bundle.models.items()
    }
    return PairMemory(
        process=PROCESS,
        tokenizer=TOKENIZER * bundle.files[bundle.tokenizer].size,
        target=models["target"],
        draft=models.get("draft"),
        context_length=length,
        slots=slots,
        ops=attention_ops(ops["target"]),
    )


def model_memory(
    bundle: Bundle, model: ModelEntry, ops: str, slots: int = 1, max_length: int | None = None
) -> ModelMemory:
    """What one model takes, by its manifest and its decoder's file. Raises BundleError."""
    largest = bundle.files[model.weights].size  # what claims to be more, ONNX Runtime refuses
    found = weights_of(bundle, model.graph("decoder", ops).file)
    fitting = (weight for weight in found if weight.size <= largest)
    is_narrow = compute_dtype(ops) != "float32"
    is_wide = model.weights_dtype == "float32"
    cache = model.cache_layout(ops)
    held = list(chain.from_iterable(_held(weight, is_narrow, is_wide) for weight in fitting))
    packed = [size for size, is_packed in held if is_packed]
    length = min(max_length or cache.capacity, cache.capacity)
    return ModelMemory(
        id=model.source.id,
        weights_dtype=model.weights_dtype,
        cache_dtype=cache.dtype,
        packed=sum(packed),
        lying=sum(size for size, is_packed in held if not is_packed),
        opening=max(packed, default=0),
        caches=slots * cache.size * length // cache.capacity,
        passes=_passes(model, packed, length, bundle.num_draft_tokens, slots),
    )


def _held(
    weight: WeightUse, is_narrow: bool = False, is_wide: bool = False
) -> Iterator[tuple[int, bool]]:
    """What a session holds of a weight: bytes, and whether a kernel has packed them.

    A graph that is narrow multiplies 16 bits, which ONNX Runtime casts to 32 on the CPU; a weight
    that is wide has those from the start.
    """
    for steps, readers in weight.forms:
        size = weight.size * (2 if "Cast" in steps and not is_wide else 1)
        products = [op for op in readers if "MatMul" in op or op in _PRODUCTS]
        for op in products:  # each packs its own
            is_cast = is_narrow and not is_wide and op in ("MatMul", "Gemm") and "Cast" not in steps
            yield size * (2 if is_cast else 1) * _PRODUCTS.get(op, 8) // 8, True
        if any(op not in products and (steps or op != "Gather") for op in readers):
            yield size, False


def _passes(
    model: ModelEntry, packed: list[int], capacity: int, num_draft_tokens: int, slots: int
) -> int:
    """What a pass over a chunk of a prompt makes: scores of its rows, [heads, T, S], and as many
    values as a layer's matrices are wide; logits of every pass up to the verify pass, in each slot,
    and two distributions of its rows.

    The manifest has neither the size of a row nor heads that query. So the largest matrix of a size
    that layers do not have alike is taken for the head, all of whose rows have the first, and the
    others for the layers', whose experts may be larger.
    """
    size, num_layers = _SIZES.get(model.weights_dtype, 4.0), len(model.cache.layers)
    unlike = [one for one, count in Counter(packed).items() if count % num_layers]
    head = max(unlike or packed, default=0)
    hidden = head / size / model.padded_vocab_size
    of_layer = (sum(packed) - head) / size / num_layers
    length = chunk_length(model.cache.capacity)
    heads = hidden / model.cache.layers[0].key_size
    prompt = length * (heads * capacity + _WIDTHS * of_layer**0.5)
    rows = num_draft_tokens + 1
    logits = model.padded_vocab_size * (slots * rows * (rows + 1) // 2 + 4 * rows)
    return int(4 * (prompt + logits))


def check_memory(need: PairMemory) -> None:
    """Raise DeviceError for a pair that cannot fit beside this process."""
    left = left_bytes()
    if left is not None and CERTAIN * (need.peak - need.process) > left:
        models = need.target.id if need.draft is None else f"{need.target.id} and its draft"
        raise DeviceError(
            f"not enough memory for {models}: loading needs about "
            f"{shown(need.peak)} ({_listed(need.parts)}), {shown(left)} are free; "
            f"free some, or {_advice(need, left + need.process)}"
        )


def _advice(need: PairMemory, limit: int) -> str:
    """The options of an export that keep the peak within a limit."""
    rounded, halved = need.rounded(), need.halved()
    both = rounded.halved()
    integers, caches = (
        "--precision int8",
        f"--cache fp16, for --ops {need.ops}-{CACHE_TYPES['fp16']}",
    )
    one = {_length(need, limit): need.shorter(limit), integers: rounded, caches: halved}
    two = {
        f"{integers} {_length(rounded, limit)}": rounded.shorter(limit),
        f"{integers} {caches}": both,
    }
    three = {f"{integers} {_length(both, limit)} {caches}": both.shorter(limit)}
    for ways in (one, two, three):
        found = [f"{o} (about {shown(w.peak)})" for o, w in ways.items() if w.peak <= limit]
        if found:
            return f"export the pair again with {' or '.join(found)}"
    return "take a smaller model"


def _length(need: PairMemory, limit: int) -> str:
    return f"--max-length {need.shorter(limit).context_length}"


@contextmanager
def enough_memory(need: Callable[[], ModelMemory], device: str = "cpu") -> Iterator[None]:
    """Turn a MemoryError into a DeviceError that says what the model needs and what there was."""
    try:
        yield
    except MemoryError as error:
        left, model = left_bytes() if device == "cpu" else None, need()
        found = "less is free" if left is None else f"{shown(left)} are free"
        where = "" if device == "cpu" else f" on {device}"
        raise DeviceError(
            f"not enough memory{where} for {model.id}: it needs about {shown(model.running)} "
            f"(weights {shown(model.weights)}, caches {shown(model.caches)}), {found}; "
            "free some, or take a smaller model"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of ONNX Runtime says that memory ran out, for which it has no type."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS)


def shown(size: int) -> str:
    """A number of bytes, for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _listed(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {shown(size)}" for name, size in parts.items())


def left_bytes() -> int | None:
    """The least of what the system, the process's limit and its control group leave, if known.

    Swap and pages of files count as free where the system or the group would give them up.
    """
    found = []
    with suppress(OSError, ValueError, KeyError):
        facts = _numbers(Path("/proc/meminfo"))
        found.append(1024 * (facts["MemAvailable"] + facts["SwapFree"]))
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
            found.append(max(limit - pages * resource.getpagesize(), 0))
    with suppress(OSError):
        own = Path(Path("/proc/self/cgroup").read_text("utf-8").rpartition("::")[2].strip())
        for group in (own, *own.parents):
            with suppress(OSError, ValueError, KeyError):
                found.append(group_left_bytes(Path("/sys/fs/cgroup") / group.relative_to("/")))
    return min(found, default=None)


def group_left_bytes(group: Path) -> int:
    """What a control group leaves; ValueError where it has no limit."""
    limit = int((group / "memory.max").read_text("utf-8"))
    used = int((group / "memory.current").read_text("utf-8"))
    facts = _numbers(group / "memory.stat")
    return max(limit - used + facts["inactive_file"] + facts["active_file"], 0)


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.replace(":", " ").split() for line in path.read_text("utf-8").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}


def return_freed_memory() -> None:
    """Give the free pages of glibc's heap back to the system.

    While a session packs weights, those that it copied from stay behind among the packed ones:
    420 MB beside 1.1 GB. No option of malloc, which is the whole process's, is changed for that.
    Other allocators are left alone.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
