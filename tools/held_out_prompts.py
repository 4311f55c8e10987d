"""Prompts that neither model of the embedded pair was trained on. Development only.

    python tools/held_out_prompts.py > held_out.jsonl
    specedge bench --prompts held_out.jsonl

The same as measure_pair.py's, as text.
"""

from __future__ import annotations

import json

import click

from measure_pair import prompts
from specedge import load


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--prompts", "count", default=40, show_default=True)
def main(bundle: str | None, count: int) -> None:
    """Print a line of JSON for each prompt."""
    pipeline = load(bundle)
    for tokens in prompts(pipeline, count):
        click.echo(json.dumps({"prompt": pipeline.tokenizer.decode(tokens)}))


if __name__ == "__main__":
    main()
