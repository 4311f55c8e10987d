"""Command `specedge generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options, trace
from specedge.cli.terminal import pluralize, sanitize, sanitize_line
from specedge.cli.trace import near_tie_lines
from specedge.errors import SpecEdgeError
from specedge.request import AUTO, DrafterName, GenerationRequest
from specedge.strict_json import JsonError, parse

MAX_REPLAY = 2**26  # bytes of a file with rounds to replay

if TYPE_CHECKING:
    from specedge.runtime.requests.stream import Generation, Stream


@click.command()
@click.argument("prompt", required=False)
@options.bundle
@options.request_options
@options.request_option("logprobs")
@options.request_option("remember")
@click.option("--chat", is_flag=True, help="Apply the chat template to PROMPT.")
@click.option("--system", metavar="TEXT", help="System message, with --chat.")
@click.option("--trace", "traced", is_flag=True, help="Mark accepted, recovered and bonus tokens.")
@click.option("--explain", is_flag=True, help="Print the reasons for the choice of drafter and K.")
@click.option(
    "--replay", metavar="FILE", help="Replay the rounds of a run saved with --json; `-` is stdin."
)
@click.option("--prompts", metavar="FILE", help="File of prompts; `-` is stdin.")
@options.prompt_format
@click.option("--output", metavar="FILE", help="Output file, with --prompts.  [default: stdout]")
@click.option("--overwrite", is_flag=True, help="Replace the output file, with --prompts.")
@click.option(
    "--resume", is_flag=True, help="Keep completed lines of --output and generate the rest."
)
@click.option(
    "--ray",
    "address",
    is_flag=False,
    flag_value=options.ANY_CLUSTER,
    metavar="[ADDRESS]",
    help="Run on a Ray cluster, with --prompts.",
)
@click.option(
    "--ray-actors",
    "num_actors",
    type=click.IntRange(1),
    help="Number of Ray actors.  [default: as many as fit]",
)
@options.execution
@options.as_json
def generate(
    prompt: str | None,
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
    as_json: bool,
    **request: Any,
) -> None:
    """Generate a continuation of PROMPT.

    `-` reads the prompt from standard input.

    The output is the target's greedy text at temperature 0, and follows the target's distribution
    otherwise. Decoding is greedy unless --temperature is set: the sampling defaults recommended by
    the model's authors, shown by 'specedge inspect', apply to 'specedge serve' only.
    """
    if (prompt is None) == (prompts is None):
        raise click.UsageError("specify either PROMPT or --prompts FILE")
    if system is not None and not chat:
        raise click.UsageError("--system requires --chat")
    if prompts is None and (form is not None or output is not None or overwrite or resume):
        raise click.UsageError("--format, --output, --overwrite and --resume require --prompts")
    if address is not None and prompts is None:
        raise click.UsageError("--ray requires --prompts")
    if num_actors is not None and address is None:
        raise click.UsageError("--ray-actors requires --ray")
    models = options.pop_model_options(request)
    if prompts is not None:
        if traced or as_json or explain or replay is not None:
            raise click.UsageError(
                "--trace, --json, --explain and --replay require a single PROMPT"
            )
        output = "-" if output is None else output
        ray = None if address is None else (address, num_actors)
        _many(prompts, form, chat, system, output, overwrite, resume, ray, models, request)
    elif prompt is not None:
        if request["logprobs"] is not None and not as_json:
            raise click.UsageError("--logprobs requires --json or --prompts")
        if replay is not None:
            request |= _replay_options(replay, request["num_draft_tokens"])
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
    from specedge.cli.batch import NEW, OVERWRITE, RESUME, remaining
    from specedge.cli.prompts import read_prompts
    from specedge.runtime.requests.batch import check_items, item_fingerprint, run_items
    from specedge.runtime.requests.loader import batch_slots

    if resume and (overwrite or output == "-"):
        raise click.UsageError("--resume requires --output and excludes --overwrite")
    mode = RESUME if resume else OVERWRITE if overwrite else NEW
    if output != "-":
        options.check_output(output, [prompts], overwrite=mode != NEW)
    fingerprint = Bundle.read(store.find_bundle(models["bundle"])).digest(), models["ops"]
    items = [
        replace(item, fingerprint=item_fingerprint(item, *fingerprint))
        for item in read_prompts(prompts, form, chat, system, request)
    ]
    if mode == RESUME:
        items = remaining(items, output, seeded=request["seed"] is not None)
    stdout = sys.stdout  # redirected while Ray is connected
    running: AbstractContextManager[Iterator[dict[str, Any]]]
    if ray is None:
        placement = {name: models[name] for name in ("device", "draft_device", "ops")}
        slots = batch_slots(models["bundle"], len(items), **placement)
        pipeline = options.load_pipeline(**models, slots=slots)
        if mode == RESUME:
            batch.restore_costs(pipeline, output)
        check_items(items, pipeline.bundle, pipeline.drafters)
        running = nullcontext(run_items(pipeline, items))
    else:
        running = cluster.generate_results(*ray, models, items)
    with running as results:
        succeeded = batch.write_results(results, len(items), output, mode, stdout)
    if not succeeded:
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
    pipeline = options.load_pipeline(**models)
    text = options.read_prompt(prompt, chat)
    with options.usage_errors():
        if chat:
            stream = pipeline.stream_chat(options.messages(text, system), **request)
        else:
            stream = pipeline.stream(text, **request)
    try:
        _print(stream, traced, as_json)
    finally:
        if explain:
            _explain(stream)
        click.echo(sanitize_line(_summary(stream.generation, request)), err=True)


def _explain(stream: Stream) -> None:
    """Print the reasons of the plan."""
    from specedge.runtime.planning.explanation import explain

    for line in explain(stream.plan, stream.generation.rounds):
        click.echo(sanitize(line), err=True)


def _print(stream: Stream, traced: bool, as_json: bool) -> None:
    """Print text as it is generated; on Ctrl-C, end the output with a newline."""
    colors = trace.has_colors()
    if traced and not as_json:
        started = stream.generation
        legend = trace.legend(started.num_draft_tokens, colors)
        click.echo(legend + (f"; lossy ({started.lossy})" if started.lossy else ""), err=True)
    failed = False
    try:
        for piece in stream.traced():
            if traced and not as_json:
                click.echo(trace.mark(piece, colors), nl=False, color=colors)
            elif not as_json:
                click.echo("".join(span.text for span in piece), nl=False)
    except SpecEdgeError:
        failed = True  # with --json the error is the only object on stdout
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
        fields["logprobs"] = [vars(entry) for entry in generation.logprobs]
    fields["near_ties"] = [vars(tie) for tie in generation.near_ties]
    if traced:
        fields["spans"] = [span.to_json() for span in generation.spans]
    return json.dumps(fields, ensure_ascii=False, indent=1)


def _summary(generation: Generation, request: dict[str, Any]) -> str:
    stats = generation.stats
    seconds = stats.decode_seconds + stats.prefill_seconds
    parts = [
        f"{pluralize(stats.num_new_tokens, 'token')} in {seconds:.2f} s "
        f"({generation.finish_reason})",
        f"K = {generation.num_draft_tokens}",
    ]
    if generation.drafter not in (DrafterName.MODEL, AUTO):
        parts.append(f"drafter {generation.drafter}")
    if stats.tokens_per_round is not None:
        parts.append(f"{stats.tokens_per_round:.2f} tokens per round")
    if stats.accepted_over_tested is not None:
        parts.append(f"acceptance rate {stats.accepted_over_tested:.0%}")
    if generation.lossy:
        parts.append(f"lossy ({generation.lossy})")
    if request["temperature"]:
        parts.append(f"seed {generation.seed}")
    return "; ".join([", ".join(parts), *near_tie_lines(generation, request["exact"])])


def _replay_options(name: str, num_draft_tokens: int | str) -> dict[str, Any]:
    """Return the options that repeat the rounds of a file written with --json."""
    if num_draft_tokens != AUTO:
        raise click.UsageError("--replay excludes --num-draft-tokens")
    try:
        document = parse(options.read_text(name, MAX_REPLAY))
        if not isinstance(document, dict) or "plan" not in document:
            raise JsonError("has no 'plan'; specify the output of 'specedge generate --json'")
        GenerationRequest(replay=document["plan"])
    except ValueError as error:
        raise click.UsageError(f"{name}: {error}") from error
    return {"replay": document["plan"]}
