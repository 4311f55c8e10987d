"""Scores in the graph beside scores in NumPy. Development only.

    python tools/measure_scores.py [--rows 5]

Microseconds for so many rows of logits, the least and the median of many turns: the largest, as
at temperature 0, and the 20 largest, as with top-k. NumPy is what the runtime does. The graphs have
one node and bound inputs and outputs, two threads; the call of a session, which a node behind a
decoder would not cost, takes 3 of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import click
import numpy as np
import onnx.parser
import onnxruntime as ort
from onnx import helper

from specedge.runtime.sampling.scores import Scores

TOP = 20
VOCABULARIES = (32_000, 50_257, 128_256)
TURNS = 400


def graph(name: str) -> onnx.ModelProto:
    """One way to score logits [n, V]."""
    made = onnx.parser.parse_graph(
        {
            "argmax": """argmax (float[N, V] logits) => (int64[N] ids) {
                ids = ArgMax <axis = 1, keepdims = 0> (logits)
            }""",
            "top-k": """top (float[N, V] logits) => (float[N, K] values, int64[N, K] ids) {
                k = Constant <value_ints = [20]> ()
                values, ids = TopK <axis = 1> (logits, k)
            }""",
        }[name]
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def in_numpy(logits: np.ndarray, count: int) -> Callable[[], object]:
    scores = Scores(logits)
    return lambda: [scores[row].largest(count) for row in range(len(logits))]


def in_graph(name: str, logits: np.ndarray) -> Callable[[], object]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    model = graph(name).SerializeToString()
    session = ort.InferenceSession(model, options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_ortvalue_input("logits", ort.OrtValue.ortvalue_from_numpy(logits))
    for value in session.get_outputs():
        binding.bind_output(value.name)
    return lambda: session.run_with_iobinding(binding)


@click.command()
@click.option("--rows", default=5, show_default=True)
def main(rows: int) -> None:
    """Measure and print a table."""
    click.echo("| vocabulary | | NumPy | graph |\n|---|---|---|---|")
    for size in VOCABULARIES:
        logits = 3 * np.random.default_rng(0).standard_normal((rows, size), np.float32)
        for name, count in (("argmax", 1), ("top-k", TOP)):
            ways = {"NumPy": in_numpy(logits, count), "graph": in_graph(name, logits)}
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(TURNS):
                for way, call in ways.items():
                    begin = time.perf_counter()
                    call()
                    times[way].append(1e6 * (time.perf_counter() - begin))
            shown = " | ".join(f"{min(took):.0f} ({median(took):.0f})" for took in times.values())
            click.echo(f"| {size} | {name} | {shown} |")


if __name__ == "__main__":
    main()
