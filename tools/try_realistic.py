"""Checkpoints with real magnitudes through export and 64 greedy tokens. Development only.

    PYTHONPATH=tests python tools/try_realistic.py [--family F] [--layers N] [--seed S] [--faults]

All families, depths and seeds take hours; the options select some. With --output what was found
goes into a document's section, where the rows of other families, depths and faults stay.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import click
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import realistic
import specedge
import tables
import traces
from checkpoints import greedy_tokens
from comparing import CONTEXT, computed, graphs_of, measure, traced
from faults import DIFFERS, FAULTS
from specedge.bundle import Bundle
from specedge.bundle.op_sets import OPS
from specedge.bundle.reports import ParityReport
from specedge.errors import ParityError, SpecEdgeError
from specedge.exporter import export
from specedge.exporter.tracing import tracing
from specedge.exporter.tracing.module_patches import fix_rotary

DEPTHS, SEEDS = (2, 8, 32), (0, 1, 2)
PROMPT = list(range(40, 52))
LENGTH = 64
KEYS = {"exports": 2, "faults": 1}  # how many cells tell a table's rows apart


@dataclass(frozen=True)
class Case:
    """A checkpoint to try."""

    family: str
    layers: int
    seed: int

    def __str__(self) -> str:
        return f"{self.family}, {self.layers} layers, seed {self.seed}"


@dataclass(frozen=True)
class Found:
    """What an op set's graphs of a case gave; `text` is right as far as near-ties allow."""

    ops: str
    parity: ParityReport
    near_ties: list[str]
    wrong: list[str]

    def __str__(self) -> str:
        text = "; ".join((*self.wrong, *self.near_ties)) or "equal text"
        p = self.parity
        return (
            f"{self.ops:4} structure {p.structure_error:.0e}, ratio {p.error_ratio:.1f}, logits "
            f"{p.logits_error:.1e} (float32's {p.float32_logits_error:.1e}), caches "
            f"{p.cache_error:.1e} ({p.float32_cache_error:.1e}), left out {p.num_left_out}; {text}"
        )


def tried(case: Case, folder: Path) -> list[Found]:
    """Write the checkpoint, export it with its own first layer as the draft, compare text."""
    checkpoint = realistic.make(
        case.family, folder / "checkpoint", layers=case.layers, seed=case.seed
    )
    bundle = export("self:1", checkpoint, folder / "bundle")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    fix_rotary(model, bundle.context_length)
    generated = greedy_tokens(model, PROMPT, LENGTH)
    return [_found(bundle, ops, model, generated) for ops in bundle.target.parity]


def _found(bundle: Bundle, ops: str, model: torch.nn.Module, generated: list[int]) -> Found:
    pipeline = specedge.load(bundle.folder, ops=ops)
    one = pipeline.generate(PROMPT, LENGTH, num_draft_tokens=0, ignore_eos=True)
    parity = bundle.target.parity[ops]
    near_ties, wrong = [], []
    for line, explained in partings(model, one.tokens, generated, parity.bound):
        (near_ties if explained else wrong).append(line)
    return Found(ops, parity, near_ties, wrong)


def partings(
    model: torch.nn.Module, tokens: list[int], generated: list[int], bound: float
) -> list[tuple[str, bool]]:
    """Where the bundle's text is not PyTorch's choice after the same tokens, and if float32 is why.

    Two numbers that are each off by `bound` of the largest logit may change their order.
    """
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, *tokens[:-1]]])
        logits = model(ids).logits[0, len(PROMPT) - 1 :].double().numpy()
    found = []
    for i in np.flatnonzero(logits.argmax(1) != tokens):
        row = logits[i]
        margin, allowed = row.max() - row[tokens[i]], 2 * bound * np.abs(row).max()
        line = f"parts at token {i} by {margin:.1e}, allowed {allowed:.1e}"
        found.append((line, bool(margin <= allowed)))
    if not found and tokens != generated:
        first = next(i for i, (a, b) in enumerate(zip(tokens, generated, strict=True)) if a != b)
        found.append((f"parts at token {first}, where one pass in PyTorch agrees", False))
    return found


def refusals(family: str) -> Iterator[tuple[str, str, str]]:
    """Each fault that a family's graphs can have: its name, the op set, and the refusal, or ""."""
    model = realistic.make_model(family, context=CONTEXT)
    references = None
    for ops, graph in graphs_of(model)[1].items():
        for name, plant in FAULTS.items():
            faulty = graph.clone()
            plant(faulty.graph)
            if str(faulty.graph) == str(graph.graph):
                continue
            with tempfile.TemporaryDirectory() as folder:
                with mock.patch.object(tracing, "trace", return_value=faulty):
                    runner = traced(model, Path(folder), ops)
                references = references or computed(model, runner)
                try:
                    measure(model, runner, references=references)
                except ParityError as error:
                    yield name, ops, str(error)
                else:
                    yield name, ops, ""


@click.command()
@click.option("--family", "families", multiple=True, type=click.Choice(list(realistic.FAMILIES)))
@click.option("--layers", "depths", multiple=True, type=int, default=DEPTHS, show_default=True)
@click.option("--seed", "seeds", multiple=True, type=int, default=SEEDS, show_default=True)
@click.option("--faults", is_flag=True, help="Plant every fault into 2 layers of each, instead.")
@click.option("--output", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(
    families: tuple[str, ...],
    depths: tuple[int, ...],
    seeds: tuple[int, ...],
    faults: bool,
    output: Path | None,
) -> None:
    """Export realistic checkpoints and print what was found of each, or of each planted fault.

    Exits with 1 if one was refused or wrote another text, or a fault was accepted.
    """
    torch.set_num_threads(2)
    right = True
    for family in families or realistic.FAMILIES:
        with traces.remembered():
            if faults:
                tries = [_planted(family)]
            else:
                tries = [_tried(family, layers, seeds) for layers in depths]
        rows = [one for one, _ in tries]
        right &= all(as_it_must for _, as_it_must in tries)
        if output is not None:
            write("faults" if faults else "exports", rows, output)
    raise SystemExit(not right)


def _tried(family: str, layers: int, seeds: tuple[int, ...]) -> tuple[str, bool]:
    """Try a family's seeds, say what was found of each, and a row; and whether all is right."""
    found: list[Found] = []
    refused: list[str] = []
    for seed in seeds:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                results = tried(Case(family, layers, seed), Path(folder))
            except SpecEdgeError as error:
                results = []
                refused.append(f"seed {seed} refused: {error}")
        click.echo(f"{Case(family, layers, seed)}, {time.perf_counter() - began:.0f} s")
        for line in results or refused[-1:]:
            click.echo(f"  {line}")
        found += results
    right = not refused and not any(one.wrong for one in found)
    return row(family, layers, seeds, found, refused), right


def row(
    family: str, layers: int, seeds: tuple[int, ...], found: list[Found], refused: list[str]
) -> str:
    """The worst of all seeds and op sets."""
    named = ", ".join(map(str, seeds))
    if not found:
        return f"| {family} | {layers} | {named} | | | | | {'; '.join(refused)} |"
    worst = {
        name: max(getattr(one.parity, name) for one in found)
        for name in ("structure_error", "error_ratio", "logits_error", "float32_logits_error")
    }
    ops = [ops for ops in OPS if any(one.ops == ops for one in found)]
    text = [*refused, *(line for one in found for line in (*one.wrong, *one.near_ties))]
    return (
        f"| {family} | {layers} | {named} | {', '.join(ops)} | {worst['structure_error']:.0e} "
        f"| {worst['error_ratio']:.1f} | {worst['logits_error']:.1e} "
        f"({worst['float32_logits_error']:.1e}) | {'; '.join(text) or 'equal'} |"
    )


def _planted(family: str) -> tuple[str, bool]:
    """Plant a family's faults, say how each was refused, and sum up in a row; whether all were."""
    num_refused, wrong = 0, []
    for name, ops, refusal in refusals(family):
        click.echo(f"{family}, {name}, {ops}: {refusal or 'accepted'}")
        if re.match(DIFFERS, refusal):
            num_refused += 1
        else:
            wrong.append(f"{name} ({ops}{f': {refusal}' if refusal else ''})")
    return f"| {family} | {num_refused} | {', '.join(wrong) or 'none'} |", not wrong


def write(name: str, rows: list[str], document: Path) -> None:
    """Put rows into a table, for those with the same first cells or after the others."""
    title, cells = f"realistic {name}", KEYS[name]
    lines = tables.lines_of(document, title)
    head, kept = lines[:2], lines[2:]
    merged = {_key(line, cells): line for line in (*kept, *rows)}
    tables.put(document, title, [*head, *merged.values()])


def _key(row: str, cells: int) -> tuple[str, ...]:
    return tuple(row.split(" | ")[:cells])


if __name__ == "__main__":
    main()
