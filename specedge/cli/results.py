"""The lines that `specedge generate --prompts` writes: whole ones, and those of a run before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

import click

from specedge.bundle.store import errors_naming
from specedge.runtime.requests.items import Item
from specedge.strict_json import JsonError, parse

NEW, OVERWRITE, RESUME = "new", "overwrite", "resume"


def remaining(items: Sequence[Item], output: str, seeded: bool) -> list[Item]:
    """The prompts that an output file has no line of; a line of another run is a click.UsageError.

    `seeded` says that the seeds were asked for, so that the lines must have them.
    """
    try:
        content = Path(output).read_bytes()
    except FileNotFoundError:
        return list(items)
    done = set()
    for number, line in enumerate(content.split(b"\n")[:-1], 1):  # what is no whole line goes
        try:
            done.add(_index(parse(line.decode("utf-8")), items, seeded))
        except ValueError as error:
            raise click.UsageError(
                f"{output}, line {number}: {error}; it is of another run: name another file, or "
                "give --overwrite"
            ) from error
    return [item for item in items if item.index not in done]


def _index(facts: object, items: Sequence[Item], seeded: bool) -> int:
    index = facts.get("index") if isinstance(facts, dict) else None
    if not isinstance(facts, dict) or type(index) is not int or not 0 <= index < len(items):
        raise JsonError("it is no result of one of these prompts")
    item = items[index]
    if facts.get("id") != item.id:
        raise JsonError(f"prompt {index} has another id")
    if seeded and "error" not in facts and facts.get("seed") != item.request["seed"]:
        raise JsonError(f"prompt {index} has another seed")
    k = item.request["num_draft_tokens"]
    if type(k) is int and facts.get("num_draft_tokens", k) != k:
        raise JsonError(f"prompt {index} has another K")
    if facts.get("asked") != item.asked:
        raise JsonError(f"prompt {index} is not what is asked now, or was asked of another bundle")
    return index


@contextlib.contextmanager
def opened(output: str, way: str, stdout: TextIO | None = None) -> Iterator[Callable[[str], None]]:
    """What writes a line, to `stdout` for `-`, or nothing of it: a disk that is full leaves no half
    of one.
    """
    if output == "-":
        yield partial(click.echo, file=stdout)
        return
    plain = not os.path.exists(output) or os.path.isfile(output)
    # What check_output saw may have changed while the models were loaded.
    mode = {NEW: "xb", OVERWRITE: "wb", RESUME: "ab"}[way] if plain else "wb"
    with errors_naming(output), open(output, mode, buffering=0) as file:
        if way == RESUME and plain:
            file.truncate(Path(output).read_bytes().rfind(b"\n") + 1)

        def write(line: str) -> None:
            before = os.fstat(file.fileno()).st_size
            left = memoryview(f"{line}\n".encode())
            try:
                while left:
                    left = left[file.write(left) :]
            except BaseException:
                if plain:
                    os.ftruncate(file.fileno(), before)
                raise

        yield write
