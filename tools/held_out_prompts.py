"""Prompts that neither model of the embedded pair was trained on. Development only.

    python tools/held_out_prompts.py > held_out.jsonl
    specedge bench --prompts held_out.jsonl

Two places of each held-out module, one after the other, so that both halves of what `bench`
predicts from and for have the same modules.
"""

from __future__ import annotations

import json

import click

from corpus import held_out, library_files
from measure_pair import PROMPT_LENGTH
from specedge import load

PLACES = (1 / 3, 2 / 3)


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--modules", "count", default=40, show_default=True)
def main(bundle: str | None, count: int) -> None:
    """Print a line of JSON for each prompt."""
    tokenizer = load(bundle).tokenizer
    for name, text in library_files():
        tokens = tokenizer.encode(text).ids if held_out(name) else []
        if count and len(tokens) >= 4 * PROMPT_LENGTH:
            count -= 1
            for place in PLACES:
                end = int(place * len(tokens))
                prompt = tokenizer.decode(tokens[end - PROMPT_LENGTH : end])
                click.echo(json.dumps({"prompt": prompt}))


if __name__ == "__main__":
    main()
