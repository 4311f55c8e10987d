"""Licenses of a checkpoint, which are copied to the bundle."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from specedge.bundle import LICENSE_FILE

from ..progress import Progress

LARGEST = 1_000_000  # bytes; larger files are not copied


def stated_license(folder: Path) -> str | None:
    """Return the license named in a README's front matter."""
    metadata = front_matter(folder)
    names = metadata.get("license_name") or metadata.get("license")
    if isinstance(names, list):
        return ", ".join(map(str, names)) or None
    return str(names) if names else None


def front_matter(folder: Path) -> dict[str, Any]:
    """Read the YAML front matter of a README; empty if it cannot be read."""
    try:
        head, _, rest = (folder / "README.md").read_text("utf-8").partition("---\n")
        metadata = yaml.safe_load(rest.partition("\n---")[0]) if not head.strip() else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def is_license_file(name: str, size: int) -> bool:
    """Return True for a license file that is small enough to copy."""
    return bool(LICENSE_FILE.match(name)) and size <= LARGEST


def copy_licenses(
    role: str, source: Path, license: str | None, folder: Path, progress: Progress
) -> None:
    """Copy a checkpoint's license files into its model's folder of the bundle."""
    taken: set[str] = set()
    for path in sorted(source.iterdir()):
        if not LICENSE_FILE.match(path.name) or not _is_own_file(path):
            continue
        if not is_license_file(path.name, path.stat().st_size):
            progress.note(f"{role}: {path.name} is over {LARGEST / 1e6:.0f} MB and is not copied")
            continue
        name = _unique_name(path.name, taken)
        shutil.copyfile(path, folder / name)
        taken.add(name.lower())
    if not taken and license is None:
        progress.note(
            f"{role}: the checkpoint states no license; ask its authors about permitted uses"
        )


def _is_own_file(path: Path) -> bool:
    """Return True for a file of the checkpoint, or a link to the blobs of the hub's cache.

    Other links could copy any file of this machine into a bundle.
    """
    folder = path.parent.resolve()
    return path.is_file() and path.resolve().parent in (folder, folder.parent.parent / "blobs")


def _unique_name(name: str, taken: set[str]) -> str:
    """Return a name that a bundle may contain, unique regardless of case."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:80]
    names = (plain, *(f"{plain}-{i}" for i in range(2, len(taken) + 3)))
    return next(n for n in names if n.lower() not in taken)
