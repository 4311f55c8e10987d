"""Command `specedge serve`."""

from __future__ import annotations

import ipaddress
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specedge.bundle import store
from specedge.chat_templates import read_template
from specedge.cli import options
from specedge.cli.terminal import pluralize, sanitize_line
from specedge.errors import MissingExtraError
from specedge.strict_json import JsonError, parse

if TYPE_CHECKING:
    from specedge.runtime.requests.pipeline import Pipeline

KEY = "SPECEDGE_API_KEY"


@click.command()
@click.option(
    "--bundle",
    metavar="FOLDER",
    help="Folder of the bundle.  [default: $SPECEDGE_BUNDLE, else the embedded pair]",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on; 0 selects a free port.",
)
@click.option(
    "--served-model-name",
    "--model-name",
    "model_names",
    metavar="NAME",
    multiple=True,
    help="Model name reported by the API; further ones are aliases.  [default: the target's id]",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Reject requests with unknown fields or model names, instead of ignoring them.",
)
@click.option(
    "--chat-template",
    type=click.Path(exists=True, dir_okay=False),
    help="File with a chat template, in Jinja or in the JSON format of tokenizer_config.json."
    "  [default: the bundle's]",
)
@click.option(
    "--chat-template-kwargs",
    metavar="JSON",
    help="Variables of the chat template for all requests, such as '{\"enable_thinking\": false}'.",
)
@click.option(
    "--reasoning-effort",
    metavar="NAME",
    help="Default of reasoning_effort: low, medium, high, or none to disable thinking.",
)
@click.option(
    "--reuse-sampled-tokens",
    is_flag=True,
    help="Reuse the sampled tokens of earlier answers in prompts that contain their text, for "
    "longer prefix matches. Such prompts may differ from the tokenizer's output.",
)
@click.option(
    "--access-log", is_flag=True, help="Log each request with token counts and throughput."
)
@click.option(
    "--slots",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Number of requests that run concurrently, each with its own KV cache.",
)
@click.option(
    "--max-length",
    type=click.IntRange(2),
    help="Maximum number of tokens of a text, including the prompt.  [default: the context length]",
)
@click.option(
    "--queue",
    "max_waiting",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    help="Number of requests that may wait for a slot; further ones get status 429.",
)
@click.option(
    "--timeout",
    type=options.FiniteRange(0, min_open=True),
    default=600,
    show_default=True,
    help="Seconds until a request is cancelled, including its wait for a slot.",
)
@click.option(
    "--grace",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Seconds that running requests have to finish after SIGTERM.",
)
@click.option(
    "--max-body",
    type=click.IntRange(1),
    default=2 * 2**20,
    show_default=True,
    help="Maximum size of a request's body in bytes.",
)
@click.option(
    "--allowed-origin",
    "--cors",
    "origins",
    metavar="ORIGIN",
    multiple=True,
    help="Allow requests from web pages of this origin, in addition to localhost; may be repeated.",
)
@click.option(
    "--allowed-host",
    "--allow-host",
    "allow_host",
    metavar="NAME",
    multiple=True,
    help="Allow requests for this host name, and from its web pages; may be repeated. Required"
    " without an API key on a non-loopback address.  [default: any with a key, else localhost]",
)
@click.option(
    "--generation-config",
    type=click.Choice(("auto", "none")),
    default="auto",
    show_default=True,
    help="Sampling defaults: auto uses the model's generation config, none the defaults of "
    "OpenAI's API.",
)
@options.execution
def serve(
    host: str,
    port: int,
    model_names: tuple[str, ...],
    chat_template: str | None,
    chat_template_kwargs: str | None,
    reasoning_effort: str | None,
    access_log: bool,
    slots: int,
    max_length: int | None,
    grace: int,
    allow_host: tuple[str, ...],
    **settings: Any,
) -> None:
    """Run an OpenAI-compatible server.

    If $SPECEDGE_API_KEY is set, clients must send it as their API key.
    """
    try:
        from specedge.serve import app, middleware, server
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed: pip install 'specedge[serve]'"
        ) from error
    models = options.pop_model_options(settings)
    key = os.environ.get(KEY) or None
    variables = _template_variables(chat_template_kwargs, reasoning_effort)
    if access_log:
        logging.basicConfig(format="%(asctime)s %(message)s")
        logging.getLogger("specedge.access").setLevel(logging.INFO)
    listening = server.listen(host, port)  # before the models are loaded, to fail early
    with listening, options.usage_errors():
        is_loopback = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
        if key is None and not is_loopback and not allow_host:
            raise click.UsageError(
                f"other machines, and web pages by DNS rebinding, could use the server on "
                f"{host}; set ${KEY}, or specify the host names that clients use with "
                "--allowed-host"
            )
        bundle = models["bundle"]
        if bundle is None:
            bundle = os.environ.get(store.VARIABLE) or None
        last_exported = store.last_exported() if bundle is None else None
        models["bundle"] = os.fspath(store.embedded_folder()) if bundle is None else bundle
        pipeline = options.load_pipeline(
            **models, slots=slots, max_length=max_length, with_notes=False
        )
        if chat_template is not None:
            pipeline.use_chat_template(_read_template(Path(chat_template)))
        model_name, aliases = next(iter(model_names), None), model_names[1:]
        server_settings = app.ServerSettings(
            model=model_name,
            aliases=aliases,
            template_variables=variables,
            api_key=key,
            **settings,
            hosts=(*middleware.LOOPBACK, host, *allow_host) if allow_host or key is None else (),
        )
        url = server.base_url(listening)

        def ready() -> None:
            click.echo(sanitize_line(_started(url, model_name, pipeline, models["ops"])), err=True)
            options.print_notes(pipeline)
            defaults = app.model_defaults(pipeline.bundle.default_sampling)
            if defaults and server_settings.generation_config == "auto":
                listed = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
                click.echo(f"note: sampling defaults of the model: {listed}", err=True)
            if key is None and not is_loopback:
                click.echo(
                    f"note: anyone who can connect to {host} can use the server; set ${KEY}",
                    err=True,
                )
            if last_exported is not None:
                note = f"note: to serve the last exported bundle, use --bundle {last_exported}"
                click.echo(sanitize_line(note), err=True)

        server.serve(app.make_app(pipeline, server_settings), listening, grace, ready)
    click.echo("specedge: stopped", err=True)


def _read_template(path: Path) -> str:
    """Return the chat template of a file."""
    try:
        template = read_template(path)
    except ValueError as error:
        raise click.UsageError(f"--chat-template {path} cannot be read: {error}") from error
    if template is None:
        raise click.UsageError(f"--chat-template {path} has no chat template")
    return template


def _template_variables(text: str | None, effort: str | None) -> dict[str, Any]:
    """Return the variables of the chat template for all requests."""
    from specedge.serve.requests import thinking_variables

    variables: dict[str, Any] = {}
    if effort is not None:
        variables = {"reasoning_effort": effort, **thinking_variables(effort != "none")}
    if text is not None:
        try:
            value = parse(text)
        except JsonError as error:
            raise click.UsageError(f"--chat-template-kwargs: {error}") from error
        if not isinstance(value, dict):
            raise click.UsageError("--chat-template-kwargs must be a JSON object")
        variables |= value
    return variables


def _started(url: str, name: str | None, pipeline: Pipeline, ops: str) -> str:
    from specedge.runtime.backend.memory import format_bytes
    from specedge.runtime.requests.loader import memory_of

    slots, length = len(pipeline.slots.all), pipeline.bundle.context_length
    need = memory_of(pipeline.bundle, ops, slots, length)
    folder = pipeline.bundle.folder
    origin = "the embedded pair" if folder == store.embedded_folder() else f"bundle {folder}"
    return (
        f"specedge: {url} serves {name or pipeline.bundle.target.source.id} ({origin}) in "
        f"{pluralize(slots, 'slot')} of {length} tokens and {format_bytes(need.slot)} each; "
        f"memory up to {format_bytes(need.peak)}"
    )
