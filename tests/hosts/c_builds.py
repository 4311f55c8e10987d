"""The C host's program: built with what can be had, and run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hosting import host_tools, libraries

SOURCES = Path(__file__).parents[2] / "hosts" / "c"
LIBRARIES = ("-ljansson", "-lcrypto", "-ldl")
LIBRARY = ("specedge_host.c", "bundle.c", "utf8.c")


def compile_host(output, *options, sources=()):
    """The host's program, or one of `sources` and the host without its command line."""
    tools = host_tools("include/onnxruntime_c_api.h", "lib/libortextensions.so")
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler; install gcc")
    needed = "#include <jansson.h>\n#include <openssl/evp.h>\nint main(void) { return 0; }\n"
    given = {"input": needed, "text": True, "capture_output": True}
    tried = subprocess.run(["cc", *options, "-xc", "-", *LIBRARIES, "-o", output], **given)
    if tried.returncode:
        pytest.skip(f"cc {' '.join(options)} lacks a library of the host: {tried.stderr.strip()}")
    parts = [p for p in SOURCES.glob("*.c") if not sources or p.name in LIBRARY]
    command = ["cc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *options]
    command += ["-I", tools / "include", "-I", SOURCES, *parts, *sources, *LIBRARIES, "-o", output]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def run(program, *arguments, **variables):
    environment = libraries() | {"ASAN_OPTIONS": "exitcode=23"} | variables
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
