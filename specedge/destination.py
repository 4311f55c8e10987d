"""Folders that commands create, replace or remove: only bundles, and nothing else of the user's.

A bundle is written to a staging folder on the file system of its destination, then renamed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import FrameType

from . import staging
from .bundle import MANIFEST, store
from .bundle.integrity import has_encodable_path
from .errors import BundleError, ExportError, SpecEdgeError
from .strict_json import JsonError, parse

# Engines of `specedge build`, and files of interrupted builds and embeddings.
_ADDED = re.compile(r"engines(/\.?[0-9a-f]{32}(\.[a-z-]+)?(/.+)?)?|\.embed-\w+(/.+)?")
_OF_FILE_SYSTEM = "lost+found"  # in the root folder of a mounted file system


def _reason_to_keep_path(folder: Path) -> str | None:
    """Return the reason not to replace or remove a folder whatever it contains."""
    if folder.is_symlink():
        return f"{folder} is a link; remove the link, or use {os.path.realpath(folder)}"
    try:
        if not stat.S_ISDIR(folder.stat().st_mode):
            return f"{folder} is a file"
        if folder.samefile(store.embedded_folder()):
            return "the embedded pair is part of specedge and cannot be replaced or removed"
        if Path.cwd().is_relative_to(folder.resolve()):
            return f"{folder} is the current folder"
    except (FileNotFoundError, NotADirectoryError):
        pass
    return None


def _foreign_content(folder: Path, original: Path | None = None) -> str | None:
    """Describe content of a folder that is not part of a bundle; None without any.

    A bundle contains only files that its manifest lists, and engines. Only the manifest's list of
    files is read, so it may have another format. A bundle in the user's data folder may have a
    manifest that cannot be read. `original` is the folder's path before it was moved aside.
    """
    shown = original or folder
    if not folder.is_dir():
        return None
    is_root = os.path.ismount(folder)
    ignored = {_OF_FILE_SYSTEM, staging.staging_folder(folder).name} if is_root else set()
    if not any(path.name not in ignored for path in folder.iterdir()):
        return None
    if not (folder / MANIFEST).is_file():
        return f"{shown} is not empty and not a bundle: it has no {MANIFEST}"
    try:
        manifest = parse((folder / MANIFEST).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, JsonError):
        if shown.parent.resolve() == store.bundles_folder().resolve():
            return None
        return f"{shown} has a {MANIFEST} that cannot be read"
    if (
        not isinstance(manifest, dict)
        or not isinstance(manifest.get("files"), dict)
        or not isinstance(manifest.get("specedge_version"), str)
    ):
        return f"{shown} has a {MANIFEST} that was not written by specedge"
    files = {MANIFEST, *manifest["files"]}
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        is_known = name in (folders if is_folder else files) or _ADDED.fullmatch(name)
        if not is_known and PurePosixPath(name).parts[0] not in ignored:
            return f"{shown} contains {name}, which is not part of the bundle"
    return None


@contextlib.contextmanager
def destination(output: Path, error: type[SpecEdgeError] = ExportError) -> Iterator[Path]:
    """Yield an empty folder that replaces `output` on success, and is removed on failure.

    Args:
        output: Folder of the bundle: it does not exist, is empty, or is a bundle. In a mount point,
            which cannot be renamed, the staging folder is inside.
        error: Type of the exceptions.

    Raises:
        SpecEdgeError: The folder may not be replaced, or cannot be written to.
    """
    output = Path(os.path.abspath(output))
    _check(output, error)
    parent = output if os.path.ismount(output) else output.parent
    staging.remove_stale_folders(parent)
    work = parent / staging.staging_folder(output).name
    with _interruptible():
        created = _create_parents(parent, error)
        try:
            with _locked(work, output, error):
                if reason := _foreign_content(output):
                    raise error(f"{reason}; specify another folder with --output")
                bundle = work / "new"
                bundle.mkdir()
                yield bundle
                _replace(bundle, output, work, error)
        except BaseException:
            for path in created:
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise


def check_removable(folder: Path) -> None:
    """Raise BundleError if a folder is not a bundle that may be removed."""
    reason = _reason_to_keep_path(folder) or _foreign_content(folder)
    if reason is None and os.path.ismount(folder):
        reason = f"{folder} is a mount point"
    if reason is None and not (folder / MANIFEST).is_file():
        reason = f"{folder} is not a bundle: it has no {MANIFEST}"
    if reason is not None:
        raise BundleError(f"{reason}; it is not removed")


def move_aside(folder: Path, aside: Path) -> str | None:
    """Rename a folder if it may be replaced or removed; return the reason if it may not."""
    os.rename(folder, aside)
    if reason := _foreign_content(aside, folder):
        os.rename(aside, folder)
    return reason


def _check(output: Path, error: type[SpecEdgeError]) -> None:
    """Reject a destination that cannot hold a bundle, before any work."""
    reason = _reason_to_keep_path(output)
    if not has_encodable_path(output):
        reason = f"{output}: the path is not valid UTF-8"
    if reason:
        raise error(f"{reason}; specify another folder with --output")
    if around := next((p for p in output.parents if (p / MANIFEST).is_file()), None):
        raise error(f"{output} is inside the bundle {around}; specify another folder with --output")
    existing = output if os.path.ismount(output) else next(p for p in output.parents if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise error(f"{existing} cannot be written to; specify another folder with --output")


@contextlib.contextmanager
def _locked(work: Path, output: Path, error: type[SpecEdgeError]) -> Iterator[None]:
    """Hold the folder's lock, so that one export at a time writes to a destination."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(staging.locked_folder(work))
        except TimeoutError as timeout:
            raise error(
                f"another export to {output} is running; wait until it has finished"
            ) from timeout
        except OSError as failure:
            raise error(f"{work.parent} cannot be written to: {failure.strerror}") from failure
        yield


def _replace(bundle: Path, output: Path, work: Path, error: type[SpecEdgeError]) -> None:
    """Move the bundle to its destination, after moving aside what was there.

    If files were added there during the export, the bundle is moved next to the destination.
    """
    aside, reason = work / staging.REPLACED, None
    if os.path.ismount(output):
        reason = _foreign_content(output)
        if reason is None:
            _move_contents(bundle, output, work)
    else:
        if existed := os.path.lexists(output):
            reason = move_aside(output, aside)
        if reason is None:
            try:
                os.rename(bundle, output)
            except OSError:
                if existed:
                    os.rename(aside, output)
                raise
    if reason is None:
        return
    saved = staging.free_path(work.parent / (output.name or "bundle"))
    os.rename(bundle, saved)
    raise error(f"{reason}; the new bundle is in {saved}")


def _move_contents(bundle: Path, output: Path, work: Path) -> None:
    """Move a bundle's files into a mount point, the manifest last; undo all moves on failure."""
    aside = work / staging.CONTENTS
    aside.mkdir()
    ignored = {_OF_FILE_SYSTEM, work.name}
    old = sorted((p for p in output.iterdir() if p.name not in ignored), key=_is_manifest)
    new = sorted(bundle.iterdir(), key=_is_manifest)
    moves = [(path, aside / path.name) for path in old[::-1]]
    moves += [(path, output / path.name) for path in new]
    finished: list[tuple[Path, Path]] = []
    try:
        for source, target in moves:
            os.rename(source, target)
            finished.append((source, target))
    except BaseException:
        for source, target in reversed(finished):
            os.rename(target, source)
        raise
    os.rename(aside, work / staging.REMOVED)


def _is_manifest(path: Path) -> bool:
    return path.name == MANIFEST


def _create_parents(parent: Path, error: type[SpecEdgeError]) -> list[Path]:
    missing = [p for p in (parent, *parent.parents) if not p.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise error(f"{parent} cannot be created: {failure.strerror}") from failure
    return missing


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangup = getattr(signal, "SIGHUP", signal.SIGTERM)  # a closed terminal; Windows has none
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, hangup):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # nohup ignores
                stack.callback(signal.signal, number, handler)
                signal.signal(number, _terminate)
        yield


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
