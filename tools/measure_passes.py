"""What passes of T tokens take, beside reading the weights, and on what. Development only.

    python tools/measure_passes.py BUNDLE [BUNDLE ...] [--role target] [--threads N] [--unsigned]
        [--ops NAME ...] [--past N]

Milliseconds are the least and the median of passes over a cache of 100 tokens, or of `--past`;
bundles, op sets and T all in turn. The bound is the weights' bytes at the bandwidth that as many
threads reach here, adding up arrays. The shares are of kernels' time in a profile of their own,
whose clock costs each node some microseconds: they name what is worth a look, not seconds.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np
import onnxruntime as ort

from specedge import int8_products
from specedge.bundle import Bundle
from specedge.bundle.manifest import ModelEntry
from specedge.cpu_count import cpu_count
from specedge.runtime.backend.model_session import choose_ops
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

LENGTHS = (*range(1, 10), 96)
ARRAY = 200_000_000  # bytes each thread adds up
KINDS = {
    "matrices": (
        *("MatMul", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "Gemm"),
        "FusedMatMul",
    ),
    "attention": ("GroupQueryAttention", "Attention", "Softmax"),
}


def bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read."""
    arrays = [np.ones(ARRAY // 8) for _ in range(threads)]
    best = float("inf")
    for _ in range(10):
        workers = [threading.Thread(target=array.sum) for array in arrays]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - begin)
    return threads * ARRAY / best


def timed(
    models: dict[str, OrtModel], repeats: int, past: int
) -> dict[tuple[str, int], list[float]]:
    """Seconds of passes, all in turn."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for model in models.values():
        model.prefill([0] * past)
    for i in range(repeats + 1):
        for name, model in models.items():
            for length in LENGTHS:
                begin = time.perf_counter()
                model.forward([0] * length)
                took = time.perf_counter() - begin
                model.truncate(past)
                if i:  # the first binds buffers
                    found[name, length].append(took)
    return found


def shares(
    bundle: Bundle, model: ModelEntry, ops: str, length: int, device: Device, past: int
) -> dict[str, float]:
    """The share of each kind of kernel in a decoder's pass of T tokens, over caches in place."""
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
                array[:] = past
            value = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(tensor.name, value)
            values[tensor.buffer] = value
        for tensor in signature.outputs:
            if tensor.role == "cache":
                binding.bind_ortvalue_output(tensor.name, values[tensor.buffer])
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
    for (_, op), took in nodes.items():
        kind = next((kind for kind, ops in KINDS.items() if op in ops), "small nodes")
        total[kind] += min(took)
    return {kind: total[kind] / total.total() for kind in (*KINDS, "small nodes")}


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--role", type=click.Choice(["target", "draft"]), default="target")
@click.option("--threads", type=int, default=cpu_count(), show_default=True)
@click.option("--repeats", default=20, show_default=True)
@click.option("--unsigned", is_flag=True, help="Multiply unsigned bytes, as AVX2 alone needs.")
@click.option("--ops", multiple=True, help="Op sets, in turn. [default: what the CPU takes]")
@click.option("--past", default=100, show_default=True, help="Tokens in the cache.")
def main(
    folders: tuple[Path, ...],
    role: str,
    threads: int,
    repeats: int,
    unsigned: bool,
    ops: tuple[str, ...],
    past: int,
) -> None:
    """Measure and print three tables."""
    opened = {folder.name: Bundle.read(folder) for folder in folders}
    device = Device("cpu", threads, unsigned=unsigned)
    bundles, models = {}, {}
    for bundle_name, bundle in opened.items():
        model = bundle.models[role]
        for one in ops or (choose_ops(model),):
            name = " ".join((bundle_name, *([one] if ops else [])))
            bundles[name], models[name] = bundle, OrtModel(bundle, model, device, one)
    speed = bandwidth(threads)
    found = timed(models, repeats, past)
    click.echo(f"{role}, {threads} threads, {speed / 1e9:.1f} GB/s, ONNX Runtime {ort.__version__}")
    click.echo("| bundle | weights | bound | " + " | ".join(f"T={t}" for t in LENGTHS) + " | v |")
    click.echo("|---" * (len(LENGTHS) + 4) + "|")
    for name, bundle in bundles.items():
        size = bundle.files[bundle.models[role].weights].size
        cells = [
            f"{1e3 * min(found[name, t]):.1f} ({1e3 * median(found[name, t]):.1f})" for t in LENGTHS
        ]
        v = min(found[name, 5]) / min(found[name, 1])
        bound = f"{1e3 * size / speed:.1f}"
        click.echo(f"| {name} | {size / 1e6:.0f} MB | {bound} | {' | '.join(cells)} | {v:.2f} |")
    click.echo(
        "\n| bundle | T | " + " | ".join((*KINDS, "small nodes")) + " |\n" + "|---" * 5 + "|"
    )
    for name, bundle in bundles.items():
        for length in (1, 5):
            model, one = bundle.models[role], models[name].ops
            parts = shares(bundle, model, one, length, device, past)
            shown = " | ".join(f"{share:.0%}" for share in parts.values())
            click.echo(f"| {name} | {length} | {shown} |")


if __name__ == "__main__":
    main()
