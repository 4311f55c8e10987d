"""Command `specedge embed`."""

from __future__ import annotations

from pathlib import Path

import click

from specedge.cli import options
from specedge.cli.terminal import sanitize_line


@click.command()
@options.bundle
@click.option(
    "-k",
    "--num-draft-tokens",
    "ks",
    type=click.IntRange(1),
    multiple=True,
    help="Draft tokens per round of a graph; may be repeated.  [default: the bundle's]",
)
@click.option(
    "--layout",
    type=click.Choice(["auto", "fused", "split"]),
    default="auto",
    show_default=True,
    help="One graph per round (fused), or separate draft and accept graphs (split).",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Copy the bundle to this folder first, replacing an existing bundle.",
)
@click.option(
    "--golden/--no-golden",
    default=True,
    show_default=True,
    help="Write conformance vectors for hosts.",
)
def embed(
    bundle: str | None, ks: tuple[int, ...], layout: str, output: Path | None, golden: bool
) -> None:
    """Add host graphs to a bundle.

    Host graphs let applications run a bundle with ONNX Runtime alone: they contain a complete round
    of speculative decoding and the tokenizer. Existing host graphs are replaced.
    """
    for path in add_graphs(bundle, output, ks, layout, golden):
        click.echo(sanitize_line(path))


def add_graphs(
    bundle: str | Path | None,
    output: Path | None = None,
    ks: tuple[int, ...] = (),
    layout: str = "auto",
    golden: bool = True,
) -> list[str]:
    """Add host graphs to a bundle and return their paths."""
    from specedge.exporter import embed as run
    from specedge.verification.transcripts import transcripts

    updated = run(
        bundle, output, num_draft_tokens=ks, layout=layout, golden=transcripts if golden else None
    )
    assert updated.hosts
    if updated.hosts.ids_only:
        click.echo(
            sanitize_line(
                f"no tokenizer graphs, hosts must use token ids: {updated.hosts.ids_only}"
            ),
            err=True,
        )
    return [str(updated.path(file)) for file in updated.hosts.files]
