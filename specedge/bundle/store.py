"""Where bundles live on this machine, and which one is used when none is named."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from ..errors import BundleError
from .bundle import Bundle

VARIABLE = "SPECEDGE_BUNDLE"
LONGEST_PATH = 4096  # characters
PROBE_SIZE = 2**16  # bytes, as large as what is written anywhere here


def data_folder() -> Path:
    """The user's folder for exported bundles."""
    return platformdirs.user_data_path("specedge", appauthor=False)


def bundles_folder() -> Path:
    """Where exports without `--output` go."""
    return data_folder() / "bundles"


def embedded_folder() -> Path:
    """The pair that comes with specedge."""
    return Path(__file__).parents[1] / "models" / "embedded"


def costs_folder() -> Path:
    """Where measured costs are remembered."""
    return data_folder() / "costs"


def default_destination(draft: str | None, target: str) -> Path:
    """Return where an export without `--output` goes: one folder for each pair of names."""
    return bundles_folder() / "--".join(map(_slug, [target] if draft is None else [target, draft]))


def set_default(folder: Path) -> None:
    """Make a bundle the one that is used when none is named."""
    replace_file(_note(), str(folder.absolute()))


def last_exported() -> Path | None:
    """The bundle exported last without `--output`, whether or not it is still there."""
    try:
        with _note().open(encoding="utf-8") as file:
            text = file.read(LONGEST_PATH + 1)
    except (OSError, ValueError):
        return None
    is_path = os.path.isabs(text) and "\0" not in text and len(text) <= LONGEST_PATH
    return Path(text) if is_path else None


def clear_default() -> None:
    """Let the embedded pair be the one that is used when none is named."""
    _note().unlink(missing_ok=True)


def find_bundle(bundle: str | os.PathLike[str] | None = None) -> Path:
    """The folder named, else SPECEDGE_BUNDLE's, else the last exported, else the embedded."""
    if bundle is not None:
        if not os.fspath(bundle):
            raise BundleError("the bundle has no name; give a folder made by 'specedge export'")
        return Path(bundle)
    if named := os.environ.get(VARIABLE):
        return Path(named)
    default = last_exported()
    if default is None:
        if _note().is_file():
            raise BundleError(
                f"{_note()} names no folder; export a pair again, or delete it to use the "
                "embedded pair"
            )
        return embedded_folder()
    if not default.exists():
        raise BundleError(
            f"the default bundle {default} is gone; export the pair again, name another bundle, "
            f"or delete {_note()} to use the embedded pair"
        )
    return default


def verify_large_files(bundle: Bundle, progress: Callable[[int], None] | None = None) -> None:
    """Hash large files not seen before here, recognised by path, size, time and inode."""
    known = _known_files()
    for name in bundle.large_files():
        path = bundle.path(name).absolute()
        before = _identity(path, bundle.files[name].sha256)
        if known.get(str(path)) != before:
            bundle.check_hash(name, progress)
            record_verified(path, before)


def record_export(bundle: Bundle) -> None:
    """Note that a bundle's large files have the hashes that it lists."""
    for name in bundle.large_files():
        path = bundle.path(name).absolute()
        record_verified(path, _identity(path, bundle.files[name].sha256))


def record_verified(path: Path, identity: list[int | str]) -> None:
    """Note that a file's hash was right; where that cannot be written it is checked again."""
    known = {p: i for p, i in _known_files().items() if os.path.exists(p)}
    known[str(path)] = identity
    with contextlib.suppress(OSError):
        replace_file(_checked_list(), json.dumps(known))


def _note() -> Path:
    return data_folder() / "default"


def _checked_list() -> Path:
    return platformdirs.user_cache_path("specedge", appauthor=False) / "checked.json"


def _known_files() -> dict[str, list[int | str]]:
    try:
        known = json.loads(_checked_list().read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _identity(path: Path, sha256: str) -> list[int | str]:
    facts = path.stat()
    return [facts.st_size, facts.st_mtime_ns, facts.st_ino, sha256]


def replace_file(path: Path, text: str) -> None:
    """Write a file whole or not at all; OSError where that cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path) as temporary:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)


def create_file(path: Path, text: str) -> None:
    """Write a new file, whole or not at all.

    Raises:
        FileExistsError: The file exists.
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path) as temporary:
        temporary.write_text(text, "utf-8")
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if path.exists():
                raise FileExistsError(path) from None
            os.replace(temporary, path)


def check_writable(path: Path) -> None:
    """Raise OSError where `replace_text` could not write some text now; nothing is left of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_beside(path) as temporary:
        temporary.write_bytes(bytes(PROBE_SIZE))


@contextlib.contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A place beside a file's, to write it first; nothing stays there. Errors name the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with errors_naming(path):
        try:
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def errors_naming(path: Path | str) -> Iterator[None]:
    """Name the file in an OSError that does not, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


def _slug(name: str) -> str:
    """A model's id or path as a folder's name; two folders never share one."""
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        where = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        name = f"{path.resolve().name}-{where[:8]}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"
