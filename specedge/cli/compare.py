"""Command `specedge compare`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options, trace
from specedge.cli.terminal import pluralize, sanitize

if TYPE_CHECKING:
    from specedge.benchmarks.comparison import Comparison


@click.command()
@click.argument("prompt")
@options.bundle
@options.request_options
@click.option(
    "--repeats", type=click.IntRange(1), default=5, show_default=True, help="Number of timed pairs."
)
@click.option("--chat", is_flag=True, help="Apply the chat template to PROMPT.")
@click.option("--system", metavar="TEXT", help="System message, with --chat.")
@options.execution
@options.as_json
def compare(
    prompt: str,
    repeats: int,
    chat: bool,
    system: str | None,
    as_json: bool,
    **request: Any,
) -> None:
    """Time plain and speculative decoding of PROMPT.

    At temperature 0 the exit status is 1 if their tokens differ.
    """
    from specedge.benchmarks.comparison import compare as run

    if system is not None and not chat:
        raise click.UsageError("--system requires --chat")
    pipeline = options.load_pipeline(**options.pop_model_options(request))
    prompt_input: str | list[int] = options.read_prompt(prompt, chat)
    with options.usage_errors():
        if isinstance(prompt_input, str) and chat:
            messages, allowed = options.messages(prompt_input, system), request["special_tokens"]
            prompt_input = pipeline.prompts.chat_tokens(messages, allowed)
        result = run(pipeline, prompt_input, repeats, **request)
    if as_json:
        click.echo(json.dumps(result.as_dict(), ensure_ascii=False, indent=1))
    else:
        _print(result)
    if result.greedy and not result.same_tokens:
        at, ties = result.first_difference, result.speculative.near_ties
        near = any(tie.position == at for tie in ties)
        click.echo(
            f"specedge: tokens of speculative and plain decoding differ from new token {at}"
            f"{', a near-tie: --exact resolves it' if near else ''}",
            err=True,
        )
        raise click.exceptions.Exit(1)


def _print(result: Comparison) -> None:
    for name, generation, seconds in (
        ("plain", result.plain, result.plain_seconds),
        ("speculative", result.speculative, result.speculative_seconds),
    ):
        same = ", same text" if result.same_tokens and name == "plain" else ""
        count = pluralize(len(generation.tokens), "token")
        click.secho(f"--- {name}: {seconds:.3f} s, {count}{same}", bold=True)
        if not same:
            click.echo(generation.text)
    click.secho("---", bold=True)
    for line in _figures(result):
        click.echo(sanitize(line))


def _figures(result: Comparison) -> list[str]:
    stats = result.speculative.stats
    low, high = result.speedup_range
    lines = [
        f"speed-up             {result.speedup:.2f} (median of {result.repeats} pairs,"
        f" {low:.2f} to {high:.2f})",
    ]
    if result.predicted_speedup is not None:
        planned = result.num_draft_tokens == "auto"
        source = "by the planner" if planned else "from alpha and the costs below"
        lines.append(f"predicted            {result.predicted_speedup:.2f} {source}")
    if stats.num_drafted:
        draft_cost = 0 if result.draft_cost is None else result.draft_cost
        lines += [
            f"tokens per round     {stats.tokens_per_round:.2f} at K = {result.num_draft_tokens}",
            f"acceptance rate      {stats.accepted_over_tested:.3f} (alpha)",
            f"accepted / drafted   {stats.accepted_over_drafted:.3f}",
            "by position          "
            + " ".join("-" if a is None else f"{a:.2f}" for a in stats.acceptance_by_position),
            f"cost in target passes: draft {draft_cost:.3f}, verify"
            f" {result.verify_cost:.3f}, host {result.host_cost:.3f};"
            f" a target pass takes {result.target_seconds * 1e3:.3f} ms",
        ]
    lines += trace.near_tie_lines(result.speculative, result.exact)
    if result.greedy or result.coupled:
        lines.append(f"same tokens          {'yes' if result.same_tokens else 'NO'}")
    elif lossy := result.speculative.lossy:
        lines.append(f"lossy ({lossy}): the distribution differs from plain decoding")
    else:
        lines.append(
            "above temperature 0 the distributions are equal, but sampled tokens may differ"
        )
    return lines
