"""`specedge generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import near_ties, options, ray_process, replaying, trace
from specedge.cli.terminal import counted, lines, one_line
from specedge.errors import SpecEdgeError
from specedge.request import AUTO, DrafterName

if TYPE_CHECKING:
    from specedge.runtime.requests.pipeline import Pipeline
    from specedge.runtime.requests.stream import Generation, Stream


@click.command()
@click.argument("prompt", required=False)
@options.bundle
@options.request
@options.option("logprobs")
@options.option("remember")
@click.option("--chat", is_flag=True, help="PROMPT is a question; ask it by the chat template.")
@click.option("--system", metavar="TEXT", help="With --chat, a system message before it.")
@click.option("--trace", "traced", is_flag=True, help="Mark what became of each token.")
@click.option("--explain", is_flag=True, help="Say on stderr why each round drafted what it did.")
@click.option("--replay", metavar="FILE", help="Repeat the rounds of a run that printed --json.")
@click.option("--prompts", metavar="FILE", help="Continue each prompt of a file; `-` is stdin.")
@options.form
@click.option("--output", metavar="FILE", help="With --prompts, write there. [default: stdout]")
@click.option("--overwrite", is_flag=True, help="With --prompts, replace the output file.")
@click.option("--resume", is_flag=True, help="With --output, keep what it has and do the rest.")
@click.option(
    "--ray",
    "address",
    is_flag=False,
    flag_value=ray_process.ANY,
    metavar="[ADDRESS]",
    help="With --prompts, run on this Ray cluster, or on the one that is found.",
)
@click.option(
    "--ray-actors",
    "num_actors",
    type=click.IntRange(1),
    help="With --ray, load the pair so often. [default: as often as it fits]",
)
@options.device
@options.draft_device
@options.threads
@options.ops
@options.as_json
def generate(
    prompt: str | None,
    bundle: str | None,
    chat: bool,
    system: str | None,
    traced: bool,
    explain: bool,
    replay: str | None,
    prompts: str | None,
    form: str | None,
    output: str | None,
    overwrite: bool,
    resume: bool,
    address: str | None,
    num_actors: int | None,
    device: str,
    draft_device: str | None,
    threads: int | None,
    ops: str,
    as_json: bool,
    **request: Any,
) -> None:
    """Continue PROMPT with the target's own tokens; `-` reads it from standard input.

    Decoding is greedy unless --temperature is given: the sampling that the model's authors
    recommend, which 'specedge inspect' shows, applies to 'specedge serve' alone.
    """
    if (prompt is None) == (prompts is None):
        raise click.UsageError("give either a PROMPT or --prompts FILE")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat")
    if prompts is None and (form is not None or output is not None or overwrite or resume):
        raise click.UsageError("--format, --output, --overwrite and --resume need --prompts")
    if address is not None and prompts is None:
        raise click.UsageError("--ray needs --prompts")
    if num_actors is not None and address is None:
        raise click.UsageError("--ray-actors needs --ray")
    models = {
        "bundle": bundle,
        "device": device,
        "draft_device": draft_device,
        "threads": threads,
        "ops": ops,
    }
    if prompts is not None:
        if traced or as_json or explain or replay is not None:
            raise click.UsageError("--trace, --json, --explain and --replay are for one PROMPT")
        output = "-" if output is None else output
        ray = None if address is None else (address, num_actors)
        _many(prompts, form, chat, system, output, overwrite, resume, ray, models, request)
    elif prompt is not None:
        if request["logprobs"] is not None and not as_json:
            raise click.UsageError("--logprobs needs --json or --prompts")
        if replay is not None:
            request |= replaying.options(replay, request["num_draft_tokens"])
        _one(prompt, chat, system, traced, explain, as_json, models, request)


def _many(
    prompts: str,
    form: str | None,
    chat: bool,
    system: str | None,
    output: str,
    overwrite: bool,
    resume: bool,
    ray: tuple[str, int | None] | None,
    models: dict[str, Any],
    request: dict[str, Any],
) -> None:
    from dataclasses import replace

    from specedge.bundle import Bundle, store
    from specedge.cli import batch, cluster
    from specedge.cli.prompts import read
    from specedge.cli.results import NEW, OVERWRITE, RESUME, remaining
    from specedge.runtime.requests.items import asked_of

    if resume and (overwrite or output == "-"):
        raise click.UsageError("--resume needs --output, and goes on where --overwrite begins anew")
    way = RESUME if resume else OVERWRITE if overwrite else NEW
    if output != "-":
        options.check_output(output, [prompts], overwrite=way != NEW)
    told = Bundle.read(store.find_bundle(models["bundle"])).digest(), models["ops"]
    items = [
        replace(item, asked=asked_of(item, *told))
        for item in read(prompts, form, chat, system, request)
    ]
    if way == RESUME:
        items = remaining(items, output, seeded=request["seed"] is not None)
    stdout = sys.stdout  # Ray prints there, too, unless it is kept from it
    running: AbstractContextManager[Iterator[dict[str, Any]]]
    if ray is None:
        running = nullcontext(batch.answers(options.load(**models), items))
    else:
        running = cluster.answers(*ray, models, items)
    with running as results:
        well = batch.run(results, len(items), output, way, stdout)
    if not well:
        raise click.exceptions.Exit(1)


def _one(
    prompt: str,
    chat: bool,
    system: str | None,
    traced: bool,
    explain: bool,
    as_json: bool,
    models: dict[str, Any],
    request: dict[str, Any],
) -> None:
    pipeline = options.load(**models)
    text = options.read_prompt(prompt, chat)
    with options.usage_errors():
        if chat:
            stream = pipeline.stream_chat(options.messages(text, system), **request)
        else:
            stream = pipeline.stream(text, **request)
    try:
        _print(stream, traced, as_json)
    finally:
        _note_costs(pipeline, stream, explain)
        click.echo(one_line(_summary(stream.generation, request)), err=True)


def _note_costs(pipeline: Pipeline, stream: Stream, explain: bool) -> None:
    """Say why stored costs were not used, and, if asked, why rounds were as they were."""
    from specedge.runtime.planning.explain import explain as explained

    if pipeline.costs.note:
        click.echo(one_line(f"note: {pipeline.costs.note}"), err=True)
    for line in explained(stream.plan, stream.generation.rounds) if explain else ():
        click.echo(lines(line), err=True)


def _print(stream: Stream, traced: bool, as_json: bool) -> None:
    """Print pieces as they come; also on Ctrl-C, what there is ends with a new line."""
    colours = trace.coloured()
    if traced and not as_json:
        started = stream.generation
        legend = trace.legend(started.num_draft_tokens, colours)
        click.echo(legend + (f"; lossy ({started.lossy})" if started.lossy else ""), err=True)
    failed = False
    try:
        for piece in stream.traced():
            if traced and not as_json:
                click.echo(trace.marked(piece, colours), nl=False, color=colours)
            elif not as_json:
                click.echo("".join(span.text for span in piece), nl=False)
    except SpecEdgeError:
        failed = True  # under --json the error is the one object on stdout
        raise
    finally:
        if not (failed and as_json):
            click.echo(_as_json(stream.generation, traced) if as_json else "")


def _as_json(generation: Generation, traced: bool) -> str:
    from specedge.runtime.requests.stats import as_dict

    hidden = {"rounds"} if traced else {"rounds", "spans"}
    fields = {name: value for name, value in vars(generation).items() if name not in hidden}
    fields["stats"] = as_dict(generation.stats)
    if generation.logprobs is not None:
        fields["logprobs"] = [vars(one) for one in generation.logprobs]
    fields["near_ties"] = [vars(tie) for tie in generation.near_ties]
    if traced:
        fields["spans"] = [vars(span) for span in generation.spans]
    return json.dumps(fields, ensure_ascii=False, indent=1)


def _summary(generation: Generation, request: dict[str, Any]) -> str:
    stats = generation.stats
    seconds = stats.decode_seconds + stats.prefill_seconds
    parts = [
        f"{counted(stats.num_new_tokens, 'token')} in {seconds:.2f} s ({generation.finish_reason})",
        f"K = {generation.num_draft_tokens}",
    ]
    if generation.drafter not in (DrafterName.MODEL, AUTO):
        parts.append(f"drafter {generation.drafter}")
    if stats.tokens_per_round is not None:
        parts.append(f"{stats.tokens_per_round:.2f} tokens a round")
    if stats.accepted_over_tested is not None:
        parts.append(f"{stats.accepted_over_tested:.0%} of tested draft tokens accepted")
    if generation.lossy:
        parts.append(f"lossy ({generation.lossy})")
    if request["temperature"]:
        parts.append(f"seed {generation.seed}")
    return "; ".join([", ".join(parts), *near_ties.lines(generation, request["exact"])])
