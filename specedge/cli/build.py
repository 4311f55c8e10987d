"""Command `specedge build`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from specedge.cli import options
from specedge.cli.terminal import sanitize_line


@click.command()
@options.bundle
@click.option(
    "--device",
    required=True,
    metavar="TEXT",
    help="Device: rtx or tensorrt, with an optional GPU number, such as rtx:1.",
)
@click.option(
    "--gpu",
    metavar="TEXT",
    help="GPU architecture, such as sm89; rtx only.  [default: that of this machine's GPU]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Copy the bundle to this folder and add the engines, for other machines.",
)
@options.ops
def build(bundle: str | None, device: str, gpu: str | None, output: Path | None, ops: str) -> None:
    """Build TensorRT engines of a bundle ahead of time."""
    from specedge.runtime.backend.cuda import engine_builder

    start = time.perf_counter()
    report = lambda graph: click.echo(sanitize_line(f"building {graph}"), err=True)  # noqa: E731
    for engine in engine_builder.build_engines(bundle, device, gpu, output, ops, report):
        status = "exists" if engine.seconds is None else f"took {engine.seconds:.1f} s"
        click.echo(sanitize_line(f"{engine.graph} {status}"), err=True)
        click.echo(sanitize_line(str(engine.path)))
    click.echo(f"total {time.perf_counter() - start:.1f} s", err=True)
