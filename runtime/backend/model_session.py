"""Session of a graph and its weights, shared by all caches of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from specedge.attention_kernels import batch_invariant_attention
from specedge.bundle import MANIFEST, Bundle
from specedge.bundle.batched_signature import BATCHED
from specedge.bundle.gpu_signatures import SCORED
from specedge.bundle.graph_scan import check_graph
from specedge.bundle.graph_variants import (
    CACHE_TYPES,
    GRAPH_VARIANTS,
    QDQ,
    attention_ops,
    compute_dtype,
    has_int8_caches,
)
from specedge.bundle.manifest import REEXPORT_HINT, GraphEntry, ModelEntry, has_mixed_shapes
from specedge.bundle.precision import OLDEST_ONNXRUNTIME, QUANTIZED_DTYPES, check_dtypes
from specedge.bundle.signature import SAMPLING_INPUTS, Port, Signature
from specedge.diagnosis.packages import version_numbers
from specedge.errors import BundleError, DeviceError

from .buffers import Array
from .cuda import engines
from .kv_cache import KeyValueCache, cache_arrays
from .memory import enough_memory, model_memory
from .ort import onnxruntime, translated_errors
from .sessions import Device

ORT_TYPES = {"float32": "float", "float64": "double"}  # names that differ from NumPy's
# Inputs that the host writes before a pass
STAGED = ("tokens", "past_length", "positions", "last_positions", *SAMPLING_INPUTS)


class ModelSession:
    """ONNX Runtime session of a graph; passes are bound to buffers on its device."""

    def __init__(
        self,
        bundle: Bundle,
        model: ModelEntry,
        device: Device,
        ops: str,
        graph: str,
    ) -> None:
        self.model = model
        self.ops = choose_ops(model, ops, device)
        _check_version(model, self.ops)
        where = f"{bundle.folder / MANIFEST}: {model.source.id}"
        check_dtypes(where, model.dtype, model.states[0].dtype)
        if device.is_cpu and compute_dtype(self.ops) == "bfloat16":
            alternatives = ", ".join(
                name for name in model.parity if compute_dtype(name) != "bfloat16"
            )
            raise DeviceError(
                f"{model.source.id}: the graph variant '{self.ops}' computes in bfloat16, which "
                f"ONNX Runtime has no kernels for on {device.name}; omit --ops, or use one of "
                f"{alternatives}"
            )
        if graph == "decoder" and not device.is_cpu and model.has(SCORED, self.ops):
            graph = SCORED
        entry = model.graph(graph, self.ops)
        self.length = entry.length
        # Shortest pass to run; shorter ones are padded
        self.min_length = 1 if device.is_cpu else model.min_gpu_length(self.ops)
        self._signature = model.signatures[entry.signature]
        path = bundle.path(entry.file)
        check_graph(bundle, entry.file)
        self._need = partial(model_memory, bundle, model, self.ops)
        self._enough_memory = partial(enough_memory, self._need, device.name)
        # As in a host, the setting is the same for both models of a pair.
        states = chain.from_iterable(other.states for other in bundle.models.values())
        with self._enough_memory(), batch_invariant_attention(states):
            self._session = device.open(self._engine(bundle, entry, device) or path)
        self.buffers = device.buffers(self._session)
        _check_contract(self._session, entry, self._signature, path)

    def _engine(self, bundle: Bundle, entry: GraphEntry, device: Device) -> Path | None:
        """Return the path of the graph's engine if the device runs engines."""
        if not device.supports_engines:
            return None
        return engines.require(bundle, self.model, entry, device.platform(), device.name)

    @property
    def num_drafted(self) -> int:
        """Draft tokens of one call of a draft graph."""
        return self._signature.num_drafted

    def cache(self) -> KeyValueCache:
        """Return an empty cache."""
        with self.translated():
            arrays = cache_arrays(self.model, self.ops, self.buffers.persistent)
            constants = {state.name for state in self.model.constants}
            return KeyValueCache(arrays, self.buffers, constants)

    def bind(
        self, cache: KeyValueCache, length: int, num_logits: int, captured: bool = False
    ) -> BoundPass:
        """Bind a pass of `length` tokens to a cache, whose buffers are inputs and outputs.

        A graph for any length returns logits of the last `num_logits` rows. A GPU replays a
        `captured` pass as a CUDA graph from the second run on.
        """
        signature = self._signature
        with self.translated():
            options, sizes = self.buffers.run_options(captured), (length, num_logits)
            bound = BoundPass(self._session.io_binding(), cache, options, length)
            bound.inputs = {t.name: self._array(t, bound, *sizes) for t in signature.inputs}
            bound.outputs = {t.name: self._array(t, bound, *sizes) for t in signature.outputs}
            self.buffers.bind(bound.binding, bound.inputs, bound.outputs)
        return bound

    def _array(self, port: Port, bound: BoundPass, length: int, num_logits: int) -> Any:
        """Return a buffer of the cache, or allocate an array of the pass."""
        if port.state is not None:
            return bound.cache.arrays[port.state]
        if port.role == "source_length":
            return bound.cache.source_length
        shape = port.at(1, length, num_logits, length + 1)
        if (values := self._constant(port.role, length, num_logits)) is not None:
            array = self.buffers.constant(values, port.dtype)
        elif port.role in STAGED or (port.role == "hidden" and port in self._signature.inputs):
            array = self.buffers.staging(shape, port.dtype)
        else:
            array = self.buffers.zeros(shape, port.dtype)
        bound.arrays[port.name if port.role in ("weights", "hidden") else port.role] = array
        return array

    def _constant(self, role: str, length: int, num_logits: int) -> Sequence[Any] | None:
        """Return an input's values if they depend only on the shape of a pass, else None."""
        return [length - num_logits] if role == "logits_from" else None

    def _write_positions(self, bound: BoundPass) -> None:
        """Set the inputs with the positions of a pass's tokens."""
        self.buffers.write(bound.arrays["past_length"], [bound.cache.length])

    def run(
        self, bound: BoundPass, tokens: Sequence[int], inputs: Mapping[str, Any] | None = None
    ) -> None:
        """Run a pass over tokens: append their cache rows and compute the pass's logits.

        Shorter texts are padded; cache rows after those of the tokens are stale.

        Args:
            bound: Pass to run.
            tokens: Token ids, at most `bound.length`.
            inputs: Further inputs of the graph, by role.
        """
        padding = [0] * (bound.length - len(tokens))
        try:
            self.buffers.write(bound.arrays["tokens"], [*tokens, *padding])
            self._write_positions(bound)
            for role, values in (inputs or {}).items():
                self.buffers.write(bound.arrays[role], values)
            self.buffers.run(self._session, bound.binding, bound.options)
            bound.cache.extend(tokens)
        except Exception:
            with self.translated():  # entered on failure only, to save time in every pass
                raise

    def map(self, values: Array, outputs: Mapping[str, Any]) -> None:
        """Run a graph that has no cache.

        Args:
            values: Its input.
            outputs: Arrays of its outputs, by state, else by role.
        """
        (port,) = self._signature.inputs
        with self.translated():
            binding = self._session.io_binding()
            inputs = {port.name: self.buffers.constant(values, port.dtype)}
            arrays = {t.name: outputs[t.state or t.role] for t in self._signature.outputs}
            self.buffers.bind(binding, inputs, arrays)
            self.buffers.run(self._session, binding, self.buffers.run_options(False))

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Convert ONNX Runtime's errors in a pass, including out of memory, to ours."""
        action = f"a pass of {self.model.source.id}"
        with self._enough_memory(), translated_errors(action):
            yield


class BoundPass:
    """Binding for one pass length.

    `inputs` and `outputs` reference every bound array by tensor name, since the binding has only
    addresses. `arrays` has them by role, or by name for the roles "weights" and "hidden".
    """

    def __init__(self, binding: Any, cache: KeyValueCache, options: Any, length: int) -> None:
        self.binding = binding
        self.cache = cache
        self.options = options
        self.length = length
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        self.arrays: dict[str, Any] = {}


def choose_ops(model: ModelEntry, ops: str = "auto", device: Device | None = None) -> str:
    """Return the graph variant to run.

    On the CPU, "auto" never selects a graph variant with a compute type, which is for GPUs.

    Raises:
        ValueError: There is no graph variant of that name.
        BundleError: The bundle does not have it.
        DeviceError: The GPU does not support it.
    """
    if ops not in ("auto", *GRAPH_VARIANTS):
        raise ValueError(f"ops must be one of auto, {', '.join(GRAPH_VARIANTS)}, got {ops!r}")
    if device is not None and not device.is_cpu:
        return _gpu_ops(model, ops, device)
    if ops == "auto":
        return model.cpu_ops
    if (graph_variant := model.graph_variant(ops)) is None:
        raise BundleError(
            f"{model.source.id} has no graphs in the graph variant '{ops}', only in "
            f"{', '.join(model.parity)}; omit --ops{_export_hint(model, ops)}"
        )
    return graph_variant


def _gpu_ops(model: ModelEntry, ops: str, device: Device) -> str:
    """Return the graph variant to run on a GPU, or the requested one if the GPU supports it."""
    fits = model.supports_engines if device.supports_engines else model.supports_gpu
    if device.supports_engines and model.encoder is not None:
        raise DeviceError(
            f"{model.source.id}: {device.name} does not run encoder-decoders; use cpu or cuda"
        )
    supported = [name for name in device.preferred_ops if name in model.parity and fits(name)]
    if ops == "auto" and supported:
        return supported[0]
    if ops != "auto" and model.graph_variant(ops) in supported:
        return str(model.graph_variant(ops))
    if supported:
        variants = f"only {', '.join(supported)} of its graph variants"
    else:
        variants = f"none of its graph variants ({', '.join(model.parity)})"
    compute_type = (
        QDQ if device.supports_engines and model.weights_dtype in QUANTIZED_DTYPES else "fp16"
    )
    options = f"--compute {compute_type}" if model.dtype == "float32" else ""
    if not options or (device.supports_engines and compute_type != QDQ):
        options = f"--ops all {options}".rstrip()
    raise DeviceError(
        f"{model.source.id}: {device.name} runs {variants}"
        + (f", not '{ops}'" if ops != "auto" else f"; export the pair again with {options}")
    )


def _export_hint(model: ModelEntry, ops: str) -> str:
    """Return a hint with the export options that add a graph variant; empty if there are none."""
    plain, _, suffix = ops.partition("-")
    if suffix in (("bf16",) if model.weights_dtype in QUANTIZED_DTYPES else ("fp32", QDQ)):
        return ""
    cache_types = {name: cache_type for cache_type, name in CACHE_TYPES.items()}
    option = f"--compute {suffix}" if suffix else ""
    if suffix in cache_types:
        option = f"--cache {cache_types[suffix]}"
    if plain != "gqa" or plain in map(attention_ops, model.parity):
        return f", or export the pair with --ops {plain} {option}".rstrip()
    if has_mixed_shapes(model.layers):
        return ""  # GroupQueryAttention requires equal sizes
    options = f"--ops all {option}".rstrip()
    return f", or export the pair with {options}, which adds {ops} if the model supports it"


def _check_version(model: ModelEntry, ops: str) -> None:
    """Raise DeviceError if this ONNX Runtime is too old for a graph variant."""
    feature = "int8_caches" if has_int8_caches(ops) else attention_ops(ops)
    has_older_variant = "gqa" in model.parity and model.encoder is None
    if model.encoder is not None:  # cross-attention is an operator of standard ONNX
        feature = "onnx"
    installed, oldest = onnxruntime().__version__, OLDEST_ONNXRUNTIME[feature]
    if version_numbers(installed) < version_numbers(oldest):
        raise DeviceError(
            f"{model.source.id}: the graph variant '{ops}' requires ONNX Runtime {oldest} or "
            f"later, but {installed} is installed; upgrade it"
            + (", or use --ops gqa" if ops == "onnx" and has_older_variant else "")
        )


def _check_contract(session: Any, entry: GraphEntry, signature: Signature, path: Path) -> None:
    """Raise BundleError for a graph whose inputs or outputs differ from the manifest."""
    if unknown := signature.unknown:
        raise BundleError(
            f"{path}: the role of input {unknown[0]} is unknown to this version of "
            "specedge; upgrade specedge, or export the pair again"
        )
    for values, ports in (
        (session.get_inputs(), signature.inputs),
        (session.get_outputs(), signature.outputs),
    ):
        actual = {value.name: _describe(value.type, value.shape) for value in values}
        expected = {port.name: _expected(port, entry) for port in ports}
        for name in sorted(expected.keys() | actual.keys()):
            if actual.get(name) != expected.get(name):
                raise BundleError(
                    f"{path}: {name} is {actual.get(name, 'missing')}, {MANIFEST} specifies "
                    f"{expected.get(name, 'none')}; {REEXPORT_HINT}"
                )


def _expected(port: Port, entry: GraphEntry) -> str:
    batch = 0 if entry.name == BATCHED else 1
    shape = port.at(batch, entry.length or 0, 0)
    return _describe(f"tensor({ORT_TYPES.get(port.dtype, port.dtype)})", shape)


def _describe(type_name: str, shape: list[Any]) -> str:
    """Format a type and shape; sizes that may be any number are "any"."""
    sizes = ", ".join(str(size) if isinstance(size, int) and size else "any" for size in shape)
    return f"{type_name} [{sizes}]"
