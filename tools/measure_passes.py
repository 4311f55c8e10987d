"""Measure passes of T tokens relative to the memory bandwidth, and the share of each kernel.

    python tools/measure_passes.py BUNDLE [BUNDLE ...] [--threads N] [--ops NAME ...]

Milliseconds are the minimum and the median of passes of the target after 100 cached tokens;
bundles, graph variants and T alternate. The bound is the time to read the weights at the memory
bandwidth of the same number of threads. Shares of kernel time are from a separate profile, which
adds a few microseconds to each node.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np
import onnxruntime as ort

from harness import MB, memory_bandwidth, table_header, table_row
from specedge import int8_products
from specedge.bundle import Bundle
from specedge.cpu_count import cpu_count
from specedge.runtime.backend.model_session import choose_ops
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.self_test import exact_device
from specedge.runtime.backend.sessions import Device

LENGTHS = (*range(1, 10), 96)
REPEATS = 20  # passes of each length
PAST = 100  # cached tokens
MATRICES = ("MatMul", "FusedMatMul", "Gemm")
KERNELS = {
    "matrices": (*MATRICES, "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits"),
    "attention": ("GroupQueryAttention", "Attention", "Softmax"),
    "small nodes": (),
}


def pass_seconds(models: dict[str, OrtModel]) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of alternating passes by model and length."""
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for model in models.values():
        model.prefill([0] * PAST)
    for i in range(REPEATS + 1):
        for name, model in models.items():
            for length in LENGTHS:
                start = time.perf_counter()
                model.forward([0] * length)
                elapsed = time.perf_counter() - start
                model.truncate(PAST)
                if i:  # the first binds buffers
                    seconds[name, length].append(elapsed)
    return seconds


def kernel_shares(bundle: Bundle, ops: str, length: int, device: Device) -> dict[str, float]:
    """Return the share of each group of kernels in a decoder pass with in-place caches."""
    model = bundle.target
    entry = model.graph("decoder", ops)
    signature = model.signatures[entry.signature]
    options = ort.SessionOptions()
    options.intra_op_num_threads = device.threads or 0
    options.enable_profiling = True
    if device.unsigned:
        options.add_session_config_entry(int8_products.UNSIGNED_OPTION, "1")
    with TemporaryDirectory() as folder:
        options.profile_file_prefix = os.path.join(folder, "profile")
        session = ort.InferenceSession(bundle.path(entry.file), options, ["CPUExecutionProvider"])
        binding = session.io_binding()
        values = {}
        for tensor in signature.inputs:
            array = np.zeros(tensor.at(1, length, length), tensor.dtype)
            if tensor.role == "past_length":
                array[:] = PAST
            values[tensor.state] = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(tensor.name, values[tensor.state])
        for tensor in signature.outputs:
            if tensor.role == "state":
                binding.bind_ortvalue_output(tensor.name, values[tensor.state])
            else:
                binding.bind_output(tensor.name)
        for _ in range(8):
            session.run_with_iobinding(binding)
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    nodes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            nodes[event["name"], event["args"]["op_name"]].append(event["dur"])
    total: Counter[str] = Counter()
    for (_, op_type), durations in nodes.items():
        group = next((group for group, ops in KERNELS.items() if op_type in ops), "small nodes")
        total[group] += min(durations)
    return {group: total[group] / total.total() for group in KERNELS}


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--threads", type=int, default=cpu_count(), show_default=True)
@click.option("--ops", multiple=True, help="Graph variants to compare. [default: the CPU's]")
def main(folders: tuple[Path, ...], threads: int, ops: tuple[str, ...]) -> None:
    """Measure passes of bundles and print two tables."""
    bundles, models, devices = {}, {}, {}
    for folder in folders:
        bundle = Bundle.read(folder)
        device = exact_device([bundle.target], Device("cpu", threads))
        model = bundle.target
        for name in ops or (choose_ops(model),):
            label = f"{folder.name} {name}" if ops else folder.name
            bundles[label], devices[label] = bundle, device
            models[label] = OrtModel(bundle, model, device, name)
    bandwidth = memory_bandwidth(threads)
    seconds = pass_seconds(models)
    click.echo(f"{threads} threads, {bandwidth / 1e9:.1f} GB/s, ORT {ort.__version__}; ms")
    click.echo(table_header("bundle", "weights", "bound", *(f"T={t}" for t in LENGTHS), "v"))
    for label, bundle in bundles.items():
        size = bundle.files[bundle.target.weights].size
        times = [seconds[label, length] for length in LENGTHS]
        cells = [f"{1e3 * min(some):.1f} ({1e3 * median(some):.1f})" for some in times]
        verify_cost = f"{min(seconds[label, 5]) / min(seconds[label, 1]):.2f}"
        bound = f"{1e3 * size / bandwidth:.1f}"
        click.echo(table_row(label, f"{size / MB:.0f} MB", bound, *cells, verify_cost))
    click.echo("\n" + table_header("bundle", "T", *KERNELS))
    for label, bundle in bundles.items():
        for length in (1, 5):
            shares = kernel_shares(bundle, models[label].ops, length, devices[label])
            click.echo(table_row(label, length, *(f"{share:.0%}" for share in shares.values())))


if __name__ == "__main__":
    main()
