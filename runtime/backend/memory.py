"""How much memory a model needs, how much is left, and the error where that is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specedge.errors import DeviceError
from specedge.manifest import Model
from specedge.precision import DTYPES

_SIGNS = ("bad_alloc", "bad allocation", "failed to allocate", "cannot allocate", "out of memory")


@contextmanager
def enough_memory(model: Model) -> Iterator[None]:
    """Turn a MemoryError into a DeviceError that says what the model needs and what there was."""
    try:
        yield
    except MemoryError as error:
        left = left_bytes()
        found = "less is free" if left is None else f"{_shown(left)} are free"
        weights, caches = _weights(model), _caches(model)
        raise DeviceError(
            f"not enough memory for {model.source.id}: it needs about {_shown(weights + caches)} "
            f"(weights {_shown(weights)}, caches {_shown(caches)}), {found}; "
            "free some, or take a smaller model"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of ONNX Runtime says that memory ran out, for which it has no type."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS)


def left_bytes() -> int | None:
    """The least of what the system, the process's limit and its control group leave, if known."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) * 1024)
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
            found.append(max(limit - pages * resource.getpagesize(), 0))
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text("utf-8"))
        found.append(max(limit - int((group / "memory.current").read_text("utf-8")), 0))
    return min(found, default=None)


def _weights(model: Model) -> int:
    return DTYPES[model.dtype] * model.num_parameters  # kernels hold them in what they compute in


def _caches(model: Model) -> int:
    sizes = (layer.heads * (layer.key_size + layer.value_size) for layer in model.cache.layers)
    return DTYPES[model.cache.dtype] * model.cache.capacity * sum(sizes)


def _shown(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
