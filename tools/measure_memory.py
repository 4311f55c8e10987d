"""The peak of memory that is predicted for a pair beside the one measured. Development only.

    python tools/measure_memory.py BUNDLE ... [--ops OPS]

For each bundle a new process loads the pair and fills its context, greedily and at temperature 1,
with the prompt read anew in between. Prints a row of docs/measurements.md's table for each. Linux
only.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from specedge.bundle import Bundle
from specedge.runtime.requests.loading import load, memory_of

NEW_TOKENS = 64
HEADER = [
    "| bundle | weights | caches | predicted: opening | running | measured: loaded | at the end "
    "| peak | predicted over measured |",
    "|" + "---|" * 9,
]
MB = 1e6


def fill(bundle: str, ops: str) -> tuple[int, int, int]:
    """Load a pair and fill its context: bytes then, at the end, and at the peak."""
    pipeline = load(bundle, ops=ops)
    loaded = resident("VmRSS")
    prompt = [1] * (pipeline.bundle.context_length - NEW_TOKENS)
    for temperature in (0.0, 1.0):
        pipeline.forget()
        pipeline.generate(prompt, NEW_TOKENS, temperature, seed=1, ignore_eos=True)
    return loaded, resident("VmRSS"), resident("VmHWM")


def resident(name: str) -> int:
    """A figure of this process in bytes: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def row(bundle: Path, ops: str) -> str:
    """A bundle's line of the table."""
    need = memory_of(Bundle.read(bundle), ops)
    command = [sys.executable, __file__, "--one", "--ops", ops, str(bundle)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loaded, end, peak = map(int, said.split())
    weights = need.target.weights + need.draft.weights
    sizes = [weights, need.parts["caches"], need.opening, need.running, loaded, end, peak]
    shown = " | ".join(f"{size / MB:.0f} MB" for size in sizes)
    return f"| {bundle.name} | {shown} | {need.peak / peak:.3f} |"


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--ops", default="auto", show_default=True, help="Run the graphs of this op set.")
@click.option("--one", is_flag=True, hidden=True)
def main(bundles: tuple[Path, ...], ops: str, one: bool) -> None:
    """Print what was predicted and measured of each bundle."""
    if one:
        click.echo(" ".join(map(str, fill(str(bundles[0]), ops))))
        return
    click.echo("\n".join(HEADER))
    for bundle in bundles:
        click.echo(row(bundle, ops))


if __name__ == "__main__":
    main()
