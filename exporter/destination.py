"""Atomic replacement of a bundle's folder: written next to its destination, then renamed."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from specedge import staging
from specedge.bundle import MANIFEST
from specedge.errors import ExportError


@contextlib.contextmanager
def destination(output: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `output` on success, and is removed on failure."""
    output = Path(os.path.realpath(output))
    _check(output)
    staging.remove_stale_folders(output.parent)
    work = staging.staging_folder(output)
    with _interruptible():
        created = _create_parents(output.parent)
        try:
            with _locked(work, output):
                bundle = work / "new"
                bundle.mkdir()
                yield bundle
                _replace(bundle, output, work / staging.REPLACED)
        except BaseException:
            for path in created:
                with contextlib.suppress(OSError):
                    path.rmdir()
            raise


def _check(output: Path) -> None:
    """Reject a destination that cannot hold a bundle, before any work."""
    if output == Path.cwd():
        raise ExportError("--output is the current folder; specify another folder")
    if _has_other_files(output):
        raise ExportError(
            f"{output} is not empty and not a bundle; specify another folder with --output"
        )
    if _is_file(output):
        raise ExportError(f"{output} is a file; specify a folder with --output")
    if around := next((p for p in output.parents if (p / MANIFEST).is_file()), None):
        raise ExportError(
            f"{output} is inside the bundle {around}; specify another folder with --output"
        )
    existing = next(p for p in output.parents if p.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ExportError(f"{existing} cannot be written to; specify another folder with --output")


def _has_other_files(output: Path) -> bool:
    """Return True if a folder has files and is no bundle; another process may rename it."""
    try:
        return any(output.iterdir()) and not (output / MANIFEST).is_file() and output.is_dir()
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_file(output: Path) -> bool:
    """Return True for a file, by one system call: another export may rename the bundle."""
    try:
        return not stat.S_ISDIR(output.stat().st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def _locked(work: Path, output: Path) -> Iterator[None]:
    """Hold the folder's lock, so that one export at a time writes to a destination."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(staging.locked_folder(work))
        except TimeoutError as error:
            raise ExportError(
                f"another export to {output} is running; wait until it has finished"
            ) from error
        except OSError as error:
            raise ExportError(f"{work.parent} cannot be written to: {error.strerror}") from error
        yield


def _replace(bundle: Path, output: Path, aside: Path) -> None:
    """Rename the bundle to its destination, from which a non-empty folder is moved first."""
    replaced = output.exists()
    if replaced:
        os.rename(output, aside)
    try:
        os.rename(bundle, output)
    except OSError:
        if replaced:
            os.rename(aside, output)
        raise


def _create_parents(parent: Path) -> list[Path]:
    missing = [p for p in (parent, *parent.parents) if not p.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{parent} cannot be created: {error.strerror}") from error
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
