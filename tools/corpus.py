"""The text of the embedded pair: CPython's own standard library with its tests (PSF licence)."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

TABLES = ("encodings/cp", "encodings/mac_", "encodings/iso", "encodings/koi", "encodings/tis_",
          "encodings/hp_", "encodings/ptcp", "pydoc_data/", "_sysconfigdata", "lib2to3/tests/data",
          "site-packages/", "idlelib/idle_test/htest", "test/test_email/data")  # fmt: skip


def library_files() -> list[tuple[str, str]]:
    """Name and text of every module of the running Python's library, sorted.

    Left out are tables, repeated files, and files that are not UTF-8 or have very long lines.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files, seen = [], set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if any(table in name for table in TABLES):
            continue
        try:
            text = path.read_text("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip() and text not in seen and max(map(len, text.splitlines())) < 2000:
            seen.add(text)
            files.append((name, text))
    return files


def held_out(name: str) -> bool:
    """About one module in 37, chosen by the hash of its name."""
    return hashlib.sha256(name.encode()).digest()[0] % 40 == 0
