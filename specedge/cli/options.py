"""Options, input and output that several commands share."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from specedge.bundle.graph_variants import GRAPH_VARIANTS
from specedge.cli.panics import hidden_panics
from specedge.cli.terminal import sanitize_line
from specedge.option_specs import option_specs
from specedge.request import AUTO, Coupling, GenerationRequest
from specedge.sampling_options import MAX_DRAFT_TOKENS, SamplingRules

if TYPE_CHECKING:
    from specedge.runtime.requests.pipeline import Pipeline

F = TypeVar("F", bound=Callable[..., Any])

MAX_PROMPT = 64 * 2**20  # maximum bytes of a prompt
MAX_TEXT = 2**30  # maximum bytes of a file
ANY_CLUSTER = "any"  # `--ray` without an address

bundle = click.option(
    "--bundle",
    metavar="FOLDER",
    help="Folder of the bundle.  [default: $SPECEDGE_BUNDLE, else the last export without --output,"
    " else the embedded pair]",
)
device = click.option(
    "--device", default="cpu", show_default=True,
    help="Device: cpu, cuda, tensorrt, rtx (with an optional GPU number, such as cuda:1) or auto.",
)  # fmt: skip
draft_device = click.option(
    "--draft-device", metavar="TEXT", help="Device of the draft model.  [default: the target's]"
)
threads = click.option(
    "--threads",
    type=click.IntRange(1),
    help="Number of CPU threads.  [default: all available cores]",
)
ops = click.option(
    "--ops",
    type=click.Choice(("auto", *GRAPH_VARIANTS)),
    default="auto",
    show_default=True,
    metavar="OPS",
    help="Graph variant, one of those listed by 'specedge inspect'.",
)
prompt_format = click.option(
    "--format",
    "form",
    type=click.Choice(["text", "jsonl"]),
    help="Format of --prompts.  [default: jsonl for .jsonl files, else text]",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def execution(function: F) -> F:
    """Add the options of devices, threads and graph variant as keyword arguments."""
    for option in (ops, threads, draft_device, device):
        function = option(function)
    return function


def load_pipeline(bundle: str | None, with_notes: bool = True, **arguments: Any) -> Pipeline:
    """Load a bundle with one thread pool for all sessions of the process, and print its notes.

    Further arguments are those of `loader.load`.
    """
    from specedge.runtime.requests import loader

    with hidden_panics():
        pipeline = loader.load(bundle, share_threads=True, **arguments)
    if with_notes:
        print_notes(pipeline)
    return pipeline


def pop_model_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments of a command that are options of `load_pipeline`, and return them."""
    names = ("bundle", "device", "draft_device", "threads", "ops")
    return {name: arguments.pop(name) for name in names}


def print_notes(pipeline: Pipeline) -> None:
    """Print the notes of a load."""
    for note in pipeline.notes:
        click.echo(sanitize_line(f"note: {note}"), err=True)


class FiniteRange(click.FloatRange):
    """Range of numbers that rejects NaN, which click.FloatRange accepts."""

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
    biases: dict[int, float] = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            number = int(token)
            if number in biases:
                raise click.BadParameter(f"token {number} is repeated")
            biases[number] = float(bias)
        except ValueError as error:
            raise click.BadParameter(
                f"{value!r} must have the form ID=BIAS, such as 42=-1.5"
            ) from error
    return biases


def _file(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the text of the file that an option names."""
    return None if value is None else read_text(value)


class NumDraftTokens(click.ParamType):  # type: ignore[type-arg]
    """Parameter type: a number of draft tokens, or "auto"."""

    name = "number|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == AUTO:
            return AUTO
        return int(click.IntRange(0, MAX_DRAFT_TOKENS).convert(value, param, ctx))


# Settings of click that OptionSpec does not have.
_CLICK_SETTINGS: dict[str, dict[str, Any]] = {
    "logit_bias": {"multiple": True, "metavar": "ID=BIAS", "callback": _biases},
    "bad_words": {"multiple": True, "metavar": "TEXT"},
    "num_draft_tokens": {"type": NumDraftTokens(), "metavar": "K|auto"},
    "seed": {"type": int},
    "coupling": {"type": click.Choice([name.value for name in Coupling])},
    "stop": {"multiple": True},
    "decoder_prefix": {"metavar": "TEXT"},
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


def request_option(name: str) -> Callable[[F], F]:
    """Return the click option of an option of a request."""
    field, declared = option_specs(GenerationRequest)[name]
    settings: dict[str, Any] = {"help": declared.help}
    if declared.type == "number":
        low = declared.minimum if declared.exclusive_minimum is None else declared.exclusive_minimum
        settings["type"] = FiniteRange(
            low, declared.maximum, min_open=declared.exclusive_minimum is not None
        )
    elif declared.type == "integer":
        maximum = None if declared.maximum is None else int(declared.maximum)
        settings["type"] = click.IntRange(int(declared.minimum or 0), maximum)
    elif declared.type == "flag":
        settings["is_flag"] = True
    default = field.default
    if default is not None and default is not False and default != ():
        default = str(default) if isinstance(default, str) else default
        settings |= {"default": default, "show_default": True}
    settings |= _CLICK_SETTINGS.get(name, {})
    if settings.get("multiple"):
        settings["help"] = settings["help"].removesuffix(".") + "; may be repeated."
    flags = _FLAGS.get(name, (f"--{name.replace('_', '-')}",))
    return click.option(*flags, name, **settings)


def request_options(function: F) -> F:
    """Add all options of a generation request as keyword arguments."""
    for name in reversed(_REQUEST):
        function = request_option(name)(function)
    return function


def sampling_options(function: F) -> F:
    """Add the options that determine the target's distribution as keyword arguments."""
    for name in reversed(_SAMPLING):
        function = request_option(name)(function)
    return function


def read_prompt(prompt: str, chat: bool = False) -> str:
    """Return the prompt, or standard input for `-`, without its final newline for a chat."""
    if prompt != "-":
        return prompt
    text = _standard_input(MAX_PROMPT)
    return text.removesuffix("\n") if chat else text


def read_text(name: str, max_bytes: int | None = None) -> str:
    """Return the text of a file, by default of at most `MAX_TEXT` bytes; `-` is standard input."""
    max_bytes = max_bytes or MAX_TEXT
    if name == "-":
        return _standard_input(max_bytes)
    try:
        with Path(name).open("rb") as file:
            return _text(file, name, max_bytes)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{name}: {getattr(error, 'strerror', error)}") from error


def _standard_input(max_bytes: int) -> str:
    if sys.stdin is None:
        raise click.UsageError("standard input is closed; specify the prompt as an argument")
    return _text(sys.stdin.buffer, "standard input", max_bytes)


def _text(file: IO[bytes], name: str, max_bytes: int) -> str:
    """Read a file in chunks; raise click.UsageError if it is too large or endless."""
    content = bytearray()
    while piece := file.read(2**20):
        content += piece
        if len(content) > max_bytes:
            raise click.UsageError(f"{name} exceeds the limit of {max_bytes // 2**20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise click.UsageError(f"{name}, line {line}: not UTF-8 text ({error.reason})") from error


def check_output(
    output: str, inputs: Sequence[str], overwrite: bool, flag: str = "--output"
) -> None:
    """Raise click.UsageError for an output file that cannot or must not be written."""
    if not output:
        raise click.UsageError(f"{flag} needs a file name")
    if os.path.isdir(output):
        raise click.UsageError(f"{output} is a folder; specify a file for {flag}")
    if not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise click.UsageError(f"the folder of {output} does not exist; create it first")
    for name in inputs:
        if os.path.exists(output) and os.path.exists(name) and os.path.samefile(output, name):
            raise click.UsageError(f"{output} is also an input; specify another file for {flag}")
    if os.path.isfile(output) and not overwrite:
        raise click.UsageError(f"{output} exists; specify another file, or use --overwrite")


def write_output(path: str, text: str, overwrite: bool, flag: str) -> None:
    """Write a text file atomically and report its path on stderr."""
    from specedge.bundle.store import errors_naming, replace_file

    check_output(path, [], overwrite, flag)  # again, after the work
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device is not replaced
        with errors_naming(path):
            Path(path).write_text(text, "utf-8")
    else:
        replace_file(Path(os.path.realpath(path)), text)
    click.echo(sanitize_line(f"wrote {path}"), err=True)


def messages(question: str, system: str | None) -> list[dict[str, str]]:
    """Return a chat with one question and an optional system message."""
    chat = [{"role": "user", "content": question}]
    return chat if system is None else [{"role": "system", "content": system}, *chat]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Convert a ValueError of the API to a usage error."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
