"""The bundles on this machine: what `specedge list` shows and `specedge remove` removes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from . import staging
from .bundle import MANIFEST, Bundle, store
from .errors import BundleError
from .strict_json import JsonError, parse

EMBEDDED = "embedded"


@dataclass(frozen=True)
class LibraryEntry:
    """A folder that is listed: its bundle, or the error of one that cannot be read.

    `size` is in bytes, of all that lies in the folder. `is_default` says that it is the one used
    when none is named.
    """

    name: str
    folder: Path
    size: int
    is_default: bool
    bundle: Bundle | None
    error: str | None


def entries() -> list[LibraryEntry]:
    """The user's bundles by name, then the embedded pair."""
    try:
        default: Path | None = store.find_bundle()
    except BundleError:
        default = None
    folders = [*_folders(), (EMBEDDED, store.embedded_folder())]
    return [_entry(name, folder, default) for name, folder in folders]


def remove_stale_folders() -> list[Path]:
    """Remove what killed exports left among the user's bundles; see `leftovers`."""
    return staging.remove_stale_folders(store.bundles_folder())


def find_removable(name: str) -> Path:
    """The folder of a listed bundle's name, or the bundle's folder itself, if it may be removed.

    Raises BundleError for the embedded pair, a link, and a folder that is no bundle or holds more.
    """
    ours = dict(_folders())
    folder = ours.get(name) or _absolute(name)
    if (name == EMBEDDED and name not in ours) or _same(folder, store.embedded_folder()):
        raise BundleError("the embedded pair is a part of specedge and cannot be removed")
    if folder.is_symlink():
        raise BundleError(
            f"{folder} is a link; remove the link, or name {os.path.realpath(folder)}"
        )
    if not name or not folder.is_dir():
        raise BundleError(f"no bundle '{name}': neither listed by 'specedge list' nor a folder")
    if not (folder / MANIFEST).is_file():
        raise BundleError(f"{folder} is no bundle: it has no {MANIFEST}; remove it yourself")
    if folder not in ours.values() and (reason := _more_than_a_bundle(folder)):
        raise BundleError(f"{folder} {reason}; remove it yourself")
    if Path.cwd().is_relative_to(folder.resolve()):
        raise BundleError(f"you are in {folder}; go elsewhere to remove it")
    return folder


def remove(folder: Path) -> None:
    """Remove a bundle's folder, whole or not at all, and the note that makes it the default.

    It is renamed into a hidden folder first, so that what a killed removal leaves is no bundle.
    """
    try:
        with staging.locked_folder(staging.staging_folder(folder)):
            was_default = _same(store.last_exported(), folder)
            os.rename(folder, staging.staging_folder(folder) / "removed")
            if was_default:
                store.clear_default()
    except TimeoutError as error:
        raise BundleError(f"an export to {folder} is running; wait for it to end") from error
    except OSError as error:
        raise BundleError(f"{folder} cannot be removed: {error.strerror}") from error


def _folders() -> Iterator[tuple[str, Path]]:
    """What lies among the user's bundles and is not hidden, by name."""
    with contextlib.suppress(OSError):
        for folder in sorted(store.bundles_folder().iterdir()):
            if folder.is_dir() and not folder.name.startswith("."):
                yield folder.name, folder


def _entry(name: str, folder: Path, default: Path | None) -> LibraryEntry:
    bundle = error = None
    try:
        bundle = Bundle.read(folder)
    except BundleError as caught:
        error = str(caught)
    return LibraryEntry(name, folder, _size(folder), _same(default, folder), bundle, error)


def _absolute(name: str) -> Path:
    """A path with its last part as it is, so that a link shows; `..` goes where the system goes."""
    return Path(os.path.realpath(name) if ".." in Path(name).parts else os.path.abspath(name))


def _size(folder: Path) -> int:
    size = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(path, name)).st_size
    return size


def _same(one: Path | None, other: Path) -> bool:
    try:
        return one is not None and os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def _more_than_a_bundle(folder: Path) -> str:
    """Why a folder outside our own is not a bundle and nothing else; empty if it is one.

    The bundle may be of another format: only its list of files counts.
    """
    try:
        manifest = parse((folder / MANIFEST).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, JsonError):
        return f"has a {MANIFEST} that cannot be read"
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return f"has a {MANIFEST} that is not specedge's"
    files = {MANIFEST, *manifest["files"]}
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if name not in (folders if is_folder else files):
            return f"holds {name}, which is not the bundle's"
    return ""
