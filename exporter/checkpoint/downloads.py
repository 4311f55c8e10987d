"""Downloads of single files to the hub's cache, with progress, resumed across processes.

huggingface_hub 2 resumes broken connections, but discards a partial file when its process ends.
Plain downloads are therefore written to a partial file, which is moved into the cache when it is
complete.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import huggingface_hub
from huggingface_hub import constants, file_download, utils

from specedge.errors import CheckpointError

from . import gguf_files

HEADER_BYTES = 1 << 24  # sufficient for the vocabulary in most GGUF headers


def fetch(
    name: str, revision: str, file: str, folder: Path, advance: Callable[[int], None]
) -> None:
    """Download a file to the cache and a snapshot's `folder`; `advance` gets byte counts."""
    url = huggingface_hub.hf_hub_url(name, file, revision=revision)
    metadata = huggingface_hub.get_hf_file_metadata(url)
    by_xet = metadata.xet_file_data is not None and importlib.util.find_spec("hf_xet") is not None
    if (not by_xet or constants.HF_HUB_DISABLE_XET) and metadata.etag and metadata.size:
        _resume(url, folder.parents[1] / "blobs" / metadata.etag, metadata.size, advance)
    path = folder / file
    huggingface_hub.hf_hub_download(
        name,
        file,
        revision=revision,
        tqdm_class=progress_bar(advance),
        force_download=path.exists() and path.stat().st_size != metadata.size,
    )


def fetch_header(name: str, revision: str, file: str, path: Path, size: int) -> None:
    """Download a GGUF file's header into a sparse file of the full size."""
    url = huggingface_hub.hf_hub_url(name, file, revision=revision)
    length = HEADER_BYTES
    while True:
        _fetch_range(url, path, length)
        os.truncate(path, size)
        if length >= size or gguf_files.header_size(path) <= length:
            return
        length *= 2


def progress_bar(advance: Callable[[int], None]) -> type[utils.tqdm]:
    """Return a progress bar class for huggingface_hub that displays nothing."""

    class Bar(utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            advance(int(options.get("initial") or 0))

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))

    return Bar


def _resume(url: str, blob: Path, size: int, advance: Callable[[int], None]) -> None:
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == etag


def _append(url: str, part: Path, size: int, advance: Callable[[int], None]) -> None:
    with part.open("ab") as written:
        if (start := written.tell()) > size:
            start = written.truncate(0)
        file_download.http_get(
            url,
            written,
            resume_size=start,
            headers=_request_headers(),
            expected_size=size,
            tqdm_class=progress_bar(advance),
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
