"""Measure the memory of loaded bundles. Linux only.

    python tools/measure_memory.py BUNDLE ... [--ops OPS]

A new process loads each bundle and fills its context, greedily and at temperature 1; its peak is
compared with the peak estimate.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from harness import MB, process_memory, table_header, table_row
from specedge.bundle import Bundle
from specedge.runtime.requests.loader import load, memory_of

NEW_TOKENS = 64
BUNDLE_COLUMNS = (
    *("bundle", "weights", "caches", "predicted: opening", "running"),
    *("measured: loaded", "at the end", "peak", "predicted over measured"),
)


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--ops", default="auto", show_default=True, help="Graph variant to run.")
@click.option("--fill", is_flag=True, hidden=True)
def main(bundles: tuple[Path, ...], ops: str, fill: bool) -> None:
    """Compare the predicted and the measured peak of each bundle."""
    if fill:
        click.echo(" ".join(map(str, fill_context(bundles[0], ops))))
        return
    click.echo(table_header(*BUNDLE_COLUMNS))
    for bundle in bundles:
        need = memory_of(Bundle.read(bundle), ops)
        command = [sys.executable, __file__, "--fill", "--ops", ops, str(bundle)]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        measured = list(map(int, output.split()))
        weights = sum(model.weights for model in need.models)
        sizes = [weights, need.parts["caches"], need.opening, need.running, *measured]
        cells = [f"{size / MB:.0f} MB" for size in sizes]
        click.echo(table_row(bundle.name, *cells, f"{need.peak / measured[-1]:.3f}"))


def fill_context(bundle: Path, ops: str) -> tuple[int, int, int]:
    """Load a bundle and fill its context; return the bytes after loading, at the end, and peak."""
    pipeline = load(bundle, ops=ops)
    loaded = process_memory("VmRSS")
    prompt = [1] * (pipeline.bundle.context_length - NEW_TOKENS)
    for temperature in (0.0, 1.0):
        pipeline.forget()
        pipeline.generate(prompt, NEW_TOKENS, temperature, seed=1, ignore_eos=True)
    return loaded, process_memory("VmRSS"), process_memory("VmHWM")


if __name__ == "__main__":
    main()
