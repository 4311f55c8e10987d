"""How long a pass takes in each op set, by tokens in it and rows in the cache. Development only.

    python tools/measure_ops.py [--bundle FOLDER]

Passes of the op sets take turns. The figure is the minimum over repeats: other programs only add.
"""

from __future__ import annotations

import time

import click

from specedge import load

FILLS = (0.05, 0.25, 0.5, 0.95)  # of the context
LENGTHS = (1, 2, 5, 32)


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--repeats", default=40, show_default=True, help="Passes of each kind.")
def main(bundle: str | None, repeats: int) -> None:
    """Print the milliseconds of a pass with `onnx` and `gqa`, and their ratio."""
    pipelines = {ops: load(bundle, ops=ops) for ops in ("onnx", "gqa")}
    for role in ("target", "draft"):
        models = {ops: getattr(pipeline, role) for ops, pipeline in pipelines.items()}
        context = getattr(pipelines["gqa"].bundle, role).context_length
        click.echo(f"{role}: tokens, rows before them, onnx ms, gqa ms, onnx / gqa")
        for fill in FILLS:
            start = int(fill * (context - max(LENGTHS)))
            for model in models.values():
                model.truncate(0)
                model.prefill([1] * start)
            for length in LENGTHS:
                best = dict.fromkeys(models, float("inf"))
                for _ in range(repeats):
                    for ops, model in models.items():
                        began = time.perf_counter()
                        model.forward([1] * length)
                        best[ops] = min(best[ops], time.perf_counter() - began)
                        model.truncate(start)
                a, b = 1e3 * best["onnx"], 1e3 * best["gqa"]
                click.echo(f"| {length} | {start} | {a:.3f} | {b:.3f} | {a / b:.2f} |")


if __name__ == "__main__":
    main()
