"""`specedge list` and `specedge remove`."""

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
from specedge.cli.terminal import one_line
from specedge.errors import BundleError


@click.command("list")
@options.as_json
def list_(as_json: bool) -> None:
    """List the bundles on this machine; `*` marks the one used when none is named."""
    from specedge import bundle_library
    from specedge.bundle import store

    for path in bundle_library.remove_stale_folders():
        click.echo(one_line(f"removed what an unfinished export left: {path}"), err=True)
    found = bundle_library.entries()
    if as_json:
        click.echo(json.dumps([_as_json(entry) for entry in found], ensure_ascii=False, indent=1))
    else:
        _print(found)
    if not any(entry.is_default for entry in found):
        try:
            folder = Bundle.read(store.find_bundle()).folder
            click.echo(one_line(f"used when none is named: {folder}"), err=True)
        except BundleError as error:
            click.echo(one_line(f"specedge: the one used when none is named: {error}"), err=True)


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def remove(names: tuple[str, ...], yes: bool) -> None:
    """Remove bundles by the NAME that `list` shows, or by their folder."""
    from specedge import bundle_library

    folders = list(dict.fromkeys(bundle_library.find_removable(name) for name in names))
    if not (yes or _confirmed(folders)):
        click.echo("specedge: nothing was removed", err=True)
        raise click.exceptions.Exit(1)
    for folder in folders:
        _remove(folder)


def _confirmed(folders: list[Path]) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on; give --yes to remove")
    for folder in folders:
        click.echo(one_line(str(folder)), err=True)
    what = "this bundle" if len(folders) == 1 else f"these {len(folders)} bundles"
    return click.confirm(f"Remove {what}?", err=True)


def _remove(folder: Path) -> None:
    from specedge import bundle_library
    from specedge.bundle import store

    before = store.last_exported()
    bundle_library.remove(folder)
    click.echo(one_line(f"removed {folder}"), err=True)
    if before != store.last_exported():
        used = store.find_bundle()
        name = "the embedded pair" if used == store.embedded_folder() else str(used)
        click.echo(one_line(f"it was the default; now {name} is used when none is named"), err=True)


def _print(found: list[LibraryEntry]) -> None:
    rows: list[tuple[str, ...]] = [("", "NAME", "TARGET", "DRAFT", "SIZE", "OPS", "LICENCE")]
    rows += [_row(entry) for entry in found]
    shown = [row for row in rows if len(row) > 3]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo(one_line("  ".join([*cells[: len(row) - 1], row[-1]]).rstrip()))


def _row(entry: LibraryEntry) -> tuple[str, ...]:
    """One line of the table; a bundle that cannot be read has its error as the last cell."""
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
    """The target's and the draft's, or once what both have."""
    return " / ".join(dict.fromkeys(values))


def _as_json(entry: LibraryEntry) -> dict[str, Any]:
    from specedge.strict_json import to_plain

    facts: dict[str, Any] = {
        "name": entry.name,
        "folder": str(entry.folder),
        "size": entry.size,
        "is_default": entry.is_default,
        "error": entry.error,
    }
    if bundle := entry.bundle:
        for name in ("format", "num_draft_tokens", "context_length"):
            facts[name] = getattr(bundle, name)
        facts["draft"] = None
        for role, model in bundle.models.items():
            facts[role] = to_plain(model.source) | {"ops": list(model.parity)}
    return facts
