"""Contents of a checkpoint's folder or repository, and errors for folders without one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specedge.errors import CheckpointError

from ..libraries import first_line
from . import gguf_header, licenses, weight_files

# Without one of these files transformers creates an empty tokenizer of the config's class.
VOCABULARIES = {
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "qwen.tiktoken",
}  # fmt: skip


def split_gguf_name(name: str) -> tuple[Path, str | None]:
    """Split a name into the folder or repository, and the GGUF file in it, if any."""
    path = Path(os.path.expanduser(name))
    remote = name.count("/") == 2 and not name.startswith((".", "/", "~"))
    if gguf_header.is_gguf(name) and (path.is_file() or remote):
        return path.parent, path.name
    return path, None


def is_path_like(name: str) -> bool:
    """Return True for a name that is neither a repository nor a GGUF file in one."""
    parts = name.count("/") - gguf_header.is_gguf(name)
    return name.startswith((".", "/", "~")) or "\\" in name or parts > 1


def check_layout(role: str, name: str, folder: Path, files: set[str]) -> None:
    """Reject a folder that contains something other than a checkpoint. Raises CheckpointError."""
    where = f"{role} {name}"
    if not files:
        raise CheckpointError(f"{where} is an empty folder; specify one with a checkpoint")
    if "bundle.json" in files:
        raise CheckpointError(f"{where} is already a bundle; specify the original checkpoint")
    if {*weight_files.SAFE, *weight_files.PICKLED} & files:
        if "config.json" not in files:
            raise CheckpointError(f"{where} has weights but no config.json; download it again")
        return
    if "adapter_config.json" in files:
        option = "--draft-adapter" if role == "draft" else "--adapter"
        raise CheckpointError(
            f"{where} is an adapter; specify the model that it was trained on as --{role}, and "
            f"the adapter as {option}"
        )
    if any(map(gguf_header.is_gguf, files)):
        return
    if any(f.endswith((".bin", ".pt", ".pth", ".ckpt")) for f in files):
        raise CheckpointError(
            f"{where} has only pickled weights of an unknown layout; "
            f"specify a checkpoint with {weight_files.SAFE[0]} or {weight_files.PICKLED[0]}"
        )
    if any(f.endswith(".onnx") for f in files) or "onnx" in files:
        if (origin := base_checkpoint(role, name, folder)) is None:
            cure = "specify the original checkpoint, with config.json and model.safetensors"
        else:
            cure = f"it was exported from {origin}: specify that checkpoint, with model.safetensors"
        raise CheckpointError(
            f"{where} is an ONNX export, as written by optimum, without the required weights; "
            f"{cure}"
        )
    raise CheckpointError(
        f"{where} has no {weight_files.SAFE[0]}; specify a folder with a complete checkpoint"
    )


def base_checkpoint(role: str, name: str, folder: Path) -> str | None:
    """Return the checkpoint from which this one was derived, according to its metadata."""
    base = licenses.front_matter(folder).get("base_model")
    config = read_json_object(f"{role} {name}", folder / "config.json")
    base = base[0] if isinstance(base, list) and base else base
    for origin in (base, config.get("_name_or_path")):
        is_itself = isinstance(origin, str) and Path(origin).absolute() == folder.absolute()
        if isinstance(origin, str) and origin not in ("", name) and not is_itself:
            return printable_line(origin)
    return None


def read_json_object(where: str, path: Path) -> dict[str, Any]:
    """Read a file's JSON object; empty if there is no file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: {path.name} cannot be read: {first_line(error)}"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {path.name} is not a JSON object")
    return value


def printable_line(text: str | None) -> str | None:
    """Return text for the manifest: one printable line of at most 500 characters."""
    return text and "".join(c if c.isprintable() else "?" for c in text[:500])
