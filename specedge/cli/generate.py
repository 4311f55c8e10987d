"""`specedge generate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options

if TYPE_CHECKING:
    from specedge.runtime.pipeline import Generation, Stream


@click.command()
@click.argument("prompt")
@options.bundle
@options.request
@options.threads
@options.ops
@options.as_json
def generate(
    prompt: str, bundle: str | None, threads: int | None, ops: str, as_json: bool, **request: Any
) -> None:
    """Continue PROMPT with the target's own tokens; `-` reads it from standard input."""
    from specedge.runtime.loading import load

    pipeline = load(bundle, threads=threads, ops=ops)
    with options.usage_errors():
        stream = pipeline.stream(options.read_prompt(prompt), **request)
    try:
        _print(stream, as_json)
    finally:
        click.echo(_summary(stream.generation, bool(request["temperature"])), err=True)


def _print(stream: Stream, as_json: bool) -> None:
    """Print pieces as they come; also on Ctrl-C, what there is ends with a new line."""
    try:
        for piece in stream:
            if not as_json:
                click.echo(piece, nl=False)
    finally:
        click.echo(_as_json(stream.generation) if as_json else "")


def _as_json(generation: Generation) -> str:
    from specedge.runtime.stats import as_dict

    fields = {name: value for name, value in vars(generation).items() if name != "rounds"}
    return json.dumps(fields | {"stats": as_dict(generation.stats)}, ensure_ascii=False, indent=1)


def _summary(generation: Generation, sampled: bool) -> str:
    stats = generation.stats
    seconds = stats.decode_seconds + stats.prefill_seconds
    parts = [
        f"{stats.num_new_tokens} tokens in {seconds:.2f} s ({generation.finish_reason})",
        f"K = {generation.num_draft_tokens}",
    ]
    if stats.tokens_per_round is not None:
        parts.append(f"{stats.tokens_per_round:.2f} tokens a round")
    if stats.accepted_over_tested is not None:
        parts.append(f"{stats.accepted_over_tested:.0%} of tested draft tokens accepted")
    if sampled:
        parts.append(f"seed {generation.seed}")
    return ", ".join(parts)
