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
@click.option(
    "--golden/--no-golden",
    default=True,
    show_default=True,
    help="Write golden transcripts, which hosts replay: it takes a while and the pair's memory.",
)
def embed(
    bundle: str | None, ks: tuple[int, ...], layout: str, output: Path | None, golden: bool
) -> None:
    """Give a bundle graphs of a round, in place of those it has, for apps without specedge."""
    for path in add_graphs(bundle, output, ks, layout, golden):
        click.echo(one_line(path))


def add_graphs(
    bundle: str | Path | None,
    output: Path | None = None,
    ks: tuple[int, ...] = (),
    layout: str = "auto",
    golden: bool = True,
) -> list[str]:
    """The paths of what was added to a bundle for hosts; a note on stderr if they get no text."""
    from specedge.exporter import embed as run
    from specedge.verification.transcripts import transcripts

    made = run(
        bundle, output, num_draft_tokens=ks, layout=layout, golden=transcripts if golden else None
    )
    assert made.hosts
    if made.hosts.ids_only:
        click.echo(one_line(f"hosts take token ids alone: {made.hosts.ids_only}"), err=True)
    return [str(made.path(file)) for file in made.hosts.files]
