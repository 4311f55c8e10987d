"""`specedge export`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import click

from specedge.bundle import Bundle
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.op_sets import CACHE_TYPES, COMPUTE_TYPES, OPS
from specedge.bundle.precision import GPTQ, PRECISION_CHOICES, ROUNDINGS
from specedge.cli import options
from specedge.cli.embed import add_graphs
from specedge.cli.inspect import license
from specedge.cli.terminal import lines, one_line
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS


@click.command()
@click.option(
    "--draft",
    default="none",
    show_default=True,
    help="The draft: a folder, a GGUF file, a hub id, self:N for the target's first N layers, or"
    " none: draft by suffix decoding.",
)
@click.option("--target", required=True, help="The target: a folder, a GGUF file or a hub id.")
@click.option(
    "--output", type=click.Path(), help="The bundle's folder; without it, the default bundle."
)
@click.option(
    "--num-draft-tokens",
    "-k",
    type=click.IntRange(1, MAX_EXPORTED_DRAFT_TOKENS),
    default=4,
    show_default=True,
    help="Draft tokens a round that the fixed shapes are for.",
)
@click.option("--max-length", type=click.IntRange(2), help="Limit the context to this many tokens.")
@click.option(
    "--ops",
    type=click.Choice(("auto", *OPS)),
    default="auto",
    show_default=True,
    help="Operators of the graphs: onnx, gqa, or both where the models can have both.",
)
@click.option(
    "--tolerance",
    type=options.Number(0, 1, min_open=True),
    help="Allow float32 errors up to this share of the largest value, whatever PyTorch's are.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISION_CHOICES),
    default="fp32",
    show_default=True,
    help="Round the target's weights and their inputs, or keep them as they are.",
)
@click.option(
    "--draft-precision",
    type=click.Choice(PRECISION_CHOICES),
    help="The same for the draft. [default: the fastest that is accepted as often, or nearly]",
)
@click.option(
    "--compute",
    type=click.Choice(tuple(COMPUTE_TYPES)),
    help="Add graphs that compute in this type, for devices that do; qdq: integers for TensorRT.",
)
@click.option(
    "--cache",
    type=click.Choice(tuple(CACHE_TYPES)),
    help="Add graphs whose caches have this type, of half the size, over the same weights.",
)
@click.option(
    "--draft-vocab",
    type=click.IntRange(1),
    metavar="N",
    help="Cut the draft's head to a text's N most frequent tokens, for cheaper drafts.",
)
@click.option(
    "--rounding",
    type=click.Choice(ROUNDINGS),
    default=GPTQ,
    show_default=True,
    help="Round int8 and int4 weights by GPTQ with the calibration text, or to the nearest.",
)
@click.option(
    "--bits",
    type=options.Number(4, 8),
    help="Bits that int4's weights in layers may have on average. [default: 4]",
)
@click.option(
    "--calibrate",
    metavar="FILE",
    help="The text to choose by how to round, and which tokens to keep. [default: a built-in one]",
)
@click.option("--draft-revision", help="Branch, tag or commit of the draft on the hub.")
@click.option("--target-revision", help="Branch, tag or commit of the target on the hub.")
@click.option("--adapter", help="A LoRA adapter to merge into the target: a folder or a hub id.")
@click.option("--draft-adapter", help="A LoRA adapter to merge into the draft.")
@click.option("--hosts", is_flag=True, help="Add graphs for apps without specedge, as embed does.")
def export(draft: str, target: str, output: str | None, hosts: bool, **request: Any) -> None:
    """Export a target, and a draft model if there is one, to one bundle of ONNX graphs."""
    from specedge.exporter import export as run

    _limit_threads()

    with _bars() as progress:
        bundle = run(draft, target, output, **request, progress=progress)
    for note in progress.notes:
        click.echo(one_line(f"note: {note}"), err=True)
    for role, model in bundle.models.items():
        click.echo(lines(_summary(bundle, role, model)), err=True)
        click.echo(one_line(f"{role}: licence {license(bundle, role, model)}"), err=True)
    click.echo(_times(progress.seconds), err=True)
    if hosts:
        add_graphs(bundle.folder)
    click.echo(bundle.folder)


def _limit_threads() -> None:
    """Let torch use no more threads than this process has CPUs: torch heeds no CPU quota."""
    import torch

    from specedge.cpu_count import cpu_count

    torch.set_num_threads(min(torch.get_num_threads(), cpu_count()))


def _times(seconds: dict[str, float]) -> str:
    steps = ", ".join(f"{step[0].lower()}{step[1:]} {took:.1f} s" for step, took in seconds.items())
    return f"{sum(seconds.values()):.1f} s: {steps}"


def _summary(bundle: Bundle, role: str, model: ModelEntry) -> str:
    size = f"{bundle.files[model.weights].size / 1e6:.1f} MB"
    if role == "draft" and bundle.shares_weights:
        size = f"in the target's {size}"
    found = (f"{role} ({ops}): {model.describe_parity(ops)}" for ops in model.parity)
    what = f"{model.architecture}, {model.num_parameters / 1e6:.1f} M parameters"
    return "\n".join((f"{role}: {what}, {size} as {model.weights_dtype}", *found))


@contextlib.contextmanager
def _bars() -> Iterator[Any]:
    """Progress that draws a bar for each step on stderr."""
    from rich.console import Console
    from rich.progress import Progress as Bars

    from specedge.exporter import Progress

    class Drawn(Progress):
        @contextlib.contextmanager
        def shown(self, description: str, total: int | None) -> Iterator[Callable[[int], None]]:
            task = bars.add_task(description, total=total)
            yield lambda amount: bars.advance(task, amount)
            bars.update(task, total=1, completed=1)

    console = Console(stderr=True)
    with Bars(console=console, transient=True, disable=not console.is_terminal) as bars:
        yield Drawn()
