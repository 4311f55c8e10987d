"""Command `specedge serve`."""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING

import click

from specedge.bundle import store
from specedge.cli import options
from specedge.cli.terminal import pluralize, sanitize_line
from specedge.errors import MissingExtraError

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
    "--model-name",
    metavar="NAME",
    help="Model name reported by the API.  [default: the target's id]",
)
@click.option(
    "--slots",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Number of requests that run at a time, each with its own KV cache.",
)
@click.option(
    "--max-length",
    type=click.IntRange(2),
    help="Maximum number of tokens of a text, prompt included.  [default: the context length]",
)
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    help="Number of requests that may wait for a slot; more are refused with status 429.",
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
    "--cors",
    metavar="ORIGIN",
    multiple=True,
    help="Allow requests from web pages of this origin; may be repeated.",
)
@click.option(
    "--allow-host",
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
    help="Sampling defaults: auto takes the model's generation config, none the defaults of "
    "OpenAI's API.",
)
@options.device
@options.draft_device
@options.threads
@options.ops
def serve(
    bundle: str | None,
    host: str,
    port: int,
    model_name: str | None,
    slots: int,
    max_length: int | None,
    queue: int,
    timeout: float,
    grace: int,
    max_body: int,
    cors: tuple[str, ...],
    allow_host: tuple[str, ...],
    generation_config: str,
    device: str,
    draft_device: str | None,
    threads: int | None,
    ops: str,
) -> None:
    """Serve a bundle with an OpenAI-compatible API; $SPECEDGE_API_KEY sets an API key."""
    try:
        from specedge.serve import app, middleware, server
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed: pip install 'specedge[serve]'"
        ) from error
    key = os.environ.get(KEY) or None
    listening = server.listen(host, port)  # before the pair is loaded, which takes a while
    with listening, options.usage_errors():
        is_loopback = ipaddress.ip_address(listening.getsockname()[0]).is_loopback
        if key is None and not is_loopback and not allow_host:
            raise click.UsageError(
                f"other machines, and web pages by DNS rebinding, could use the server on "
                f"{host}; set ${KEY}, or name the hosts that clients use with "
                "--allow-host"
            )
        if bundle is None:
            bundle = os.environ.get(store.VARIABLE) or None
        last_exported = store.last_exported() if bundle is None else None
        folder = os.fspath(store.embedded_folder()) if bundle is None else bundle
        pipeline = options.load_pipeline(
            folder, device, threads, ops, draft_device, slots, max_length
        )
        settings = app.ServerSettings(
            model=model_name,
            max_waiting=queue,
            timeout=timeout,
            max_body=max_body,
            api_key=key,
            origins=cors,
            generation_config=generation_config,
            hosts=(*middleware.LOOPBACK, host, *allow_host) if allow_host or key is None else (),
        )
        url = server.base_url(listening)

        def ready() -> None:
            click.echo(sanitize_line(_started(url, model_name, pipeline, ops)), err=True)
            defaults = app.model_defaults(pipeline.bundle.default_sampling)
            if defaults and generation_config == "auto":
                told = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
                click.echo(f"note: sampling defaults of the model: {told}", err=True)
            if key is None and not is_loopback:
                click.echo(
                    f"note: anyone who reaches {host} can use the server; set ${KEY}", err=True
                )
            if last_exported is not None:
                note = f"note: to serve the pair exported last, give --bundle {last_exported}"
                click.echo(sanitize_line(note), err=True)

        server.serve(app.make_app(pipeline, settings), listening, grace, ready)
    click.echo("specedge: stopped", err=True)


def _started(url: str, name: str | None, pipeline: Pipeline, ops: str) -> str:
    from specedge.runtime.backend.memory import format_bytes
    from specedge.runtime.requests.loading import memory_of

    slots, length = len(pipeline.slots.all), pipeline.bundle.context_length
    need = memory_of(pipeline.bundle, ops, slots, length)
    folder = pipeline.bundle.folder
    origin = "the embedded pair" if folder == store.embedded_folder() else f"bundle {folder}"
    return (
        f"specedge: {url} serves {name or pipeline.bundle.target.source.id} ({origin}) in "
        f"{pluralize(slots, 'slot')} of {length} tokens and {format_bytes(need.slot)} each; "
        f"memory up to {format_bytes(need.peak)}"
    )
