"""`specedge embed`."""

from __future__ import annotations

from pathlib import Path

import click

from specedge.cli import options
from specedge.cli.terminal import one_line


@click.command()
@options.bundle
@click.option(
    "-k",
    "--num-draft-tokens",
    "ks",
    type=click.IntRange(1),
    multiple=True,
    help="Draft this many tokens a round in one graph; may be given repeatedly. [default: the"
    " bundle's own number]",
)
@click.option(
    "--layout",
    type=click.Choice(["auto", "fused", "split"]),
    default="auto",
    show_default=True,
    help="Make a round one graph, or a draft step and the accept rule apart.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Copy the bundle there first, in place of a bundle that is there.",
)
def embed(bundle: str | None, ks: tuple[int, ...], layout: str, output: Path | None) -> None:
    """Give a bundle graphs of a round, in place of those it has, for apps without specedge."""
    from specedge.exporter import embed as run

    made = run(bundle, output, num_draft_tokens=ks, layout=layout)
    for graph in made.hosts:
        click.echo(one_line(str(made.path(graph.file))))
