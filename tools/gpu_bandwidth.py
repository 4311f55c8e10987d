"""Bytes a second that a device reads and writes, by an addition of two arrays. Development only.

    python tools/gpu_bandwidth.py DEVICE

In a process of its own, whose end gives the arrays back.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from specedge.runtime.backend.ort import inference_session, onnxruntime

COPIED = 1 << 28  # numbers of float32: 1 GiB
REPEATS = 10


def bandwidth(device: str) -> float:
    """What a new process measures."""
    command = [sys.executable, str(Path(__file__)), device]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise click.ClickException(
            f"the bandwidth of {device}: {said[-1] if said else 'no answer'}"
        )
    return float(done.stdout.splitlines()[-1])  # ONNX Runtime prints what it does not find


def measured(device: str, size: int) -> float:
    """The same in this process, by arrays of so many numbers; no other device does it."""
    ort, (kind, _, number) = onnxruntime(), device.partition(":")
    index = int(number or 0)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    providers: list[Any] = ["CPUExecutionProvider"]
    if kind != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        providers = [("CUDAExecutionProvider", {"device_id": str(index)})]
        ort.preload_dlls(cudnn=False)
    session = inference_session(_addition(size), options, providers)
    binding, where = session.io_binding(), "cpu" if kind == "cpu" else "cuda"
    make = ort.OrtValue.ortvalue_from_shape_and_type
    x, y = (make([size], np.float32, where, index) for _ in range(2))
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    times = []
    for _ in range(REPEATS + 1):  # the first allocates
        begin = time.perf_counter()
        session.run_with_iobinding(binding)
        times.append(time.perf_counter() - begin)
    return 8 * size / min(times[1:])  # 4 bytes are read and 4 written


def _addition(size: int) -> bytes:
    from onnx import TensorProto, helper

    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [size]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", info[:1], info[1:])
    opsets = [helper.make_opsetid("", 21)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())


if __name__ == "__main__":
    print(measured(sys.argv[1], COPIED if sys.argv[1] != "cpu" else COPIED >> 4))
