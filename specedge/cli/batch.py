"""Many prompts, one JSON object a line: what `specedge generate --prompts` does."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from specedge.cli.progress import bar
from specedge.cli.prompts import Item
from specedge.cli.results import opened
from specedge.cli.terminal import counted
from specedge.errors import DrafterError, SpecEdgeError

if TYPE_CHECKING:
    from specedge.runtime.pipeline import Pipeline
    from specedge.runtime.stream import Generation


def run(pipeline: Pipeline, items: list[Item], output: str, way: str) -> bool:
    """Write a line for each prompt as soon as it is done; whether all went well.

    A prompt that cannot be continued gets a line with its error, and the others still run.
    """
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    if any(item.messages for item in items):
        from specedge.runtime.text.chat import load_template

        load_template(pipeline.bundle)
    for item in items:
        try:
            pipeline.drafters.check(item.request["drafter"])
        except DrafterError as error:
            raise DrafterError(f"{item.place}{error}") from error
    done = failed = num_tokens = 0
    columns = (MofNCompleteColumn(), TimeRemainingColumn())
    # The lines go to stdout as they are; where that is a terminal too, a bar would be amid them.
    as_is = {"redirect_stdout": False, "redirect_stderr": False}
    off = output == "-" and sys.stdout.isatty()
    shown = bar("generating", len(items), *columns, off=off, **as_is)
    try:
        with opened(output, way) as write, shown as (update, _):
            for item in items:
                line = _line(pipeline, item)
                write(json.dumps(line, ensure_ascii=False))
                done += 1
                failed += "error" in line
                num_tokens += len(line.get("tokens", ()))
                update(advance=1)
    finally:
        click.echo(
            f"{done} of {counted(len(items), 'prompt')} done, {failed} failed, "
            f"{counted(num_tokens, 'token')}",
            err=True,
        )
    return not failed


def _line(pipeline: Pipeline, item: Item) -> dict[str, Any]:
    name = {"index": item.index} | ({} if item.id is None else {"id": item.id})
    try:
        if item.messages is not None:
            made = pipeline.chat(item.messages, **item.request)
        else:
            made = pipeline.generate(item.prompt or "", **item.request)
    except SpecEdgeError as error:
        return name | {"error": str(error)}
    return name | _facts(made)


def _facts(made: Generation) -> dict[str, Any]:
    """What the same seed and table of costs give again, byte for byte: no seconds."""
    from specedge.runtime.stats import as_dict

    counts = {name: value for name, value in as_dict(made.stats).items() if "seconds" not in name}
    names = ("text", "tokens", "finish_reason", "seed", "num_draft_tokens", "lossy", "drafter")
    facts: dict[str, Any] = {name: getattr(made, name) for name in names}
    facts |= {"stats": counts, "near_ties": [vars(tie) for tie in made.near_ties]}
    if made.logprobs is not None:
        facts["logprobs"] = [vars(one) for one in made.logprobs]
    return facts
