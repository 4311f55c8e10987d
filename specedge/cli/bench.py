"""`specedge bench`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options, progress
from specedge.cli.terminal import lines
from specedge.request import AUTO, DrafterName, GenerationRequest
from specedge.sampling_options import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from specedge.benchmarks.measure import Measured, Prompt, Setting
    from specedge.runtime.requests.pipeline import Pipeline
    from specedge.runtime.text.prompts import UserPrompt

_SETS = ("code", "prose", "extraction")
_DRAFTERS = (DrafterName.MODEL, DrafterName.SUFFIX, DrafterName.CHAIN, AUTO)
_MOST = 8  # K, if none is asked for


def _lengths(
    context: click.Context, option: click.Parameter, value: str | None
) -> list[int] | None:
    """Numbers and ranges with commas between them, such as 1-4,8."""
    return None if value is None else [k for part in value.split(",") for k in _range(part)]


def _range(part: str) -> Iterator[int]:
    first, dash, last = part.strip().partition("-")
    low, high = ((text.isascii() and text.isdigit() and int(text)) or 0 for text in (first, last))
    high = high if dash else low
    if not 1 <= low <= high <= MAX_DRAFT_TOKENS:
        raise click.BadParameter(
            f"'{part}' is no K and no range of K from 1 to {MAX_DRAFT_TOKENS}, such as 4 or 1-8"
        )
    yield from range(low, high + 1)


@click.command()
@options.bundle
@options.device
@options.draft_device
@click.option(
    "--set",
    "sets",
    type=click.Choice(_SETS),
    multiple=True,
    help="Use these built-in prompts; may be given repeatedly. [default: all, or none with"
    " --prompts]",
)
@click.option("--prompts", metavar="FILE", help="Use the prompts of a file; `-` is stdin.")
@options.form
@click.option(
    "--drafter",
    "drafters",
    metavar="NAME",
    multiple=True,
    help=f"Measure this drafter; may be given repeatedly. [default: {', '.join(_DRAFTERS)}]",
)
@click.option(
    "-k",
    "--num-draft-tokens",
    "lengths",
    callback=_lengths,
    metavar="LIST",
    help=f"Measure these K, such as 1-4,8. [default: 1-{_MOST}, or as far as a pass is exact]",
)
@click.option(
    "-n", "--max-new-tokens", type=click.IntRange(1), default=64, show_default=True,
    help="Generate this many tokens for each prompt, fewer where the text falls into a loop.",
)  # fmt: skip
@options.sampling
@click.option(
    "--seed", type=click.IntRange(0, 2**63), default=0, show_default=True,
    help="Draw the prompts' texts with this seed, the next, and so on.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True,
    help="Time each setting this often on each prompt.",
)  # fmt: skip
@options.option("special_tokens")
@options.threads
@options.ops
@options.as_json
@click.option("--csv", metavar="FILE", help="Write the figures there, a line for each setting.")
@click.option("--html", metavar="FILE", help="Write a page with plots there.")
@click.option("--overwrite", is_flag=True, help="Replace files that exist.")
def bench(
    bundle: str | None,
    device: str,
    draft_device: str | None,
    sets: tuple[str, ...],
    prompts: str | None,
    form: str | None,
    drafters: tuple[str, ...],
    lengths: list[int] | None,
    max_new_tokens: int,
    seed: int,
    repeats: int,
    threads: int | None,
    ops: str,
    as_json: bool,
    csv: str | None,
    html: str | None,
    overwrite: bool,
    **distribution: Any,
) -> None:
    """Measure drafters and K against plain decoding, and the predictions against both."""
    from specedge.benchmarks.measure import settings
    from specedge.cli import bench_output, bench_page
    from specedge.runtime.drafters.registry import NEEDS_MODEL

    request = distribution | {"max_new_tokens": max_new_tokens, "seed": seed}
    with options.usage_errors():
        for name in drafters or _DRAFTERS:
            GenerationRequest(**request, drafter=name)
    outputs = [("--csv", csv, bench_output.csv_text), ("--html", html, bench_page.page)]
    named = {flag: path for flag, path, _ in outputs if path is not None}
    _check_outputs(named, prompts, overwrite)
    given = _read(sets, prompts, form)
    pipeline = options.load(bundle, device, threads, ops, draft_device)
    without_model = pipeline.bundle.draft is None
    names = drafters or [n for n in _DRAFTERS if not (without_model and n in NEEDS_MODEL)]
    for name in names:
        pipeline.drafters.check(name)
    tokens = _prompts(pipeline, given, request["special_tokens"])
    ks = lengths or range(1, min(_MOST, pipeline.max_planned_tokens) + 1)
    measured = _measure(pipeline, tokens, settings(names, ks), repeats, request)
    devices = " and ".join(dict.fromkeys((device, draft_device or device)))
    facts = _facts(pipeline, devices, threads, repeats, request)
    report = _report(pipeline, tokens, measured, request, facts)
    click.echo(
        bench_output.json_text(report) if as_json else lines(bench_output.table_text(report))
    )
    for flag, path, write in outputs:
        if path is not None:
            options.write_output(path, write(report), overwrite, flag)


def _check_outputs(outputs: dict[str, str], prompts: str | None, overwrite: bool) -> None:
    seen: dict[str, str] = {}
    for flag, path in outputs.items():
        options.check_output(path, [prompts] if prompts else [], overwrite, flag)
        other = seen.setdefault(os.path.realpath(path), flag)
        if other != flag:
            raise click.UsageError(f"{other} and {flag} name one file; name two")


def _read(
    sets: Sequence[str], prompts: str | None, form: str | None
) -> list[tuple[str, UserPrompt]]:
    """Each prompt, a text or a chat, with its set's name; a bad file is a click.UsageError."""
    from specedge.benchmarks.prompts import SETS
    from specedge.cli.prompts import alone

    if form and prompts is None:
        raise click.UsageError("--format needs --prompts")
    names = sets or (() if prompts is not None else _SETS)
    found: list[tuple[str, UserPrompt]] = [
        (name, text) for name in dict.fromkeys(names) for text in SETS[name]
    ]
    if prompts is not None:
        name = "standard input" if prompts == "-" else Path(prompts).name
        found += [(name, prompt) for prompt in alone(prompts, form)]
    return found


def _prompts(
    pipeline: Pipeline, given: Sequence[tuple[str, UserPrompt]], special_tokens: bool = False
) -> list[Prompt]:
    """As tokens; PromptError before anything runs."""
    from specedge.benchmarks.measure import Prompt

    found = []
    for name, prompt in given:
        tokens = pipeline.prompts.tokens_of(prompt, special_tokens)
        found.append(Prompt(name, _text(pipeline, prompt), tokens))
    return found


def _text(pipeline: Pipeline, prompt: UserPrompt) -> str:
    """A prompt as people read it."""
    if isinstance(prompt, str):
        return prompt
    messages = [one for one in prompt if not isinstance(one, int)]
    if messages:
        return "\n".join(str(message["content"]) for message in messages)
    tokens = [one for one in prompt if isinstance(one, int)]
    return str(pipeline.tokenizer.decode(tokens, skip_special_tokens=False))


def _measure(
    pipeline: Pipeline,
    prompts: Sequence[Prompt],
    some: Sequence[Setting],
    repeats: int,
    request: dict[str, Any],
) -> Measured:
    from specedge.benchmarks.measure import measure

    with options.usage_errors(), progress.told("measuring") as tell:
        return measure(pipeline, prompts, some, repeats, tell, **request)


def _report(
    pipeline: Pipeline,
    prompts: list[Prompt],
    measured: Measured,
    request: dict[str, Any],
    facts: dict[str, Any],
) -> Any:
    from specedge.benchmarks.acceptance import acceptances
    from specedge.benchmarks.measure import PLAIN_SETTING
    from specedge.benchmarks.summary import losing, summarise
    from specedge.cli.bench_output import Report
    from specedge.runtime.text.bad_words import sampling_of

    distribution = GenerationRequest(**request, ignore_eos=True)
    sampling = sampling_of(distribution, pipeline.bundle, pipeline.tokenizer)
    alphas = {}
    for i, prompt in enumerate(prompts):
        text = measured.texts[PLAIN_SETTING, i]
        alphas[i] = acceptances(pipeline, prompt.tokens, text.tokens[: text.kept], sampling)
    table = pipeline.costs.table if pipeline.costs.table.origin == "tune" else None
    figures = summarise(measured, prompts, alphas, table, sampling.greedy)
    return Report(facts, figures, losing(figures), prompts, measured.runs)


def _facts(
    pipeline: Pipeline,
    device: str,
    threads: int | None,
    repeats: int,
    request: dict[str, Any],
) -> dict[str, Any]:
    """What was measured, and on what."""
    from specedge.cpu_count import cpu_count
    from specedge.runtime.backend.ort import onnxruntime
    from specedge.runtime.planning.cost_files import processor
    from specedge.version import __version__

    bundle = pipeline.bundle
    default = GenerationRequest()
    return {
        "target": bundle.target.source.id,
        "draft": bundle.draft and bundle.draft.source.id,
        "device": device,
        "processor": processor(),
        "threads": threads or cpu_count(),
        "ops": getattr(pipeline.target, "ops", "auto"),
        "specedge": __version__,
        "onnxruntime": str(onnxruntime().__version__),
        "costs_of_held_out": "tune" if pipeline.costs.table.origin == "tune" else "this run",
        "repeats": repeats,
    } | {
        name: value
        for name, value in request.items()
        if name in ("max_new_tokens", "temperature", "seed")
        or (value or None) != (getattr(default, name) or None)
    }
