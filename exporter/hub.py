"""Checkpoints on the Hugging Face hub: small files first, weights when the pair is known to fit."""

from __future__ import annotations

import glob
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, errors

from specedge.errors import CheckpointError

from .licences import wanted
from .progress import Progress
from .quiet import one_line, quiet

TIMEOUT = 10.0
_SMALL = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "README.md")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass
class Snapshot:
    """One commit of a repository: small files in `folder`, and the sizes of its weights."""

    role: str
    name: str
    revision: str
    folder: Path
    names: set[str]
    weights: dict[str, int]

    def missing_bytes(self) -> int:
        """How much of the weights is yet to be downloaded."""
        return sum(n for f, n in self.weights.items() if not (self.folder / f).exists())


def find(role: str, name: str, revision: str | None) -> Snapshot:
    """Look a repository up and fetch its small files; from the cache where there is no network."""
    try:
        huggingface_hub.utils.validate_repo_id(name)
    except errors.HFValidationError as error:
        raise CheckpointError(f"{role} '{name}' is neither a folder nor a hub id") from error
    try:
        return _online(role, name, revision)
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{role} {name} has no revision '{revision}' on the hub") from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{role} {name} is gated: accept its terms on https://huggingface.co/{name} "
            "and log in with 'hf auth login'"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{role} {name} is neither a folder here nor a model on the hub "
            "(a private one needs 'hf auth login')"
        ) from error
    except CheckpointError:
        raise
    except Exception as error:
        return _cached(role, name, revision, error)


def fetch_weights(snapshot: Snapshot, progress: Progress) -> None:
    """Download the weights that are not here yet."""
    todo = [f for f in snapshot.weights if not (snapshot.folder / f).exists()]
    if not todo:
        return
    with (
        progress.step(f"Downloading {snapshot.name}", snapshot.missing_bytes()) as advance,
        quiet(),
    ):
        for file in todo:
            _download(snapshot, file)
            advance(snapshot.weights[file])


def check_space(snapshots: list[Snapshot], destination: Path) -> None:
    """Refuse a download that the disks of the hub's cache and of the bundle cannot hold."""
    needs = {
        Path(constants.HF_HUB_CACHE): sum(s.missing_bytes() for s in snapshots),
        destination: sum(size for s in snapshots for size in s.weights.values()),
    }
    disks: dict[int, tuple[Path, int]] = {}
    for path, need in needs.items():
        place = next(p for p in (path, *path.parents) if p.exists())
        _, before = disks.get(place.stat().st_dev, (place, 0))
        disks[place.stat().st_dev] = (place, before + need)
    for place, need in disks.values():
        if need > (free := shutil.disk_usage(place).free):
            raise CheckpointError(
                f"download and bundle need {need / 1e9:.1f} GB, {place} has {free / 1e9:.1f} GB "
                "free; free some, or set HF_HOME or --output to a larger disk"
            )


def _online(role: str, name: str, revision: str | None) -> Snapshot:
    api = huggingface_hub.HfApi()
    info = api.model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT)
    everything = {f.rfilename: f.size or 0 for f in info.siblings or []}
    names = {name.partition("/")[0] for name in everything}  # folders too
    sizes = {name: size for name, size in everything.items() if "/" not in name}
    assert info.sha is not None
    with quiet():
        folder = huggingface_hub.snapshot_download(
            name, revision=info.sha, allow_patterns=_small(sizes), ignore_patterns=["*/*"]
        )
    weights = {f: sizes.get(f, 0) for f in _weights(Path(folder), set(sizes))}
    return Snapshot(role, name, info.sha, Path(folder), names, weights)


def _small(sizes: dict[str, int]) -> list[str]:
    """Patterns of the files to fetch at once; licences have all kinds of names."""
    return [*_SMALL, *(glob.escape(n) for n, size in sizes.items() if wanted(n, size))]


def _weights(folder: Path, names: set[str]) -> list[str]:
    if _SINGLE in names:
        return [_SINGLE]
    if _INDEX not in names:
        return []
    return shards(folder)


def shards(folder: Path) -> list[str]:
    """The files that a checkpoint's index names."""
    try:
        index = json.loads((folder / _INDEX).read_text("utf-8"))
        names = sorted(set(index["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / _INDEX} cannot be read ({one_line(error)}); download it again"
        ) from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{folder / _INDEX} names files outside its folder")
    return names


def _cached(role: str, name: str, revision: str | None, reason: Exception) -> Snapshot:
    try:
        folder = Path(
            huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True)
        )
        names = {p.name for p in folder.iterdir()}
        weights = dict.fromkeys(_weights(folder, names), 0)
        if not weights and not any(name.endswith(".bin") for name in names):
            raise FileNotFoundError("only small files are in the cache")
    except Exception:
        offline = isinstance(reason, errors.OfflineModeIsEnabled)
        why = "HF_HUB_OFFLINE is set" if offline else one_line(reason)
        raise CheckpointError(
            f"{role} {name} is no folder here, and the hub cannot be reached ({why}); "
            "connect to the network, or give a local folder"
        ) from reason
    return Snapshot(role, name, folder.name, folder, names, weights)


def _download(snapshot: Snapshot, file: str) -> None:
    try:
        huggingface_hub.hf_hub_download(snapshot.name, file, revision=snapshot.revision)
    except OSError as error:
        if getattr(error, "errno", None) == 28:
            raise CheckpointError(f"no space left while downloading {snapshot.name}") from error
        raise CheckpointError(
            f"{snapshot.role} {snapshot.name}: {file} cannot be downloaded; run the export again "
            "to go on where it stopped"
        ) from error
