"""Options that several commands share."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from specedge.bundle.op_sets import OP_SETS
from specedge.cli.panics import hidden_panics
from specedge.cli.terminal import one_line
from specedge.option_specs import format_default, option_specs
from specedge.request import AUTO, Coupling, GenerationRequest
from specedge.sampling_options import MAX_DRAFT_TOKENS, SamplingRules

if TYPE_CHECKING:
    from specedge.runtime.requests.pipeline import Pipeline

F = TypeVar("F", bound=Callable[..., Any])

MAX_PROMPT = 64 * 2**20  # bytes of standard input as one prompt
MAX_TEXT = 2**30  # bytes of a file of prompts, or of a text to count

bundle = click.option(
    "--bundle",
    metavar="FOLDER",
    help="Use this bundle. [default: $SPECEDGE_BUNDLE, else the pair exported last without"
    " --output, else the embedded pair]",
)
device = click.option(
    "--device", default="cpu", show_default=True,
    help="Run the models there: cpu, cuda, tensorrt or rtx, of several GPUs with a number, as in"
    " cuda:1, or auto.",
)  # fmt: skip
draft_device = click.option(
    "--draft-device", metavar="TEXT", help="Run the draft there. [default: beside the target]"
)
threads = click.option(
    "--threads",
    type=click.IntRange(1),
    help="Use this many CPU threads. [default: one per core this process may use]",
)
ops = click.option(
    "--ops",
    type=click.Choice(("auto", *OP_SETS)),
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


def load(
    bundle: str | None,
    device: str = "cpu",
    threads: int | None = None,
    ops: str = "auto",
    draft_device: str | None = None,
    slots: int = 1,
    max_length: int | None = None,
) -> Pipeline:
    """A bundle, with one thread pool for all sessions: no other code here has any."""
    from specedge.runtime.requests import loading

    with hidden_panics():
        pipeline = loading.load(
            bundle,
            device,
            threads,
            share_threads=True,
            ops=ops,
            draft_device=draft_device,
            slots=slots,
            max_length=max_length,
        )
    if pipeline.note:
        click.echo(one_line(f"note: {pipeline.note}"), err=True)
    return pipeline


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


def _file(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The text of the file that an option names."""
    return None if value is None else read_text(value)


class NumDraftTokens(click.ParamType):  # type: ignore[type-arg]
    """A number of draft tokens, or "auto"."""

    name = "number|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == AUTO:
            return AUTO
        return int(click.IntRange(0, MAX_DRAFT_TOKENS).convert(value, param, ctx))


# What click cannot know of an option from its declaration.
_ON_THE_COMMAND_LINE: dict[str, dict[str, Any]] = {
    "logit_bias": {"multiple": True, "metavar": "ID=BIAS", "callback": _biases},
    "bad_words": {"multiple": True, "metavar": "TEXT"},
    "num_draft_tokens": {"type": NumDraftTokens()},
    "seed": {"type": int},
    "coupling": {"type": click.Choice([name.value for name in Coupling])},
    "stop": {"multiple": True},
    "drafter": {"metavar": "NAME"},
    "logprobs": {"metavar": "N"},
    "json_schema": {"metavar": "FILE", "callback": _file},
    "grammar": {"metavar": "FILE", "callback": _file},
}
_FLAGS = {
    "max_new_tokens": ("-n", "--max-new-tokens"),
    "num_draft_tokens": ("-k", "--num-draft-tokens"),
    "bad_words": ("--bad-word",),
}
_SAMPLING = tuple(
    name for name in option_specs(SamplingRules) if name not in ("min_new_tokens", "lenience")
)
_REQUEST = [
    name
    for name in option_specs(GenerationRequest)
    if name not in ("logprobs", "remember", "replay")
]


def option(name: str) -> Callable[[F], F]:
    """The command line's form of an option of a request."""
    field, declared = option_specs(GenerationRequest)[name]
    own: dict[str, Any] = {"help": declared.help}
    if declared.kind == "number":
        low = declared.least if declared.above is None else declared.above
        own["type"] = Number(low, declared.most, min_open=declared.above is not None)
    elif declared.kind == "whole":
        most = None if declared.most is None else int(declared.most)
        own["type"] = click.IntRange(int(declared.least or 0), most)
    elif declared.kind == "flag":
        own["is_flag"] = True
    if format_default(field):
        own |= {"default": field.default, "show_default": True}
    own |= _ON_THE_COMMAND_LINE.get(name, {})
    if own.get("multiple"):
        own["help"] = own["help"].removesuffix(".") + "; may be given repeatedly."
    flags = _FLAGS.get(name, (f"--{name.replace('_', '-')}",))
    return click.option(*flags, name, **own)


def request(function: F) -> F:
    """Add the options of a generation request, passed on as keyword arguments of the API."""
    for name in reversed(_REQUEST):
        function = option(name)(function)
    return function


def sampling(function: F) -> F:
    """Add the options that shape the target's distribution, as `request` does."""
    for name in reversed(_SAMPLING):
        function = option(name)(function)
    return function


def read_prompt(prompt: str, chat: bool = False) -> str:
    """The prompt itself, or standard input for `-`; of a question without the shell's line end."""
    if prompt != "-":
        return prompt
    text = _standard_input(MAX_PROMPT)
    return text.removesuffix("\n") if chat else text


def read_text(name: str) -> str:
    """A file's text, or standard input's for `-`."""
    if name == "-":
        return _standard_input(MAX_TEXT)
    try:
        with Path(name).open("rb") as file:
            return _text(file, name, MAX_TEXT)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{name}: {getattr(error, 'strerror', error)}") from error


def _standard_input(most: int) -> str:
    if sys.stdin is None:
        raise click.UsageError("standard input is closed; give the prompt itself")
    return _text(sys.stdin.buffer, "standard input", most)


def _text(file: IO[bytes], name: str, most: int) -> str:
    """All of a file, read in pieces; one that has too many bytes, or no end, is refused."""
    found = bytearray()
    while piece := file.read(2**20):
        found += piece
        if len(found) > most:
            raise click.UsageError(f"{name} has more than {most // 2**20} MiB, the limit")
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name} is not UTF-8 text: {error}") from error


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


def write_output(path: str, text: str, overwrite: bool, flag: str) -> None:
    """Write a text file whole or not at all, unless it is there by now, and say so."""
    from specedge.bundle.store import errors_naming, replace_file

    check_output(path, [], overwrite, flag)  # the work took a while
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device stays one
        with errors_naming(path):
            Path(path).write_text(text, "utf-8")
    else:
        replace_file(Path(os.path.realpath(path)), text)
    click.echo(one_line(f"wrote {path}"), err=True)


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
