"""Commands `specedge list` and `specedge remove`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from specedge.bundle import Bundle
from specedge.bundle_library import LibraryEntry
from specedge.cli import options
from specedge.cli.terminal import sanitize_line
from specedge.errors import BundleError


@click.command("list")
@options.as_json
def list_(as_json: bool) -> None:
    """List the bundles on this machine; `*` marks the default."""
    from specedge import bundle_library
    from specedge.bundle import store

    for path in bundle_library.remove_stale_folders():
        click.echo(sanitize_line(f"removed an unfinished export: {path}"), err=True)
    entries = bundle_library.entries()
    if as_json:
        click.echo(json.dumps([_as_json(entry) for entry in entries], ensure_ascii=False, indent=1))
    else:
        _print(entries)
    if not any(entry.is_default for entry in entries):
        try:
            folder = Bundle.read(store.find_bundle()).folder
            click.echo(sanitize_line(f"default bundle: {folder}"), err=True)
        except BundleError as error:
            click.echo(sanitize_line(f"specedge: default bundle: {error}"), err=True)


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def remove(names: tuple[str, ...], yes: bool) -> None:
    """Remove bundles.

    NAME is a name shown by 'specedge list', or a bundle folder.
    """
    from specedge import bundle_library

    folders = list(dict.fromkeys(bundle_library.find_removable(name) for name in names))
    if not (yes or _confirmed(folders)):
        click.echo("specedge: nothing was removed", err=True)
        raise click.exceptions.Exit(1)
    for folder in folders:
        _remove(folder)


def _confirmed(folders: list[Path]) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError("cannot ask for confirmation without a terminal; use --yes")
    for folder in folders:
        click.echo(sanitize_line(str(folder)), err=True)
    subject = "this bundle" if len(folders) == 1 else f"these {len(folders)} bundles"
    return click.confirm(f"Remove {subject}?", err=True)


def _remove(folder: Path) -> None:
    from specedge import bundle_library
    from specedge.bundle import store

    before = store.last_exported()
    bundle_library.remove(folder)
    click.echo(sanitize_line(f"removed {folder}"), err=True)
    if before != store.last_exported():
        used = store.find_bundle()
        name = "the embedded pair" if used == store.embedded_folder() else str(used)
        click.echo(sanitize_line(f"the default bundle is now {name}"), err=True)


def _print(entries: list[LibraryEntry]) -> None:
    rows: list[tuple[str, ...]] = [("", "NAME", "TARGET", "DRAFT", "SIZE", "OPS", "LICENSE")]
    rows += [_row(entry) for entry in entries]
    shown = [row for row in rows if len(row) > 3]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo(sanitize_line("  ".join([*cells[: len(row) - 1], row[-1]]).rstrip()))


def _row(entry: LibraryEntry) -> tuple[str, ...]:
    """Return a row of the table; an unreadable bundle has its error as the last cell."""
    start = ("*" if entry.is_default else "", entry.name)
    if entry.bundle is None:
        return (*start, f"error: {entry.error}")
    models = entry.bundle.models
    size = f"{entry.size / 1e6:.1f} MB"
    ops = _both(", ".join(model.parity) for model in models.values())
    licenses = _both(model.source.license or "not stated" for model in models.values())
    ids = (models[role].source.id if role in models else "none" for role in ("target", "draft"))
    return (*start, *ids, size, ops, licenses)


def _both(values: Iterable[str]) -> str:
    """Return the values of target and draft, or one value if they are equal."""
    return " / ".join(dict.fromkeys(values))


def _as_json(entry: LibraryEntry) -> dict[str, Any]:
    from specedge.strict_json import to_plain

    document: dict[str, Any] = {
        "name": entry.name,
        "folder": str(entry.folder),
        "size": entry.size,
        "is_default": entry.is_default,
        "error": entry.error,
    }
    if bundle := entry.bundle:
        for name in ("format", "num_draft_tokens", "context_length"):
            document[name] = getattr(bundle, name)
        document["draft"] = None
        for role, model in bundle.models.items():
            document[role] = to_plain(model.source) | {"ops": list(model.parity)}
    return document
