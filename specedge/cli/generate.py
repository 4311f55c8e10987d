"""`specedge generate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options, trace

if TYPE_CHECKING:
    from specedge.runtime.pipeline import Generation, Stream


@click.command()
@click.argument("prompt")
@options.bundle
@options.request
@click.option("--chat", is_flag=True, help="PROMPT is a question; ask it by the chat template.")
@click.option("--system", metavar="TEXT", help="With --chat, a system message before it.")
@click.option("--trace", "traced", is_flag=True, help="Mark what became of each token.")
@options.threads
@options.ops
@options.as_json
def generate(
    prompt: str,
    bundle: str | None,
    chat: bool,
    system: str | None,
    traced: bool,
    threads: int | None,
    ops: str,
    as_json: bool,
    **request: Any,
) -> None:
    """Continue PROMPT with the target's own tokens; `-` reads it from standard input."""
    from specedge.runtime.loading import load

    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    pipeline = load(bundle, threads=threads, ops=ops)
    text = options.read_prompt(prompt)
    with options.usage_errors():
        if chat:
            text = text.removesuffix("\n") if prompt == "-" else text  # the shell's, not the user's
            stream = pipeline.stream_chat(options.messages(text, system), **request)
        else:
            stream = pipeline.stream(text, **request)
    try:
        _print(stream, traced, as_json)
    finally:
        click.echo(_summary(stream.generation, bool(request["temperature"])), err=True)


def _print(stream: Stream, traced: bool, as_json: bool) -> None:
    """Print pieces as they come; also on Ctrl-C, what there is ends with a new line."""
    colours = trace.coloured()
    if traced and not as_json:
        click.echo(trace.legend(stream.generation.num_draft_tokens, colours), err=True)
    try:
        for piece in stream.traced():
            if traced and not as_json:
                click.echo(trace.marked(piece, colours), nl=False, color=colours)
            elif not as_json:
                click.echo("".join(span.text for span in piece), nl=False)
    finally:
        click.echo(_as_json(stream.generation, traced) if as_json else "")


def _as_json(generation: Generation, traced: bool) -> str:
    from specedge.runtime.stats import as_dict

    hidden = {"rounds"} if traced else {"rounds", "spans"}
    fields = {name: value for name, value in vars(generation).items() if name not in hidden}
    fields["stats"] = as_dict(generation.stats)
    if traced:
        fields["spans"] = [vars(span) for span in generation.spans]
    return json.dumps(fields, ensure_ascii=False, indent=1)


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
