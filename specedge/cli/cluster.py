"""Prompts over a Ray cluster: what `specedge generate --prompts FILE --ray` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from specedge.cli.ray_process import Heard, connected, quiet
from specedge.cli.terminal import counted, one_line
from specedge.errors import SpecEdgeError

if TYPE_CHECKING:
    from specedge.runtime.requests.items import Item

AT_A_TIME = 2000  # prompts: after a loss at most so many lines wait for one before them
MOST_PASSES = 5  # that lose a prompt: then it must be what its workers die of

SHORT = 200  # characters of a note

Pass = Callable[[list["Item"]], Iterator[tuple[int, dict[str, Any]]]]


@contextmanager
def answers(
    address: str, num_actors: int | None, models: dict[str, Any], items: list[Item]
) -> Iterator[Iterator[dict[str, Any]]]:
    """The results of prompts in their order, each as it comes; raises before any runs."""
    from specedge.cli import actors
    from specedge.ray import fixed

    actors.check_device(models["device"], models["draft_device"])
    bundle = actors.Shared(models["bundle"])
    if sum(fixed(item.request, k := bundle.num_draft_tokens) for item in items):
        said = f"K is {k} for every prompt, as one machine has it with -k {k}"
        click.echo(f"note: {said}: auto would let lines depend on machines", err=True)
    with connected(address), quiet() as heard:
        pool = actors.Pool(bundle, models, num_actors, items, heard)
        yield in_order(items, pool.run, heard)


def in_order(items: list[Item], run: Pass, heard: Heard) -> Iterator[dict[str, Any]]:
    """Run prompts, lost ones again, and give each result when those before it are out."""
    for start in range(0, len(items), AT_A_TIME):
        yield from _part(items[start : start + AT_A_TIME], run, heard)


def _part(items: list[Item], run: Pass, heard: Heard) -> Iterator[dict[str, Any]]:
    from specedge.runtime.requests.items import failed

    left = {item.index: item for item in items}
    due, held = deque(left), dict[int, dict[str, Any]]()
    for _ in range(MOST_PASSES):
        for index, result in run(list(left.values())):
            held[index] = result
            left.pop(index, None)
            while due and due[0] in held:
                yield held.pop(due.popleft())
        if not left:
            return
        again = f"{counted(len(left), 'line')} lost with a worker or a node, and done again"
        click.echo(one_line(f"note: {again}: {heard.last}", SHORT), err=True)
    # One prompt may well be what its workers die of; where each of many is lost, it is they.
    if len(left) == len(items) > 1:
        raise SpecEdgeError(f"no worker lived to do a line: {heard.last}")
    for index, item in left.items():
        held[index] = failed(item, f"its worker was lost {MOST_PASSES} times: {heard.last}")
    yield from (held[index] for index in due)
