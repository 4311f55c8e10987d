"""Command `specedge export`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from specedge.bundle import Bundle
from specedge.bundle.graph_variants import CACHE_TYPES, COMPUTE_TYPES, OPS
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.precision import GPTQ, PRECISION_CHOICES, ROUNDINGS
from specedge.cli import options
from specedge.cli.embed import add_graphs
from specedge.cli.inspect import license
from specedge.cli.terminal import progress_bar, sanitize, sanitize_line
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS


@click.command()
@click.option(
    "--draft",
    default="none",
    show_default=True,
    help="Draft model or EAGLE-3 head: a folder, a GGUF file, a hub id, self:N (the target's first"
    " N layers), mtp (its MTP layer) or none (suffix decoding).",
)
@click.option("--target", required=True, help="Target: a folder, a GGUF file or a hub id.")
@click.option(
    "--output",
    type=click.Path(),
    help="Folder of the bundle.  [default: in the user's data folder]",
)
@click.option(
    "--num-draft-tokens",
    "-k",
    type=click.IntRange(1, MAX_EXPORTED_DRAFT_TOKENS),
    default=4,
    show_default=True,
    help="Draft tokens per round of the fixed-shape graphs.",
)
@click.option(
    "--max-length",
    type=click.IntRange(2),
    help="Context length.  [default: the model's, at most 4096]",
)
@click.option(
    "--ops",
    type=click.Choice(("auto", "all", *OPS)),
    default="auto",
    show_default=True,
    help="Attention operators: onnx (standard), gqa (GroupQueryAttention), all, or auto: gqa if the"
    " model supports it, else onnx.",
)
@click.option(
    "--tolerance",
    type=options.FiniteRange(0, 1, min_open=True),
    help="Accepted float32 error relative to the largest value.  [default: 16 times PyTorch's]",
)
@click.option(
    "--verify",
    "verification",
    type=click.Choice(("layers", "full")),
    default="layers",
    show_default=True,
    help="Comparison with PyTorch in float64: the first layers of each kind, or all layers; the"
    " others are compared in float32.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISION_CHOICES),
    help="Precision of the target's weights; keep preserves quantized weights."
    "  [default: keep for a quantized checkpoint, else fp32]",
)
@click.option(
    "--draft-precision",
    type=click.Choice(PRECISION_CHOICES),
    help="Precision of the draft's weights.  [default: int8 beside a target in int8, int4 or keep,"
    " else the target's]",
)
@click.option(
    "--compute",
    type=click.Choice(tuple(COMPUTE_TYPES)),
    help="Add graph variants with this compute type, for GPUs; qdq is for TensorRT.",
)
@click.option(
    "--cache",
    type=click.Choice(tuple(CACHE_TYPES)),
    help="Add graph variants with smaller caches: half the size with fp16, a quarter with int8.",
)
@click.option(
    "--draft-vocab",
    type=click.IntRange(1),
    metavar="N",
    help="Prune the draft's LM head to the N most frequent tokens.",
)
@click.option(
    "--rounding",
    type=click.Choice(ROUNDINGS),
    default=GPTQ,
    show_default=True,
    help="Rounding of int8 and int4 weights: GPTQ or nearest.",
)
@click.option(
    "--bits",
    type=options.FiniteRange(4, 8),
    help="Average bits of int4 layer weights.  [default: 4]",
)
@click.option(
    "--calibrate",
    metavar="FILE",
    help="Calibration text.  [default: built-in]",
)
@click.option("--draft-revision", help="Branch, tag or commit of the draft model on the hub.")
@click.option("--target-revision", help="Branch, tag or commit of the target on the hub.")
@click.option("--adapter", help="LoRA adapter to merge into the target: a folder or a hub id.")
@click.option("--draft-adapter", help="LoRA adapter to merge into the draft model.")
@click.option(
    "--hosts",
    is_flag=True,
    help="Also add host graphs, as 'specedge embed' does.",
)
def export(draft: str, target: str, output: str | None, hosts: bool, **request: Any) -> None:
    """Export models to a bundle of ONNX graphs.

    Without --draft, the bundle drafts by suffix decoding.
    """
    from specedge.exporter import export as run
    from specedge.exporter.request import ExportRequest

    _limit_threads()
    with options.usage_errors():
        export_request = ExportRequest(draft, target, output, **request)
    with _progress() as progress:
        bundle = run(export_request, progress=progress)
    for note in progress.notes:
        click.echo(sanitize_line(f"note: {note}"), err=True)
    for role, model in bundle.models.items():
        click.echo(sanitize(_summary(bundle, role, model)), err=True)
        click.echo(sanitize_line(f"{role}: license {license(bundle, role, model)}"), err=True)
    click.echo(_times(progress.seconds), err=True)
    if hosts:
        add_graphs(bundle.folder)
    click.echo(bundle.folder)


def _limit_threads() -> None:
    """Limit torch to the CPUs of this process: it does not respect CPU quotas."""
    import torch

    from specedge.cpu_count import cpu_count

    torch.set_num_threads(min(torch.get_num_threads(), cpu_count()))


def _times(seconds: dict[str, float]) -> str:
    steps = ", ".join(
        f"{step[0].lower()}{step[1:]} {duration:.1f} s" for step, duration in seconds.items()
    )
    return f"{sum(seconds.values()):.1f} s: {steps}"


def _summary(bundle: Bundle, role: str, model: ModelEntry) -> str:
    size = f"{bundle.files[model.weights].size / 1e6:.1f} MB"
    if role == "draft" and bundle.shares_weights:
        size = f"part of the target's {size}"
    parity = (f"{role} ({ops}): {model.describe_parity(ops)}" for ops in model.parity)
    description = f"{model.architecture}, {model.num_parameters / 1e6:.1f} M parameters"
    return "\n".join((f"{role}: {description}, {size} as {model.weights_dtype}", *parity))


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Yield a `Progress` shown on stderr: a bar, or a line per step without a terminal."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    from specedge.exporter import Progress

    class RemainingColumn(ProgressColumn):
        """Remaining time; also moves the bar while no step reports progress."""

        def render(self, task: Task) -> Text:
            task.completed = progress.fraction()
            seconds = progress.remaining()
            return Text("" if seconds is None else _format_remaining(seconds))

    class ShownProgress(Progress):
        @contextlib.contextmanager
        def shown(self, description: str, total: int | None) -> Iterator[Callable[[int], None]]:
            update(description=sanitize_line(description))
            start = time.perf_counter()
            yield lambda amount: None
            if hidden:
                seconds = time.perf_counter() - start
                click.echo(sanitize_line(f"{description}: {seconds:.1f} s"), err=True)

    progress = ShownProgress()
    with progress_bar("Checking the models", 1.0, RemainingColumn()) as (update, hidden):
        yield progress


def _format_remaining(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"about {minutes}:{rest:02} left"
