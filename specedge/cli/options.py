"""Options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from specedge.manifest import OPS
from specedge.options import MAX_DRAFT_TOKENS

F = TypeVar("F", bound=Callable[..., Any])

bundle = click.option(
    "--bundle",
    metavar="FOLDER",
    help="Use this bundle. [default: $SPECEDGE_BUNDLE, else the pair exported last without"
    " --output, else the embedded pair]",
)
threads = click.option(
    "--threads", type=click.IntRange(1), help="Use this many CPU threads. [default: one a core]"
)
ops = click.option(
    "--ops",
    type=click.Choice(("auto", *OPS)),
    default="auto",
    show_default=True,
    help="Run the graphs of this op set.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON with the API's names.")

_REQUEST = (
    click.option(
        "-n", "--max-new-tokens", type=click.IntRange(1), default=128, show_default=True,
        help="Generate at most this many tokens.",
    ),
    click.option(
        "--temperature", type=click.FloatRange(0), default=0.0, show_default=True,
        help="Divide the logits by this; 0 takes the likeliest token.",
    ),
    click.option(
        "--top-k", type=click.IntRange(0), default=0, help="Draw from the k likeliest tokens only."
    ),
    click.option(
        "--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0,
        help="Draw from the fewest likeliest tokens whose probability reaches p.",
    ),
    click.option(
        "--min-p", type=click.FloatRange(0, 1), default=0.0,
        help="Drop tokens less likely than this share of the likeliest.",
    ),
    click.option("--seed", type=int, help="Repeat an earlier run. [default: a fresh seed]"),
    click.option(
        "-k", "--num-draft-tokens", type=click.IntRange(0, MAX_DRAFT_TOKENS),
        help="Draft this many tokens a round; 0 is plain decoding. [default: the bundle's]",
    ),
    click.option("--stop", multiple=True, help="End before this text; may be given repeatedly."),
    click.option("--ignore-eos", is_flag=True, help="Do not stop at end tokens."),
)  # fmt: skip


def request(function: F) -> F:
    """Add the options of a generation request, passed on as keyword arguments of the API."""
    for option in reversed(_REQUEST):
        function = option(function)
    return function


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for `-`."""
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise click.UsageError("standard input is closed; give the prompt itself")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8 text: {error}") from error


def messages(question: str, system: str | None) -> list[dict[str, str]]:
    """A chat of one question, perhaps with a system message before it."""
    asked = [{"role": "user", "content": question}]
    return asked if system is None else [{"role": "system", "content": system}, *asked]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Report a bad value that the API refused as a usage error."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
