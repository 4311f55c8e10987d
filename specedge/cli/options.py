"""Options that several commands share."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from specedge.manifest import OPS
from specedge.options import MAX_DRAFT_TOKENS
from specedge.request import AUTO, DRAFTERS, MAX_MATCH, NGRAM

F = TypeVar("F", bound=Callable[..., Any])

MAX_PROMPT = 64 * 2**20  # bytes of standard input as one prompt
MAX_TEXT = 2**30  # bytes of a file of prompts, or of a text to count

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
form = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "jsonl"]),
    help="What --prompts holds: a prompt a line, or JSON. [default: jsonl for .jsonl, else text]",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON with the API's names.")

logprobs = click.option(
    "--logprobs", type=click.IntRange(0), metavar="N",
    help="With --json or --prompts, give the tokens' log-probabilities and the N likeliest.",
)  # fmt: skip
special_tokens = click.option(
    "--special-tokens", is_flag=True,
    help="Let text that spells a special token control the model; else it is text.",
)  # fmt: skip


class Number(click.FloatRange):
    """As click's, which takes nan for a number within any range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def _biases(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    found: dict[int, float] = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            number = int(token)
            if number in found:
                raise click.BadParameter(f"token {number} is given twice")
            found[number] = float(bias)
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not ID=BIAS, such as 42=-1.5") from error
    return found


class NumDraftTokens(click.ParamType):  # type: ignore[type-arg]
    """A number of draft tokens, or "auto"."""

    name = "number|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == AUTO:
            return AUTO
        return int(click.IntRange(0, MAX_DRAFT_TOKENS).convert(value, param, ctx))


_LAW = (
    click.option(
        "--temperature", type=Number(0), default=0.0, show_default=True,
        help="Divide the logits by this; 0 takes the likeliest token.",
    ),
    click.option(
        "--top-k", type=click.IntRange(0), default=0, help="Draw from the k likeliest tokens only."
    ),
    click.option(
        "--top-p", type=Number(0, 1, min_open=True), default=1.0,
        help="Draw from the fewest likeliest tokens whose probability reaches p.",
    ),
    click.option(
        "--min-p", type=Number(0, 1), default=0.0,
        help="Drop tokens less likely than this share of the likeliest.",
    ),
    click.option(
        "--typical-p", type=Number(0, 1, min_open=True), default=1.0,
        help="Draw from the tokens of the most expected surprise whose probability reaches this.",
    ),
    click.option(
        "--repetition-penalty", type=Number(0, min_open=True), default=1.0,
        help="Make tokens of the prompt and the output less likely, by division.",
    ),
    click.option(
        "--presence-penalty", type=Number(-2, 2), default=0.0,
        help="Take this from the logits of tokens that are in the output.",
    ),
    click.option(
        "--frequency-penalty", type=Number(-2, 2), default=0.0,
        help="Take this from a token's logit for each time it is in the output.",
    ),
    click.option(
        "--logit-bias", multiple=True, metavar="ID=BIAS", callback=_biases,
        help="Add this to a token's logit; may be given repeatedly.",
    ),
    click.option(
        "--bad-word", "bad_words", multiple=True, metavar="TEXT",
        help="Never write this, nor after a space; may be given repeatedly.",
    ),
)  # fmt: skip
_REQUEST = (
    click.option(
        "-n", "--max-new-tokens", type=click.IntRange(1), default=128, show_default=True,
        help="Generate at most this many tokens.",
    ),
    *_LAW,
    click.option(
        "--min-new-tokens", type=click.IntRange(0), default=0,
        help="Let no end token come before so many tokens.",
    ),
    click.option(
        "--lenience", type=Number(0, 1, min_open=True), default=1.0,
        help="Below 1, accept more draft tokens, and give up the target's law: lossy.",
    ),
    click.option("--seed", type=int, help="Repeat an earlier run. [default: a fresh seed]"),
    click.option(
        "-k", "--num-draft-tokens", type=NumDraftTokens(), default=AUTO, show_default=True,
        help="Draft this many tokens a round, or as many as pay; 0 is plain decoding.",
    ),
    click.option("--stop", multiple=True, help="End before this text; may be given repeatedly."),
    click.option("--ignore-eos", is_flag=True, help="Do not stop at end tokens."),
    click.option(
        "--drafter", metavar="NAME", default=AUTO, show_default=True,
        help=f"Draft with {', '.join(DRAFTERS)} or {NGRAM}FILE.",
    ),
    click.option(
        "--lookup-min", type=click.IntRange(1, MAX_MATCH),
        help="Copy after matches of at least this many tokens. [default: 2]",
    ),
    click.option(
        "--lookup-max", type=click.IntRange(1, MAX_MATCH),
        help="Tell matches apart up to this many tokens. [default: 5]",
    ),
    click.option(
        "--exact", is_flag=True,
        help="At temperature 0, decide near-ties as plain decoding does on this device.",
    ),
    special_tokens,
)  # fmt: skip


def request(function: F) -> F:
    """Add the options of a generation request, passed on as keyword arguments of the API."""
    for option in reversed(_REQUEST):
        function = option(function)
    return function


def law(function: F) -> F:
    """Add the options that shape the target's law, as `request` does."""
    for option in reversed(_LAW):
        function = option(function)
    return function


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for `-`."""
    if prompt != "-":
        return prompt
    return _standard_input(MAX_PROMPT)


def read_text(name: str) -> str:
    """A file's text, or standard input's for `-`."""
    if name == "-":
        return _standard_input(MAX_TEXT)
    try:
        with Path(name).open("rb") as file:
            return _limited(file, name, MAX_TEXT).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise click.UsageError(f"{name} is not UTF-8 text: {error}") from error
        raise click.UsageError(f"{name}: {getattr(error, 'strerror', error)}") from error


def _standard_input(most: int) -> str:
    if sys.stdin is None:
        raise click.UsageError("standard input is closed; give the prompt itself")
    try:
        return _limited(sys.stdin.buffer, "standard input", most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is not UTF-8 text: {error}") from error


def _limited(file: IO[bytes], name: str, most: int) -> bytes:
    """All bytes of a file, read in pieces; one that has too many, or no end, is refused."""
    found = bytearray()
    while piece := file.read(2**20):
        found += piece
        if len(found) > most:
            raise click.UsageError(f"{name} has more than {most // 2**20} MiB, the limit")
    return bytes(found)


def check_output(
    output: str, inputs: Sequence[str], overwrite: bool, flag: str = "--output"
) -> None:
    """Refuse, before any work, an output file that cannot be or must not be written."""
    if not output:
        raise click.UsageError(f"{flag} has no name; name a file")
    if os.path.isdir(output):
        raise click.UsageError(f"{output} is a folder; name a file for {flag}")
    if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise click.UsageError(f"{output} lies in no folder; make that first")
    for name in inputs:
        if os.path.exists(output) and os.path.exists(name) and os.path.samefile(output, name):
            raise click.UsageError(f"{output} is itself an input; name another for {flag}")
    if os.path.isfile(output) and not overwrite:
        raise click.UsageError(f"{output} exists; name another file, or give --overwrite")


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
