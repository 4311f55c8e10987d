"""`specedge build`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from specedge.cli import options
from specedge.cli.terminal import one_line


@click.command()
@options.bundle
@click.option(
    "--device",
    required=True,
    metavar="TEXT",
    help="Build for this device: rtx or tensorrt, of several GPUs with a number, as in rtx:1.",
)
@click.option(
    "--gpu",
    metavar="TEXT",
    help="Build for this kind of GPU, such as sm89; rtx alone. [default: the one that is here]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Put the engines into a copy of the bundle, made there, for machines with such a GPU.",
)
@options.ops
def build(bundle: str | None, device: str, gpu: str | None, output: Path | None, ops: str) -> None:
    """Build a pair's engines ahead of time for devices that need them."""
    from specedge.runtime.requests import building

    start = time.perf_counter()
    tell = lambda graph: click.echo(one_line(f"building {graph}"), err=True)  # noqa: E731
    for one in building.build(bundle, device, gpu, output, ops, tell):
        took = "is there" if one.seconds is None else f"took {one.seconds:.1f} s"
        click.echo(one_line(f"{one.graph} {took}"), err=True)
        click.echo(one_line(str(one.path)))
    click.echo(f"all in {time.perf_counter() - start:.1f} s", err=True)
