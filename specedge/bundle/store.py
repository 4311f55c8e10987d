"""Locations of bundles and caches on this machine, and the default bundle."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from ..errors import BundleError
from .bundle import Bundle

VARIABLE = "SPECEDGE_BUNDLE"
MAX_PATH_LENGTH = 4096  # characters
PROBE_SIZE = 2**16  # bytes, the size of the largest file written


def data_folder() -> Path:
    """Return the user's data folder of specedge."""
    return _user_folder(platformdirs.user_data_path)


def cache_folder() -> Path:
    """Return the user's cache folder of specedge."""
    return _user_folder(platformdirs.user_cache_path)


def _user_folder(locate: Callable[..., Path]) -> Path:
    """Return a folder of the user.

    Without a home folder, it is one in which nothing can be found or written.
    """
    try:
        return locate("specedge", appauthor=False)
    except RuntimeError:  # neither HOME nor an entry in the password database
        return Path(os.devnull) / "specedge"


def bundles_folder() -> Path:
    """Return the folder of exports without `--output`."""
    return data_folder() / "bundles"


def embedded_folder() -> Path:
    """Return the folder of the pair that is part of specedge."""
    return Path(__file__).parents[1] / "models" / "embedded"


def costs_folder() -> Path:
    """Return the folder of cost tables."""
    return data_folder() / "costs"


def default_destination(draft: str | None, target: str) -> Path:
    """Return the folder of an export without `--output`: one per pair of names."""
    return bundles_folder() / "--".join(map(_slug, [target] if draft is None else [target, draft]))


def set_default(folder: Path) -> None:
    """Make a bundle the default."""
    replace_file(_default_file(), str(folder.absolute()))


def last_exported() -> Path | None:
    """Return the last bundle exported without `--output`, which may no longer exist."""
    try:
        with _default_file().open(encoding="utf-8") as file:
            text = file.read(MAX_PATH_LENGTH + 1)
    except (OSError, ValueError):
        return None
    is_path = os.path.isabs(text) and "\0" not in text and len(text) <= MAX_PATH_LENGTH
    return Path(text) if is_path else None


def clear_default() -> None:
    """Make the embedded pair the default."""
    _default_file().unlink(missing_ok=True)


def find_bundle(bundle: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of a bundle.

    In this order: `bundle`, the environment variable SPECEDGE_BUNDLE, the last export without
    `--output`, the embedded pair.

    Raises:
        BundleError: If the name is empty or the last export no longer exists.
    """
    if bundle is not None:
        if not os.fspath(bundle):
            raise BundleError(
                "the name of the bundle is empty; specify a folder written by 'specedge export'"
            )
        return Path(bundle)
    if named := os.environ.get(VARIABLE):
        return Path(named)
    default = last_exported()
    if default is None:
        if _default_file().is_file():
            raise BundleError(
                f"{_default_file()} does not contain a path; export a bundle again, or delete "
                "the file to use the embedded pair"
            )
        return embedded_folder()
    if not default.exists():
        raise BundleError(
            f"the default bundle {default} no longer exists; export it again, specify another "
            f"bundle, or delete {_default_file()} to use the embedded pair"
        )
    return default


def verify_large_files(bundle: Bundle, progress: Callable[[int], None] | None = None) -> None:
    """Verify the hashes of large files that were not verified before on this machine.

    Files are identified by path, size, modification time and inode.
    """
    verified = _verified_files()
    for name in bundle.large_files():
        path = bundle.path(name).absolute()
        before = _identity(path, bundle.files[name].sha256)
        if verified.get(str(path)) != before:
            bundle.check_hash(name, progress)
            record_verified(path, before)


def record_export(bundle: Bundle) -> None:
    """Record that a bundle's large files have the listed hashes."""
    for name in bundle.large_files():
        path = bundle.path(name).absolute()
        record_verified(path, _identity(path, bundle.files[name].sha256))


def record_verified(path: Path, identity: list[int | str]) -> None:
    """Record that a file's hash was verified; errors are ignored."""
    verified = {p: i for p, i in _verified_files().items() if os.path.exists(p)}
    verified[str(path)] = identity
    with contextlib.suppress(OSError):
        replace_file(_verified_list(), json.dumps(verified))


def _default_file() -> Path:
    return data_folder() / "default"


def _verified_list() -> Path:
    return cache_folder() / "checked.json"


def _verified_files() -> dict[str, list[int | str]]:
    try:
        verified = json.loads(_verified_list().read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return verified if isinstance(verified, dict) else {}


def _identity(path: Path, sha256: str) -> list[int | str]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ino, sha256]


def replace_file(path: Path, text: str) -> None:
    """Write a text file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path) as temporary:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)


def create_file(path: Path, text: str) -> None:
    """Write a new text file atomically.

    Raises:
        FileExistsError: If the file exists.
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path) as temporary:
        temporary.write_text(text, "utf-8")
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # no hard links on this file system
            if path.exists():
                raise FileExistsError(path) from None
            os.replace(temporary, path)


def check_writable(path: Path) -> None:
    """Raise OSError if `replace_file` cannot write to a path; leaves no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path) as temporary:
        temporary.write_bytes(bytes(PROBE_SIZE))


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yield a unique temporary path in a file's folder; errors name the file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with errors_naming(path):
        try:
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def errors_naming(path: Path | str) -> Iterator[None]:
    """Add a file's name to an OSError without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


def _slug(name: str) -> str:
    """Return a folder name for a hub id or path, unique for each existing path."""
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):
        where = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        name = f"{os.path.basename(os.path.abspath(path))}-{where[:8]}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
