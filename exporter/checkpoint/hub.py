"""Checkpoints on the Hugging Face hub: small files are fetched before compatibility checks.

huggingface_hub 2 resumes broken connections, but discards a partial file when its process ends.
Plain downloads are therefore written to a partial file, which is moved into the cache when it is
complete.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import huggingface_hub
from huggingface_hub import constants, errors, file_download, utils

from specedge.bundle.integrity import sha256
from specedge.errors import CheckpointError, SpecEdgeError

from ..libraries import first_line, quiet, translate_errors
from ..progress import Advance, Progress
from . import folders, gguf_files, gguf_header
from .licenses import is_license_file

TIMEOUT = 10.0
HEADER_BYTES = 1 << 24  # sufficient for the vocabulary in most GGUF headers
_SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "README.md")
_TEMPLATE_FOLDER = "additional_chat_templates"  # the only subfolder whose files are fetched
# Small files that change a bundle, beside the vocabulary of a repository without tokenizer.json.
_READ = {
    "config.json", "generation_config.json", "quantize_config.json", "quant_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "adapter_config.json",
    "preprocessor_config.json", "processor_config.json",
}  # fmt: skip
# Returns the weight files of a repository, from the folder of its small files and all file names.
Choose = Callable[[Path, set[str]], list[str]]


@dataclass
class Snapshot:
    """One commit of a repository: small files in `folder`, and sizes of weight files."""

    role: str
    name: str
    revision: str
    folder: Path
    names: set[str]
    weights: dict[str, int]
    growth: float = 1.0  # size of a bundle relative to the weights

    def missing(self) -> dict[str, int]:
        """Return the weight files that are not downloaded yet, with their sizes."""
        return {f: n for f, n in self.weights.items() if not _is_complete(self.folder / f, n)}


def find(role: str, name: str, revision: str | None, choose: Choose) -> Snapshot:
    """Fetch the small files of a repository, or find them in the cache if the hub is unreachable.

    Raises:
        CheckpointError: There is no such repository or revision, or access is denied.
    """
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except errors.HFValidationError as error:
        raise CheckpointError(f"{role} '{name}' is neither a folder nor a hub id") from error
    try:
        return _find_online(role, name, revision, choose)
    except SpecEdgeError:
        raise
    except Exception as error:
        if reason := _advice(role, name, revision, error):
            raise CheckpointError(reason) from error
        return _find_cached(role, name, revision, choose, error)


def fetch_weights(snapshot: Snapshot, progress: Progress) -> None:
    """Download the missing weight files."""
    todo = snapshot.missing()
    if not todo:
        return
    with (
        progress.step(f"Downloading {snapshot.name}", sum(todo.values())) as advance,
        quiet(),
    ):
        for file in todo:
            with _translate_download_errors(snapshot, file):
                _fetch(snapshot, file, advance)


def _fetch(snapshot: Snapshot, file: str, advance: Advance) -> None:
    """Download a file to the cache and the snapshot's folder; `advance` gets byte counts."""
    url = huggingface_hub.hf_hub_url(snapshot.name, file, revision=snapshot.revision)
    metadata = huggingface_hub.get_hf_file_metadata(url)
    by_xet = metadata.xet_file_data is not None and importlib.util.find_spec("hf_xet") is not None
    if (not by_xet or constants.HF_HUB_DISABLE_XET) and metadata.etag and metadata.size:
        blobs = snapshot.folder.parents[1] / "blobs"
        _resume(url, blobs / metadata.etag, metadata.size, advance)
    path = snapshot.folder / file
    huggingface_hub.hf_hub_download(
        snapshot.name,
        file,
        revision=snapshot.revision,
        tqdm_class=_progress_bar(advance),
        force_download=path.exists() and path.stat().st_size != metadata.size,
    )


def fetch_header(snapshot: Snapshot, file: str, folder: Path) -> None:
    """Download a GGUF file's header into a sparse file of the full size in `folder`."""
    url = huggingface_hub.hf_hub_url(snapshot.name, file, revision=snapshot.revision)
    path, size, length = folder / file, snapshot.weights[file], HEADER_BYTES
    with quiet(), _translate_download_errors(snapshot, file):
        while True:
            _fetch_range(url, path, length)
            os.truncate(path, size)
            if length >= size or gguf_files.header_size(path) <= length:
                return
            length *= 2


def _progress_bar(advance: Advance) -> type[utils.tqdm]:
    """Return a progress bar class for huggingface_hub that displays nothing."""

    class Bar(utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            advance(int(options.get("initial") or 0))

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))

    return Bar


def _resume(url: str, blob: Path, size: int, advance: Advance) -> None:
    """Download the missing part of a file, and rename it to `blob` when it is complete.

    A blob with a wrong size is a partial file, and a file with a wrong SHA-256 is downloaded a
    second time. Raises CheckpointError.
    """
    part = blob.with_name(f"{blob.name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{part}.lock"):
        if blob.exists():
            if blob.stat().st_size == size:
                advance(size)
                return
            blob.replace(part)
        for _ in range(2):
            if part.exists() and part.stat().st_size == size:
                advance(size)
            else:
                _append(url, part, size, advance)
            if _has_digest(part, blob.name):
                part.replace(blob)
                return
            part.unlink()
            advance(-size)
    raise CheckpointError(
        f"{url} was downloaded twice, each time with a SHA-256 that differs from the "
        "hub's; try again later"
    )


def _has_digest(path: Path, etag: str) -> bool:
    """Return True if a file's SHA-256 is its etag, or if the etag is no SHA-256 (not LFS)."""
    if not re.fullmatch("[0-9a-f]{64}", etag):
        return True
    return sha256(path) == etag


def _append(url: str, part: Path, size: int, advance: Advance) -> None:
    with part.open("ab") as written:
        if (start := written.tell()) > size:
            start = written.truncate(0)
        file_download.http_get(
            url,
            written,
            resume_size=start,
            headers=_request_headers(),
            expected_size=size,
            tqdm_class=_progress_bar(advance),
        )


def _fetch_range(url: str, path: Path, length: int) -> None:
    headers = {**_request_headers(), "Range": f"bytes=0-{length - 1}"}
    with huggingface_hub.get_session().stream("GET", url, headers=headers) as response:
        utils.hf_raise_for_status(response)
        with path.open("wb") as written:
            for piece in response.iter_bytes():
                written.write(piece)
                if written.tell() >= length:
                    return


def _request_headers() -> dict[str, str]:
    return {**utils.build_hf_headers(), "Accept-Encoding": "identity"}


def check_space(snapshots: list[Snapshot], destination: Path) -> None:
    """Check the free space for downloads and for the bundle. Raises CheckpointError."""
    missing = {s.folder / file: size for s in snapshots for file, size in s.missing().items()}
    download = sum(missing.values())
    bundle = sum(s.growth * size for s in snapshots for size in s.weights.values())
    disks: dict[int, tuple[Path, float]] = {}
    for path, need in ((Path(constants.HF_HUB_CACHE), download), (destination, bundle)):
        existing = next(p for p in (path, *path.parents) if p.exists())
        _, before = disks.get(existing.stat().st_dev, (existing, 0))
        disks[existing.stat().st_dev] = (existing, before + need)
    for existing, need in disks.values():
        if need > (free := shutil.disk_usage(existing).free):
            raise CheckpointError(
                f"{download / 1e9:.1f} GB are to be downloaded and {bundle / 1e9:.1f} GB written "
                f"to the bundle, and {existing} has {free / 1e9:.1f} GB free; free disk space, "
                "or set HF_HOME or --output to a larger disk"
            )


def _find_online(role: str, name: str, revision: str | None, choose: Choose) -> Snapshot:
    api = huggingface_hub.HfApi()
    info = api.model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT)
    everything = {f.rfilename: f.size or 0 for f in info.siblings or []}
    sizes = {name: size for name, size in everything.items() if "/" not in name}
    small = [file for file, size in everything.items() if _is_small(file, size)]
    with quiet():
        # By revision, not by commit, so that the cache records the commit of a branch.
        folder = _snapshot(name, revision, small, tqdm_class=_progress_bar(lambda amount: None))
        if folder.name not in (info.sha, revision):  # a commit was pushed between the two requests
            return _find_online(role, name, folder.name, choose)
        for file in small:
            if not _is_complete(folder / file, everything[file]):
                huggingface_hub.hf_hub_download(
                    name, file, revision=folder.name, force_download=True
                )
    chosen = choose(folder, set(sizes))
    if lacking := [file for file in chosen if file not in sizes]:
        raise CheckpointError(
            f"{role} {name}: its index names {lacking[0]}, which the repository lacks; "
            "specify another revision"
        )
    weights = {file: sizes[file] for file in chosen}
    return Snapshot(role, name, folder.name, folder, _top_level(everything), weights)


def _find_cached(
    role: str, name: str, revision: str | None, choose: Choose, reason: Exception
) -> Snapshot:
    """Find a snapshot that has the files that an export reads, also if others are missing."""
    offline = isinstance(reason, errors.OfflineModeIsEnabled)
    why = "HF_HUB_OFFLINE is set" if offline else first_line(reason)
    unreachable = f"the hub cannot be reached ({why}); connect to the network"

    def refuse(problem: str, cure: str = "") -> CheckpointError:
        return CheckpointError(f"{role} {name}{problem}, and {unreachable}{cure}")

    try:
        folder = _snapshot(name, revision, local_files_only=True)
    except Exception as error:
        raise refuse(" is not a local folder", ", or specify a local folder") from error
    # Without a listing of the repository, which single downloads do not store, that of the folder.
    everything = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    with contextlib.suppress(errors.CachedRepoTreeNotFoundError):
        listing = huggingface_hub.get_cached_repo_tree(name, revision=folder.name)
        everything = {file.path: file.size for file in listing}
    weights = choose(folder, {file for file in everything if "/" not in file})
    if not weights:
        raise refuse(": only small files are in the hub's cache")
    is_gguf = gguf_header.is_gguf(weights[0])
    for file in [*weights, *([] if is_gguf else _small_files_read(everything))]:
        path = folder / file
        if not path.exists():
            raise refuse(f": {file} is not in the hub's cache")
        if not _is_complete(path, everything[file]):
            raise refuse(
                f": {path} has {path.stat().st_size} instead of {everything[file]} bytes",
                " to download it again",
            )
    sizes = {file: (folder / file).stat().st_size for file in weights}
    return Snapshot(role, name, folder.name, folder, _top_level(everything), sizes)


def _snapshot(name: str, revision: str | None, files: Collection[str] = (), **options: Any) -> Path:
    """Fetch files of a repository, or find them in the cache; return the snapshot's folder."""
    patterns = [glob.escape(file) for file in files]
    folder = huggingface_hub.snapshot_download(
        name, revision=revision, allow_patterns=patterns, **options
    )
    return Path(folder)


def _is_small(file: str, size: int) -> bool:
    """Return True for a file that is fetched before the weights."""
    folder, _, name = file.rpartition("/")
    if folder not in ("", _TEMPLATE_FOLDER):
        return False
    is_license = not folder and is_license_file(name, size)
    return is_license or any(fnmatch.fnmatchcase(name, pattern) for pattern in _SMALL)


def _small_files_read(files: Collection[str]) -> list[str]:
    """Return the small files of a repository that change a bundle, the config first."""
    names = _READ if "tokenizer.json" in files else _READ | folders.VOCABULARIES | {"merges.txt"}
    return sorted(f for f in files if f in names or f.startswith(f"{_TEMPLATE_FOLDER}/"))


def _is_complete(path: Path, size: int) -> bool:
    """Return True if a file has the size that the hub states."""
    return path.exists() and path.stat().st_size == size


def _top_level(files: Collection[str]) -> set[str]:
    """Return the names of a repository's top-level files and folders."""
    return {file.partition("/")[0] for file in files}


def _advice(role: str, name: str, revision: str | None, error: Exception) -> str | None:
    """Return a message with advice for a permanent error; None for other errors."""
    where = f"{role} {name}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{where} has no revision '{revision or 'main'}' on the hub"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{where} is gated: accept its terms on {constants.ENDPOINT}/{name} "
            "and log in with 'hf auth login'"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{where} is neither a local folder nor a model on the hub "
            "(a private one needs 'hf auth login')"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return (
            f"{where}: the hub denies access ({error.response.status_code}); log in with "
            "'hf auth login', with a token that has read access"
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return (
            f"{where}: no space left in {constants.HF_HUB_CACHE} while downloading; free disk "
            "space, or set HF_HOME to a larger disk, and run the export again to resume"
        )
    return None


def _translate_download_errors(
    snapshot: Snapshot, file: str
) -> contextlib.AbstractContextManager[None]:
    """Translate download errors to a CheckpointError with a one-line message."""

    def describe(error: Exception) -> str:
        return _advice(snapshot.role, snapshot.name, snapshot.revision, error) or (
            f"{snapshot.role} {snapshot.name}: {file} cannot be downloaded "
            f"({first_line(error)}); run the export again to resume"
        )

    return translate_errors(CheckpointError, "", describe=describe)
