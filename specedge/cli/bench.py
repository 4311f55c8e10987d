"""Command `specedge bench`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specedge.benchmarks.prompts import SETS
from specedge.cli import options, terminal
from specedge.cli.terminal import sanitize
from specedge.errors import ContextLengthError
from specedge.request import AUTO, DrafterName, GenerationRequest
from specedge.sampling_options import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    from specedge.benchmarks.measure import BenchmarkPrompt, BenchmarkRuns
    from specedge.runtime.requests.pipeline import Pipeline
    from specedge.runtime.text.prompts import UserPrompt

_DRAFTERS = (DrafterName.MODEL, DrafterName.SUFFIX, DrafterName.CHAIN, AUTO)
_DEFAULT_MAX_K = 8


def _lengths(
    context: click.Context, option: click.Parameter, value: str | None
) -> list[int] | None:
    """Parse numbers and ranges separated by commas, such as 1-4,8."""
    return None if value is None else [k for part in value.split(",") for k in _range(part)]


def _range(part: str) -> Iterator[int]:
    first, dash, last = part.strip().partition("-")
    low, high = ((text.isascii() and text.isdigit() and int(text)) or 0 for text in (first, last))
    high = high if dash else low
    if not 1 <= low <= high <= MAX_DRAFT_TOKENS:
        raise click.BadParameter(
            f"'{part}' must be a number or a range from 1 to {MAX_DRAFT_TOKENS}, such as 4 or 1-8"
        )
    yield from range(low, high + 1)


@click.command()
@options.bundle
@options.device
@options.draft_device
@click.option(
    "--set",
    "sets",
    type=click.Choice(tuple(SETS)),
    multiple=True,
    help="Built-in prompts; may be repeated.  [default: all, or none with --prompts]",
)
@click.option("--prompts", metavar="FILE", help="File of prompts; `-` is stdin.")
@options.prompt_format
@click.option(
    "--drafter",
    "drafters",
    metavar="NAME",
    multiple=True,
    help=f"Drafter; may be repeated.  [default: {', '.join(_DRAFTERS)}]",
)
@click.option(
    "-k",
    "--num-draft-tokens",
    "lengths",
    callback=_lengths,
    metavar="LIST",
    help=f"Draft tokens per round, such as 1-4,8.  [default: 1-{_DEFAULT_MAX_K}]",
)
@click.option(
    "-n", "--max-new-tokens", type=click.IntRange(1), default=64, show_default=True,
    help="Maximum number of new tokens; repetitive text is truncated.",
)  # fmt: skip
@options.sampling_options
@click.option(
    "--seed", type=click.IntRange(0, 2**63), default=0, show_default=True,
    help="Seed of the first prompt, incremented for each further prompt.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(1), default=3, show_default=True,
    help="Timed runs of each setting and prompt.",
)  # fmt: skip
@options.request_option("special_tokens")
@options.request_option("decoder_prefix")
@options.threads
@options.ops
@options.as_json
@click.option("--csv", metavar="FILE", help="Write the results as CSV, one line per setting.")
@click.option("--html", metavar="FILE", help="Write a self-contained HTML page with plots.")
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
def bench(
    sets: tuple[str, ...],
    prompts: str | None,
    form: str | None,
    drafters: tuple[str, ...],
    lengths: list[int] | None,
    max_new_tokens: int,
    seed: int,
    repeats: int,
    as_json: bool,
    csv: str | None,
    html: str | None,
    overwrite: bool,
    **distribution: Any,
) -> None:
    """Benchmark drafters and draft lengths.

    Each setting is compared with plain decoding and with the speed-up that formulas predict.
    """
    from specedge.benchmarks.measure import measure, settings
    from specedge.cli import bench_output, bench_page, plots
    from specedge.runtime.drafters.registry import NEEDS_MODEL

    models = options.pop_model_options(distribution)
    request = distribution | {"max_new_tokens": max_new_tokens, "seed": seed}
    with options.usage_errors():
        for name in drafters or _DRAFTERS:
            GenerationRequest(**request, drafter=name)
    outputs = [("--csv", csv, bench_output.csv_text), ("--html", html, bench_page.page)]
    named = {flag: path for flag, path, _ in outputs if path is not None}
    if html is not None:
        plots.require_matplotlib()
    _check_outputs(named, prompts, overwrite)
    prompt_inputs = _read(sets, prompts, form)
    pipeline = options.load_pipeline(**models)
    without_model = pipeline.bundle.draft is None
    names = drafters or [n for n in _DRAFTERS if not (without_model and n in NEEDS_MODEL)]
    for name in names:
        pipeline.drafters.check(name)
    tokens = _prompts(pipeline, prompt_inputs, request["special_tokens"])
    ks = lengths or range(1, min(_DEFAULT_MAX_K, pipeline.max_planned_tokens) + 1)
    with options.usage_errors(), terminal.progress_reports("measuring") as show:
        measured = measure(pipeline, tokens, settings(names, ks), repeats, show, **request)
    devices = " and ".join(dict.fromkeys(filter(None, (models["device"], models["draft_device"]))))
    conditions = _conditions(pipeline, devices, models["threads"], repeats, request)
    report = _report(pipeline, tokens, measured, request, conditions)
    click.echo(
        bench_output.json_text(report) if as_json else sanitize(bench_output.table_text(report))
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
            raise click.UsageError(f"{other} and {flag} are the same file; specify two")


def _read(
    sets: Sequence[str], prompts: str | None, form: str | None
) -> list[tuple[str, UserPrompt]]:
    """Return each prompt with the name of its set; raise click.UsageError for a bad file."""
    from specedge.cli.prompts import read_prompt_texts

    if form and prompts is None:
        raise click.UsageError("--format requires --prompts")
    names = sets or (() if prompts is not None else SETS)
    named_prompts: list[tuple[str, UserPrompt]] = [
        (name, text) for name in dict.fromkeys(names) for text in SETS[name]
    ]
    if prompts is not None:
        name = "standard input" if prompts == "-" else Path(prompts).name
        named_prompts += [(name, prompt) for prompt in read_prompt_texts(prompts, form)]
    return named_prompts


def _prompts(
    pipeline: Pipeline,
    named_prompts: Sequence[tuple[str, UserPrompt]],
    special_tokens: bool = False,
) -> list[BenchmarkPrompt]:
    """Return prompts as tokens; raise PromptError before any of them runs."""
    from specedge.benchmarks.measure import BenchmarkPrompt

    tokenized = []
    for name, prompt in named_prompts:
        try:
            tokens = pipeline.prompts.tokens_of(prompt, special_tokens)
        except ContextLengthError as error:
            if prompt not in SETS.get(name, ()):
                raise
            bundle = pipeline.bundle
            raise ContextLengthError(
                f"a built-in prompt of the set {name} has more than the {bundle.max_prompt_length} "
                f"tokens that {bundle.target.source.id} reads; specify prompts that fit by "
                "--prompts"
            ) from error
        tokenized.append(BenchmarkPrompt(name, _text(pipeline, prompt), tokens))
    return tokenized


def _text(pipeline: Pipeline, prompt: UserPrompt) -> str:
    """Return a prompt as text."""
    if isinstance(prompt, str):
        return prompt
    messages = [part for part in prompt if not isinstance(part, int)]
    if messages:
        return "\n".join(str(message["content"]) for message in messages)
    tokens = [part for part in prompt if isinstance(part, int)]
    return str(pipeline.tokenizer.decode(tokens, skip_special_tokens=False))


def _report(
    pipeline: Pipeline,
    prompts: list[BenchmarkPrompt],
    measured: BenchmarkRuns,
    request: dict[str, Any],
    conditions: dict[str, Any],
) -> Any:
    from specedge.benchmarks.acceptance import acceptances
    from specedge.benchmarks.measure import PLAIN_SETTING
    from specedge.benchmarks.summary import losing, summarize
    from specedge.cli.bench_output import BenchmarkReport
    from specedge.runtime.text.bad_words import resolve_sampling

    distribution = GenerationRequest(**request, ignore_eos=True)
    sampling = resolve_sampling(distribution, pipeline.bundle, pipeline.tokenizer)
    alphas = {}
    for i, prompt in enumerate(prompts):
        text = measured.texts[PLAIN_SETTING, i]
        first, source = pipeline.prompts.start(
            prompt.tokens, decoder_prefix=distribution.decoder_prefix
        )
        alphas[i] = acceptances(pipeline, first, text.tokens[: text.kept], sampling, source)
    table = pipeline.costs.table if pipeline.costs.table.origin == "tune" else None
    figures = summarize(measured, prompts, alphas, table, sampling.greedy)
    return BenchmarkReport(conditions, figures, losing(figures), prompts, measured.runs)


def _conditions(
    pipeline: Pipeline,
    device: str,
    threads: int | None,
    repeats: int,
    request: dict[str, Any],
) -> dict[str, Any]:
    """Return the conditions of the benchmark."""
    from specedge.cpu_count import cpu_count, processor_name
    from specedge.runtime.backend.ort import onnxruntime
    from specedge.version import __version__

    bundle = pipeline.bundle
    default = GenerationRequest()
    return {
        "target": bundle.target.source.id,
        "draft": bundle.draft and bundle.draft.source.id,
        "device": device,
        "processor": processor_name(),
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
