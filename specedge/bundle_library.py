"""Bundles in the user's data folder, as listed by `specedge list`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import destination, staging
from .bundle import Bundle, store
from .errors import BundleError

EMBEDDED = "embedded"


@dataclass(frozen=True)
class LibraryEntry:
    """Entry of `specedge list`.

    Attributes:
        name: Name of the bundle.
        folder: Folder of the bundle.
        size: Bytes of all files in the folder.
        is_default: True for the default bundle.
        bundle: The bundle; None if it cannot be read.
        error: Error if it cannot be read, or None.
    """

    name: str
    folder: Path
    size: int
    is_default: bool
    bundle: Bundle | None
    error: str | None


def entries() -> list[LibraryEntry]:
    """Return the user's bundles by name, then the embedded pair."""
    try:
        default: Path | None = store.find_bundle()
    except BundleError:
        default = None
    folders = [*_folders(), (EMBEDDED, store.embedded_folder())]
    return [_entry(name, folder, default) for name, folder in folders]


def remove_stale_folders() -> list[Path]:
    """Remove staging folders of interrupted exports among the user's bundles."""
    return staging.remove_stale_folders(store.bundles_folder())


def find_removable(name: str) -> Path:
    """Return the folder of a bundle that may be removed.

    Args:
        name: Name of a listed bundle, or a bundle's folder.

    Raises:
        BundleError: The folder does not exist or may not be removed.
    """
    bundles = dict(_folders())
    folder = bundles.get(name) or _absolute(name)
    if name == EMBEDDED and name not in bundles:
        folder = store.embedded_folder()
    if not name or not (folder.is_dir() or folder.is_symlink()):
        raise BundleError(
            f"no bundle '{name}': it is neither listed by 'specedge list' nor a folder"
        )
    destination.check_removable(folder)
    return folder


def remove(folder: Path) -> None:
    """Remove a bundle's folder completely or not at all, and its role as the default.

    The folder is first renamed into a hidden staging folder, so that an interrupted removal leaves
    no incomplete bundle.

    Raises:
        BundleError: The folder may not be removed, or cannot be.
    """
    destination.check_removable(folder)
    try:
        with staging.locked_folder(work := staging.staging_folder(folder)):
            was_default = _same(store.last_exported(), folder)
            if reason := destination.move_aside(folder, work / staging.REPLACED):
                raise BundleError(f"{reason}; it is not removed")
            os.rename(work / staging.REPLACED, work / staging.REMOVED)
            if was_default:
                store.clear_default()
    except TimeoutError as error:
        raise BundleError(
            f"an export to {folder} is running; wait until it has finished"
        ) from error
    except OSError as error:
        raise BundleError(f"{folder} cannot be removed: {error.strerror}") from error


def _folders() -> Iterator[tuple[str, Path]]:
    """Yield names and paths of the folders among the user's bundles."""
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
    """Return an absolute path without resolving a link in its last part."""
    return Path(os.path.realpath(name) if ".." in Path(name).parts else os.path.abspath(name))


def _size(folder: Path) -> int:
    size = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(path, name)).st_size
    return size


def _same(path: Path | None, other: Path) -> bool:
    try:
        return path is not None and os.path.samefile(path, other)
    except (OSError, ValueError):
        return False
