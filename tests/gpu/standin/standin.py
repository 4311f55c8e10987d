"""The stand-in CUDA from Python: built, loaded before the CUDA provider is, asked what it counted.

import standin
standin.load()  # in a process of its own: no real CUDA can be had in it afterwards
session = onnxruntime.InferenceSession(model, providers=["CUDAExecutionProvider"])
with standin.counted() as counts:
    session.run_with_iobinding(binding)
assert counts["blocking"] <= 2
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile

LIBRARIES = (
    "libcudart.so.13",
    "libcuda.so.1",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcurand.so.10",
)
HERE = pathlib.Path(__file__).resolve().parent


def build(directory=None):
    """The directory with the libraries, built if they are absent or older than their source."""
    default = os.environ.get("STANDIN_DIR") or pathlib.Path(tempfile.gettempdir()) / "standin-cuda"
    directory = pathlib.Path(directory or default)
    sources = max((HERE / name).stat().st_mtime for name in ("cuda.c", "blas.c", "build.sh"))
    built = [directory / name for name in LIBRARIES]
    if not all(path.exists() and path.stat().st_mtime > sources for path in built):
        subprocess.run(["sh", str(HERE / "build.sh"), str(directory)], check=True)
    return directory


def why_not():
    """The reason why the stand-in cannot be used here, or None: for pytest.mark.skipif."""
    if not shutil.which(os.environ.get("CC", "gcc")):
        return "no C compiler"
    try:
        import onnxruntime
    except ImportError:
        return "onnxruntime is not installed"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "onnxruntime is not the GPU package"
    from onnxruntime.capi import build_and_package_info

    if not build_and_package_info.cuda_version.startswith("13."):
        return "onnxruntime is not built for CUDA 13"
    return None


def load(directory=None):
    """Load the libraries, so that the CUDA provider finds them by name for any search path."""
    directory = build(directory)
    maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split(None, 5)[5] for line in maps if "/libcudart.so" in line}:
        if not os.path.samefile(path, directory / LIBRARIES[0]):
            raise RuntimeError(f"another CUDA is in this process: {path}")
    loaded = [ctypes.CDLL(str(directory / name), ctypes.RTLD_GLOBAL) for name in LIBRARIES]
    return loaded[0]


def runtime():
    return ctypes.CDLL("libcudart.so.13")


def _text(function):
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = function(buffer, ctypes.c_size_t(size))
        if length < size:
            return buffer.value.decode()
        size = length + 1


def reset():
    runtime().standin_reset()


def counts():
    """Return all counters since the last reset and the live resources, by name."""
    return {
        name: int(value)
        for name, value in map(str.split, _text(runtime().standin_counts).splitlines())
    }


def kernels(demangle=True):
    """How often each kernel was launched (or captured) since the last reset."""
    lines = [line.split(" ", 1) for line in _text(runtime().standin_kernels).splitlines()]
    names = [name for _, name in lines]
    if demangle and names and shutil.which("c++filt"):
        names = subprocess.run(
            ["c++filt"], input="\n".join(names), text=True, capture_output=True
        ).stdout.splitlines()
    result = {}
    for (count, _), name in zip(lines, names, strict=False):
        name = name.replace("(anonymous namespace)::", "")
        result[name] = result.get(name, 0) + int(count)
    return result


@contextlib.contextmanager
def counted():
    """A dictionary that holds, after the block, what it did; live figures are those at its end."""
    reset()
    result = {}
    yield result
    result.update(counts())
