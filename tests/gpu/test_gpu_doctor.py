"""`specedge doctor` with the stand-in CUDA and with missing or broken libraries."""

import ctypes
import json
import os
import subprocess

import pytest
import standin

from gpu.conftest import COMPILE
from installed import run

if reason := standin.why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture
def some(libraries, tmp_path):
    """A folder with these libraries, of which a test may change some."""
    folder = tmp_path / "some"
    folder.mkdir()
    for path in libraries.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    return folder


def diagnosis(folder, device="cuda", **variables):
    result = run("doctor", "--json", "--device", device, LD_LIBRARY_PATH=str(folder), **variables)
    assert result.returncode == 1  # no device of a stand-in works
    return json.loads(result.stdout)


def reasons(*arguments, device="cuda", **variables):
    return diagnosis(*arguments, device=device, **variables)["devices"][device]["reasons"]


def is_here(library):
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def test_provider_with_wrong_results_is_reported_as_not_working(libraries):
    found = diagnosis(libraries)
    (reason,) = found["devices"]["cuda"]["reasons"]
    assert reason["what"].startswith("its results are wrong: 60 of 128 numbers: y[0, 0] is 0,")
    assert found["driver"]["version"] == "580.95.05"
    assert found["driver"]["cuda"] == "13.0"
    (gpu,) = found["driver"]["gpus"]
    assert gpu["name"] == "Stand-in 0"
    assert gpu["capability"] == [9, 0]
    assert (gpu["memory"], gpu["free"]) == (80 << 30, 20 << 30)


def test_text_names_the_driver_and_the_gpu(libraries):
    text = run("doctor", "--device", "cuda", LD_LIBRARY_PATH=str(libraries)).stdout
    assert "NVIDIA driver    580.95.05, supports CUDA 13.0\n" in text
    assert "GPU              Stand-in 0, compute capability 9.0, 85.9 GB, 21.5 GB free\n" in text


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ({"STANDIN_DEVICES": "0"}, "the NVIDIA driver shows no GPU"),
        ({"STANDIN_DRIVER": "12040"}, "the NVIDIA driver 580.95.05 supports CUDA 12.4, and"),
        (
            {"STANDIN_INIT": "804"},
            "does not respond: cuInit gave error 804 (forward compatibility)",
        ),
        ({"STANDIN_DRIVER_CRASHES": "1"}, "does not respond: ended by signal 6 (SIGABRT)"),
        ({"STANDIN_MEMORY_MB": "0"}, "the GPU is out of memory (Exception during initialization"),
    ],
)
def test_missing_gpu_components_are_reported(libraries, setting, what):
    assert what in reasons(libraries, **setting)[0]["what"]


@pytest.mark.skipif(is_here("libcublasLt.so.13"), reason="cuBLAS is installed")
def test_missing_library_finding_names_its_package(some):
    (some / "libcublasLt.so.13").unlink()
    (some / "libcublas.so.13").unlink()
    (reason,) = reasons(some)
    assert "libcublasLt.so.13 (not found)" in reason["what"]
    assert reason["fix"] == 'pip install "nvidia-cublas~=13.0"'


def test_a_broken_library_is_named(some):
    (some / "libcurand.so.10").unlink()
    (some / "libcurand.so.10").touch()
    (reason,) = reasons(some)
    assert "libcurand.so.10 (file too short)" in reason["what"]
    assert reason["fix"] == 'pip install "nvidia-curand~=10.0"'


def test_missing_transitive_library_is_named(some, tmp_path):
    path, source = some / "libcurand.so.10", ["-x", "c", os.devnull]
    path.unlink()
    for out, more in ((tmp_path / "libdeep.so", ["-Wl,-soname,libdeep.so.1"]), (path, [])):
        subprocess.run([*COMPILE, str(out), "-Wl,--no-as-needed", *more, *source], check=True)
        source += ["-x", "none", str(out)]
    (reason,) = reasons(some)
    assert reason == {"what": "a library cannot be loaded: libdeep.so.1 (not found)", "fix": None}


def test_library_crashing_at_load_is_a_finding(some):
    path = some / "libcurand.so.10"
    path.unlink()
    code = "#include <stdlib.h>\n__attribute__((constructor)) static void f(void) { abort(); }"
    subprocess.run([*COMPILE, str(path), "-x", "c", "-"], input=code, text=True, check=True)
    (reason,) = reasons(some)
    message = "its test process failed: ended by signal 6 (SIGABRT) while loading libraries"
    assert reason["what"] == message
