"""A hub on this machine: the part of huggingface.co's protocol that downloads models.

    python tests/hub_server.py FOLDER --port 8000
    HF_ENDPOINT=http://127.0.0.1:8000 specedge export --draft org/small --target org/large

FOLDER/<org>/<name>/ is a repository, FOLDER/<org>/<name>@<revision>/ another revision of it than
main. Weights are answered with a redirect, as files of LFS are. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

TOKEN = "hf_specedge"  # the one that is let in
LARGE = (".safetensors", ".bin", ".gguf")
_CHUNK = 1 << 20


@dataclass
class Hub:
    """Fake hub of local repositories that records its `requests`.

    `cuts` are bytes after which an answer's connection breaks, one for each of the next ones;
    `statuses` are errors, by repository, instead of answers; of files in `corrupt` zeros are sent.
    """

    folder: Path
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    statuses: dict[str, int] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    cuts: list[int] = field(default_factory=list)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent: int = 0  # bytes of files
    ranges: bool = True
    port: int = 0
    cdn: int = 0

    def repository(self, name: str, revision: str) -> Path | None:
        """A revision's folder; a commit is one, too."""
        folders = [self.folder / name, *self.folder.glob(f"{name}@*")]
        for folder in folders:
            own = folder.name.partition("@")[2] or "main"
            if folder.is_dir() and revision in (own, commit(folder)):
                return folder
        return None


def commit(folder: Path) -> str:
    """A revision's commit: another one where a file is another."""
    return _digest("sha1", *(f"{path.relative_to(folder)}{etag(path)}" for path in files(folder)))


def etag(path: Path) -> str:
    """The SHA-256 of a file's content, as LFS has it; read anew when the file was written to."""
    stat = path.stat()
    return _sha256(path.resolve(), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache
def _sha256(path: Path, size: int, time: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files(folder: Path) -> list[Path]:
    """All files of a repository."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        """Metadata of a file."""
        self._answer()

    def do_GET(self) -> None:
        """Respond with a file or repository metadata."""
        self._answer()

    def log_message(self, *args: object) -> None:
        """Log nothing: `requests` has it."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/cdn/"):
            return self._send_file(self.hub.folder / path.removeprefix("/cdn/"))
        name, kind, revision, file = _parsed(path)
        if name in self.hub.statuses:
            return self._refuse(self.hub.statuses[name], "", "out of order")
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        exists = self.hub.repository(name, "main") is not None
        if not exists or (name in self.hub.private and not known):
            return self._refuse(401, "RepoNotFound", "Repository not found")
        if (folder := self.hub.repository(name, revision)) is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if kind == "resolve":
            if name in self.hub.gated:
                return self._refuse(403 if known else 401, "GatedRepo", "Access is restricted")
            return self._resolve(folder, file)
        return self._send_json(_info(name, folder) if kind == "info" else _tree(folder))

    def _resolve(self, folder: Path, file: str) -> None:
        path = folder / file
        if not path.is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit(folder), "ETag": f'"{etag(path)}"'}
        if path.suffix not in LARGE:
            return self._send_file(path, headers)
        place = quote(str(path.relative_to(self.hub.folder)))
        headers |= {
            # Of another host, as the hub does: huggingface_hub 1.33 looks at no port.
            "Location": f"http://localhost:{self.hub.cdn}/cdn/{place}",
            "X-Linked-Size": str(path.stat().st_size),
            "X-Linked-ETag": f'"{etag(path)}"',
        }
        return self._send(302, headers, b"")

    def _send_file(self, path: Path, headers: dict[str, str] | None = None) -> None:
        size = path.stat().st_size
        first, last = 0, size - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked and self.hub.ranges:
            first, last = int(asked[1]), min(last, int(asked[2] or last))
            headers = {**(headers or {}), "Content-Range": f"bytes {first}-{last}/{size}"}
        self.send_response(206 if asked and self.hub.ranges else 200)
        for key, value in ({"ETag": f'"{etag(path)}"'} | (headers or {})).items():
            self.send_header(key, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if self.command == "GET":
            self._send_bytes(path, first, last + 1)

    def _send_bytes(self, path: Path, first: int, end: int) -> None:
        cut = self.hub.cuts.pop(0) if self.hub.cuts and path.suffix in LARGE else end
        for piece in _pieces(path, first, min(end, first + cut)):
            self.wfile.write(bytes(len(piece)) if path.name in self.hub.corrupt else piece)
            self.hub.sent += len(piece)
        if first + cut < end:
            self.close_connection = True

    def _send_json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
        self._send(status, headers, b"")

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def serve(hub: Hub, port: int = 0) -> list[ThreadingHTTPServer]:
    """Answer in the background, on one port for the hub and on another for its files."""
    handler = type("HubHandler", (Handler,), {"hub": hub})
    servers = [ThreadingHTTPServer(("127.0.0.1", p), handler) for p in (port, 0)]
    hub.port, hub.cdn = (server.server_address[1] for server in servers)
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return servers


def _parsed(path: str) -> tuple[str, str, str, str]:
    """Repository, what is asked of it, revision and file."""
    if api := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/([^/]+)(/.*)?)?", path):
        return api[1], "tree" if api[2] == "tree" else "info", api[3] or "main", ""
    if resolve := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
        return resolve[1], "resolve", resolve[2], resolve[3]
    return "", "info", "main", ""


def _info(name: str, folder: Path) -> dict[str, Any]:
    siblings = [
        {"rfilename": str(p.relative_to(folder)), "size": p.stat().st_size, "blobId": etag(p)[:40]}
        for p in files(folder)
    ]
    return {"id": name, "modelId": name, "sha": commit(folder), "siblings": siblings}


def _tree(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in files(folder):
        size = path.stat().st_size
        entry = {"type": "file", "path": str(path.relative_to(folder)), "size": size}
        entry["oid"] = etag(path)[:40]
        if path.suffix in LARGE:
            entry["lfs"] = {"oid": etag(path), "size": size, "pointerSize": 130}
        found.append(entry)
    return found


def _digest(kind: str, *parts: str) -> str:
    return hashlib.new(kind, "\n".join(parts).encode()).hexdigest()


def _pieces(path: Path, first: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(first)
        while first < end and (piece := file.read(min(_CHUNK, end - first))):
            first += len(piece)
            yield piece


def main() -> None:
    """Serve a folder until it is interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--private", action="append", default=[], metavar="ORG/NAME")
    parser.add_argument("--gated", action="append", default=[], metavar="ORG/NAME")
    asked = parser.parse_args()
    hub = Hub(asked.folder.resolve(), set(asked.private), set(asked.gated))
    serve(hub, asked.port)
    print(f"HF_ENDPOINT=http://127.0.0.1:{hub.port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
