"""Batch generation: `specedge generate --prompts`, one JSON object per line of output."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from specedge.bundle.store import errors_naming
from specedge.cli.terminal import pluralize, progress_bar
from specedge.runtime.requests.batch import BatchItem
from specedge.strict_json import JsonError, parse

if TYPE_CHECKING:
    from specedge.runtime.requests.pipeline import Pipeline

NEW, OVERWRITE, RESUME = "new", "overwrite", "resume"


def write_results(
    results: Iterable[dict[str, Any]], num_prompts: int, output: str, policy: str, stdout: TextIO
) -> bool:
    """Write a line for each result and return True if all prompts succeeded.

    A prompt that fails has a line with its error, and the others still run.
    """
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    done = failed = num_tokens = 0
    columns = (MofNCompleteColumn(), TimeRemainingColumn())
    # A progress bar would interfere with lines on the same terminal.
    as_is = {"redirect_stdout": False, "redirect_stderr": False}
    hidden = output == "-" and stdout.isatty()
    shown = progress_bar("generating", num_prompts, *columns, hidden=hidden, **as_is)
    try:
        with open_output(output, policy, stdout) as write, shown as (update, _):
            for line in results:
                write(json.dumps(line, ensure_ascii=False))
                done += 1
                failed += "error" in line
                num_tokens += len(line.get("tokens", ()))
                update(advance=1)
    finally:
        click.echo(
            f"{done} of {pluralize(num_prompts, 'prompt')} done, {failed} failed, "
            f"{pluralize(num_tokens, 'token')}",
            err=True,
        )
    return not failed


def remaining(items: Sequence[BatchItem], output: str, seeded: bool) -> list[BatchItem]:
    """Return the prompts without a line in an output file.

    Args:
        items: All prompts.
        output: Output file of an earlier run, which may not exist.
        seeded: True if the user specified the seed, which lines must match then.

    Raises:
        click.UsageError: If a line belongs to another run.
    """
    try:
        content = Path(output).read_bytes()
    except FileNotFoundError:
        return list(items)
    completed = set()
    for number, line in enumerate(content.split(b"\n")[:-1], 1):  # ignore an incomplete last line
        try:
            completed.add(_index(parse(line.decode("utf-8")), items, seeded))
        except ValueError as error:
            raise click.UsageError(
                f"{output}, line {number}: {error}; it belongs to another run: specify another "
                "file, or use --overwrite"
            ) from error
    return [item for item in items if item.index not in completed]


def restore_costs(pipeline: Pipeline, output: str) -> None:
    """Plan with the pass costs of the last line of an output file, which begins another text.

    Sampled texts of planned requests depend on the costs, and they may have been measured again.
    """
    try:
        lines = Path(output).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    costs = [parse(line.decode("utf-8")).get("costs") for line in lines]
    earlier = next((c for c in reversed(costs) if isinstance(c, str)), None)
    if earlier is not None and not pipeline.costs.restore(earlier):
        click.echo(
            "note: the pass costs of the earlier lines are no longer stored; sampled texts may "
            "differ from those of an uninterrupted run",
            err=True,
        )


def _index(result: object, items: Sequence[BatchItem], seeded: bool) -> int:
    index = result.get("index") if isinstance(result, dict) else None
    if not isinstance(result, dict) or type(index) is not int or not 0 <= index < len(items):
        raise JsonError("it is not a result of these prompts")
    item = items[index]
    if result.get("id") != item.id:
        raise JsonError(f"prompt {index} has another id")
    if seeded and "error" not in result and result.get("seed") != item.request["seed"]:
        raise JsonError(f"prompt {index} has another seed")
    k = item.request["num_draft_tokens"]
    if type(k) is int and result.get("num_draft_tokens", k) != k:
        raise JsonError(f"prompt {index} has another K")
    if result.get("asked") != item.fingerprint:
        raise JsonError(f"prompt {index} or the bundle has changed")
    return index


@contextlib.contextmanager
def open_output(
    output: str, policy: str, stdout: TextIO | None = None
) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a line to a file, or to `stdout` for `-`.

    A line is written completely or, if the disk is full, not at all.
    """
    if output == "-":
        yield partial(click.echo, file=stdout)
        return
    plain = not os.path.exists(output) or os.path.isfile(output)
    # The file may have changed since check_output, while the models were loaded.
    mode = {NEW: "xb", OVERWRITE: "wb", RESUME: "ab"}[policy] if plain else "wb"
    with errors_naming(output), open(output, mode, buffering=0) as file:
        if policy == RESUME and plain:
            file.truncate(Path(output).read_bytes().rfind(b"\n") + 1)

        def write(line: str) -> None:
            before = os.fstat(file.fileno()).st_size
            content = memoryview(f"{line}\n".encode())
            try:
                while content:
                    content = content[file.write(content) :]
            except BaseException:
                if plain:
                    os.ftruncate(file.fileno(), before)
                raise

        yield write
