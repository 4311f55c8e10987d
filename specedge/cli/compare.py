"""`specedge compare`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import near_ties, options
from specedge.cli.terminal import counted, lines

if TYPE_CHECKING:
    from specedge.benchmarks.comparison import Comparison


@click.command()
@click.argument("prompt")
@options.bundle
@options.request
@click.option(
    "--repeats", type=click.IntRange(1), default=5, show_default=True, help="Time each this often."
)
@click.option("--chat", is_flag=True, help="PROMPT is a question; ask it by the chat template.")
@click.option("--system", metavar="TEXT", help="With --chat, a system message before it.")
@options.device
@options.draft_device
@options.threads
@options.ops
@options.as_json
def compare(
    prompt: str,
    bundle: str | None,
    repeats: int,
    chat: bool,
    system: str | None,
    device: str,
    draft_device: str | None,
    threads: int | None,
    ops: str,
    as_json: bool,
    **request: Any,
) -> None:
    """Time plain and speculative decoding of PROMPT; at temperature 0, exit 1 if they differ."""
    from specedge.benchmarks.comparison import compare as run

    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    pipeline = options.load(bundle, device, threads, ops, draft_device)
    given: str | list[int] = options.read_prompt(prompt, chat)
    with options.usage_errors():
        if isinstance(given, str) and chat:
            messages, allowed = options.messages(given, system), request["special_tokens"]
            given = pipeline.prompts.chat_tokens(messages, allowed)
        result = run(pipeline, given, repeats, **request)
    if as_json:
        click.echo(json.dumps(result.as_dict(), ensure_ascii=False, indent=1))
    else:
        _print(result)
    if result.greedy and not result.same_tokens:
        at, ties = result.first_difference, result.speculative.near_ties
        near = any(tie.position == at for tie in ties)
        click.echo(
            f"specedge: speculative decoding gave other tokens than plain decoding, from new token"
            f" {at} on{', a near-tie: --exact decides it as plain decoding does' if near else ''}",
            err=True,
        )
        raise click.exceptions.Exit(1)


def _print(result: Comparison) -> None:
    for name, generation, seconds in (
        ("plain", result.plain, result.plain_seconds),
        ("speculative", result.speculative, result.speculative_seconds),
    ):
        same = ", the same text" if result.same_tokens and name == "plain" else ""
        count = counted(len(generation.tokens), "token")
        click.secho(f"--- {name}: {seconds:.3f} s, {count}{same}", bold=True)
        if not same:
            click.echo(generation.text)
    click.secho("---", bold=True)
    for line in _figures(result):
        click.echo(lines(line))


def _figures(result: Comparison) -> list[str]:
    stats = result.speculative.stats
    low, high = result.speedup_range
    found = [
        f"speed-up             {result.speedup:.2f} (median of {result.repeats} pairs,"
        f" {low:.2f} to {high:.2f})",
    ]
    if result.predicted_speedup is not None:
        planned = result.num_draft_tokens == "auto"
        source = "by the plan's own costs" if planned else "from alpha and the costs below"
        found.append(f"predicted            {result.predicted_speedup:.2f} {source}")
    if stats.num_drafted:
        draft_cost = 0 if result.draft_cost is None else result.draft_cost
        found += [
            f"tokens per round     {stats.tokens_per_round:.2f} at K = {result.num_draft_tokens}",
            f"accepted / tested    {stats.accepted_over_tested:.3f} (alpha)",
            f"accepted / drafted   {stats.accepted_over_drafted:.3f}",
            "by position          "
            + " ".join("-" if a is None else f"{a:.2f}" for a in stats.acceptance_by_position),
            f"costs in target passes: draft {draft_cost:.3f}, verify"
            f" {result.verify_cost:.3f}, host {result.host_cost:.3f};"
            f" one is {result.target_seconds * 1e3:.3f} ms",
        ]
    found += near_ties.lines(result.speculative, result.exact)
    if result.greedy or result.coupled:
        found.append(f"same tokens          {'yes' if result.same_tokens else 'NO'}")
    elif lossy := result.speculative.lossy:
        found.append(
            f"lossy ({lossy}): speculative decoding follows another distribution than plain"
        )
    else:
        found.append(
            "above temperature 0 both follow one distribution, but need not draw the same tokens"
        )
    return found
