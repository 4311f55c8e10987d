"""Command `specedge ngram build`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click

from specedge.cli import options
from specedge.cli.panics import hidden_panics
from specedge.errors import PromptError


@click.group()
def ngram() -> None:
    """Build n-gram tables for drafting."""


@ngram.command()
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True)
@click.option("--output", metavar="FILE", required=True, help="Output file.")
@click.option("--overwrite", is_flag=True, help="Replace the output file.")
@click.option(
    "--order",
    type=click.IntRange(1, 3),
    default=3,
    show_default=True,
    help="Maximum order of the n-grams: 1 (unigrams) to 3 (trigrams).",
)
@options.request_option("special_tokens")
@options.bundle
def build(
    texts: tuple[str, ...],
    output: str,
    overwrite: bool,
    order: int,
    special_tokens: bool,
    bundle: str | None,
) -> None:
    """Count the n-grams of text files.

    The files are tokenized by a bundle's tokenizer; `-` is standard input.
    """
    options.check_output(output, texts, overwrite)
    if os.path.exists(output) and not os.path.isfile(output):
        raise click.UsageError(f"{output} is not a regular file; specify another for --output")
    read = {name: options.read_text(name) for name in texts}
    from specedge.bundle import Bundle, store
    from specedge.runtime.drafters import ngram_files, ngrams
    from specedge.runtime.text.special_tokens import SpecialTokens
    from specedge.runtime.text.tokenizer import encode, load_tokenizer

    manifest = Bundle.read(store.find_bundle(bundle))
    with hidden_panics():
        tokenizer = load_tokenizer(manifest)
    as_text = SpecialTokens(tokenizer).encode_text
    to_tokens = partial(encode, tokenizer) if special_tokens else as_text

    def tokens_of(name: str) -> list[int]:
        try:
            return to_tokens(read[name], add_special_tokens=False)
        except PromptError as error:
            raise PromptError(f"{name}: {error}") from error

    with options.usage_errors():
        tables = ngrams.count(map(tokens_of, read), manifest.target.vocab_size, order)
    ngram_files.write(tables, manifest, Path(output))
    sizes = (tables.unigrams, tables.pair_counts, tables.triple_counts)
    click.echo(
        f"{int(tables.unigrams.sum(dtype=int)):,} tokens: {(sizes[0] > 0).sum():,} distinct, "
        f"{len(sizes[1]):,} pairs, {len(sizes[2]):,} triples; "
        f"{os.path.getsize(output) / 1e6:.1f} MB in {output}",
        err=True,
    )
