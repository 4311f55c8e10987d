"""Many prompts, one JSON object a line: what `specedge generate --prompts` does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import click

from specedge.cli.progress import bar
from specedge.cli.results import opened
from specedge.cli.terminal import counted
from specedge.runtime.requests.items import Item, answered, check_drafters

if TYPE_CHECKING:
    from specedge.runtime.requests.pipeline import Pipeline


def answers(pipeline: Pipeline, items: list[Item]) -> Iterator[dict[str, Any]]:
    """The results of prompts one after the other; raises before any runs."""
    if any(item.messages for item in items):
        from specedge.runtime.text.chat import load_template

        load_template(pipeline.bundle)
    check_drafters(pipeline.drafters, ((item.place, item.request["drafter"]) for item in items))
    return (answered(pipeline, item) for item in items)


def run(
    results: Iterable[dict[str, Any]], num_prompts: int, output: str, way: str, stdout: TextIO
) -> bool:
    """Write a line for each prompt as soon as it is done; whether all went well.

    A prompt that cannot be continued gets a line with its error, and the others still run.
    """
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    done = failed = num_tokens = 0
    columns = (MofNCompleteColumn(), TimeRemainingColumn())
    # The lines go to stdout as they are; where that is a terminal too, a bar would be amid them.
    as_is = {"redirect_stdout": False, "redirect_stderr": False}
    off = output == "-" and stdout.isatty()
    shown = bar("generating", num_prompts, *columns, off=off, **as_is)
    try:
        with opened(output, way, stdout) as write, shown as (update, _):
            for line in results:
                write(json.dumps(line, ensure_ascii=False))
                done += 1
                failed += "error" in line
                num_tokens += len(line.get("tokens", ()))
                update(advance=1)
    finally:
        click.echo(
            f"{done} of {counted(num_prompts, 'prompt')} done, {failed} failed, "
            f"{counted(num_tokens, 'token')}",
            err=True,
        )
    return not failed
