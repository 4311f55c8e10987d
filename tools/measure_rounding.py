"""What rounding costs, and what moving channels' sizes saves of that. Development only.

    PYTHONPATH=tests python tools/measure_rounding.py pair --output docs/measurements.md
    PYTHONPATH=tests python tools/measure_rounding.py realistic --output docs/measurements.md

`pair` is the trained pair, on specedge's own text and on modules that it was not trained on;
`realistic` are random checkpoints with the magnitudes of trained ones. A checkpoint is exported
once, in the op set `onnx`, and quantised in each way. All ways choose by specedge's own text.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import click
import numpy as np
from tokenizers import Tokenizer

import realistic
import tables
from corpus import held_out, library_files
from specedge.bundle import Bundle
from specedge.bundle.gpu_signatures import ONE_CALL, SCORED
from specedge.bundle.manifest import ModelEntry, Quantisation
from specedge.errors import SpecEdgeError
from specedge.exporter import Progress, export
from specedge.exporter.quantization import choosing, routes, texts
from specedge.exporter.quantization.quantising import quantise
from specedge.exporter.quantization.texts import Texts

CHECKPOINTS = Path(__file__).parents[1] / "models" / "checkpoints"
TRAINED = ("python-9m", "python-1m")
NUM_MODULES, LENGTH = 40, 128  # held out, and the tokens in the middle of each
OPS = "onnx"

# What is switched off: the name of an attribute, where it is, and what stands in its place.
_ATTENTION = (routes, "_through_attention", lambda *value_and_users: None)
_SMOOTHING = (choosing, "STRENGTHS", ())
_REST = ((choosing, "PARTS", ()), (choosing, "SLOW", np.inf), (choosing, "WORST", np.inf))


@dataclass(frozen=True)
class Way:
    """A precision, and what is switched off in it."""

    name: str
    precision: str = "int8"
    off: tuple[tuple[object, str, object], ...] = ()


INT8 = (
    Way("int8"),
    Way("int8, nothing through attention", off=(_ATTENTION,)),
    Way("int8, nothing moved", off=(_SMOOTHING,)),
    Way("int8, nothing moved, cut or left", off=(_SMOOTHING, *_REST)),
)
WAYS = (*INT8, Way("int8-block", "int8-block"), Way("int4", "int4"))


@dataclass
class Subject:
    """An exported checkpoint with the texts that it is judged by."""

    bundle: Bundle
    texts: list[Texts]

    def measured(self, way: Way) -> list[Quantisation]:
        """What a way of quantising the target costs on each text."""
        folder = self.bundle.folder / "target"
        with ExitStack() as stack:
            for owner, name, other in way.off:
                stack.enter_context(mock.patch.object(owner, name, other))
            work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            found = []
            for text in self.texts:
                copy = work / str(len(found)) / "target"
                shutil.copytree(folder, copy)
                models = {"target": _as_written(self.bundle.target)}
                (model,), _ = quantise(models, copy, way.precision, text, None, Progress())
                found.append(model.quantization[OPS])
        return found


def _as_written(model: ModelEntry) -> ModelEntry:
    """Without the graphs that an export makes of quantised ones."""
    later = (SCORED, *ONE_CALL)
    return replace(model, graphs=tuple(g for g in model.graphs if g.name not in later))


def own_text(bundle: Bundle) -> Texts:
    """specedge's own texts."""
    model = bundle.target
    tokenizer = bundle.folder / bundle.tokenizer
    sizes = model.vocab_size, model.context_length, model.num_parameters
    return texts.cut(texts.read(None), tokenizer, *sizes)


def held_out_text(bundle: Bundle) -> Texts:
    """Pieces of modules that the pair was not trained on, chosen by specedge's own texts."""
    tokenizer = Tokenizer.from_file(str(bundle.folder / bundle.tokenizer))
    found = []
    for name, text in library_files():
        ids = tokenizer.encode(text).ids if held_out(name) else []
        if len(ids) >= 2 * LENGTH and len(found) < NUM_MODULES:
            middle = len(ids) // 2
            found.append(np.array(ids[middle : middle + LENGTH], np.int64))
    return replace(own_text(bundle), name="modules held out", report=found)


def row(name: str, way: Way, found: Quantisation) -> str:
    """A line of a table."""
    change = found.perplexity / found.original_perplexity - 1
    return (
        f"| {name} | {way.name} | {found.original_perplexity:.4g} | {change:+.2%} "
        f"| {found.agreement:.1%} | {found.divergence:.2g} | {found.product_error:.1%} "
        f"| {found.num_smoothed}, {found.num_cut}, {found.num_in_blocks}, {found.num_left} |"
    )


def exported(checkpoint: Path, folder: Path) -> Bundle:
    """A checkpoint in its own type, with its first layer as the draft that a bundle has to have."""
    return export("self:1", checkpoint, folder, ops=OPS)


def trained() -> Iterator[str]:
    """Rows of the trained pair."""
    for name in TRAINED:
        with tempfile.TemporaryDirectory() as folder:
            bundle = exported(CHECKPOINTS / name, Path(folder) / "bundle")
            subject = Subject(bundle, [own_text(bundle), held_out_text(bundle)])
            for way in WAYS:
                for text, found in zip(subject.texts, subject.measured(way), strict=True):
                    yield row(f"{name}, {text.name}", way, found)


def random(family: str, layers: int, hidden: int) -> Iterator[str]:
    """Rows of a family's checkpoint; one that says why where it cannot be had."""
    name = f"{family}, {layers} x {hidden}"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "checkpoint"
        realistic.make(family, place, layers=layers, hidden=hidden)
        try:
            bundle = exported(place, Path(folder) / "bundle")
        except SpecEdgeError as error:
            yield f"| {name} | {error} | | | | | | |"
            return
        subject = Subject(bundle, [own_text(bundle)])
        for way in INT8:
            yield row(name, way, *subject.measured(way))


@click.group()
def main() -> None:
    """Measure what rounding costs, with sizes moved and without."""


@main.command()
@click.option("--output", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def pair(output: Path | None) -> None:
    """Quantise the trained pair."""
    put("rounded pair", list(told(trained())), output)


@main.command("realistic")
@click.option("--family", "families", multiple=True, type=click.Choice(list(realistic.FAMILIES)))
@click.option("--layers", default=2, show_default=True)
@click.option("--hidden", default=256, show_default=True)
@click.option("--output", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def realistic_(families: tuple[str, ...], layers: int, hidden: int, output: Path | None) -> None:
    """Quantise random checkpoints with trained magnitudes; the rows of others stay in a table."""
    for family in families or realistic.FAMILIES:
        put("rounded realistic", list(told(random(family, layers, hidden))), output)


def told(rows: Iterator[str]) -> Iterator[str]:
    for one in rows:
        click.echo(one)
        yield one


def put(title: str, rows: list[str], document: Path | None) -> None:
    """Put rows into a document's table, for those of the same checkpoint and way."""
    if document is None:
        return
    lines = tables.lines_of(document, title)
    head, kept = lines[:2], lines[2:]
    merged = {tuple(line.split(" | ")[:2]): line for line in (*kept, *rows)}
    tables.put(document, title, [*head, *merged.values()])


if __name__ == "__main__":
    main()
