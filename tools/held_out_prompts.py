"""Prompts that neither model of the embedded pair was trained on. Development only.

    python tools/held_out_prompts.py > held_out.jsonl
    specedge bench --prompts held_out.jsonl

Two places of each held-out module, one after the other, so that both halves of what `bench`
predicts from and for have the same modules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
from tokenizers import Tokenizer

from corpus import held_out, library_files
from measure_pair import PROMPT_LENGTH
from specedge import load

PLACES = (1 / 3, 2 / 3)


def held_out_prompts(tokenizer: Tokenizer, num_modules: int) -> Iterator[str]:
    """Two for each module."""
    for name, text in library_files():
        tokens = tokenizer.encode(text).ids if held_out(name) else []
        if num_modules and len(tokens) >= 4 * PROMPT_LENGTH:
            num_modules -= 1
            for place in PLACES:
                end = int(place * len(tokens))
                yield tokenizer.decode(tokens[end - PROMPT_LENGTH : end])


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--modules", "count", default=40, show_default=True)
def main(bundle: str | None, count: int) -> None:
    """Print a line of JSON for each prompt."""
    for prompt in held_out_prompts(load(bundle).tokenizer, count):
        click.echo(json.dumps({"prompt": prompt}))


if __name__ == "__main__":
    main()
