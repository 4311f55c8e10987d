"""A checkpoint from a local folder or the hub; no code of its own ever runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig

from specedge.bundle.manifest import CheckpointSource
from specedge.errors import CheckpointError

from .. import private
from ..quiet import one_line, quiet
from . import adapters, folders, gguf_files, hub, licenses, quantised, text_part, weight_files
from .adapters import Adapter

# Without one of these transformers makes an empty tokenizer of the config's class.
_VOCABULARIES = {
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "qwen.tiktoken",
}  # fmt: skip


@dataclass
class Checkpoint:
    """A config and a tokenizer at hand; the weights are fetched and read when asked for."""

    role: str
    name: str
    folder: Path
    source: CheckpointSource
    published: Any  # the config as it is in the folder, of which `config` is the text part's
    config: Any
    raw: dict[str, Any]  # the config as its file has it; empty of a GGUF file, which has none
    tokenizer: Any
    generation: dict[str, Any]
    weights: list[str]
    remote: hub.Snapshot | None
    adapter: Adapter | None
    dtype: str | None = None  # what its matrices are to be rounded to

    @property
    def kind(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.config.model_type)

    @property
    def remotes(self) -> list[hub.Snapshot]:
        """What is yet to be fetched from the hub."""
        both = (self.remote, self.adapter.remote if self.adapter else None)
        return [remote for remote in both if remote is not None]


def find(role: str, name: str, revision: str | None, adapter: str | None = None) -> Checkpoint:
    """Config and tokenizer of a folder, a GGUF file or a hub id, without its weights.

    An `adapter`, a folder or a hub id, too, is merged into the weights when they are loaded.
    """
    if not name:
        raise CheckpointError(f"the {role} has no name; give a checkpoint's folder or a hub id")
    where = f"{role} {name}"
    path, gguf = folders.split(name)
    local = path.is_dir()
    if not local and (path.exists() or folders.looks_like_a_path(name)):
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{where} {what}; give a checkpoint's folder or a hub id")
    if local and revision is not None:
        raise CheckpointError(f"{where} is a folder, which has no revisions; leave it out")

    def choose(folder: Path, names: set[str]) -> list[str]:
        return weight_files.held(where, folder, {gguf} & names if gguf else names)

    remote = None if local else hub.find(role, str(path), revision, choose)
    folder = path if remote is None else remote.folder
    files = {p.name for p in path.iterdir()} if remote is None else remote.names
    if gguf and gguf not in files:
        raise CheckpointError(f"{where}: {path} has no {gguf}")
    folders.check(role, name, folder, {gguf} if gguf else files)
    weights = choose(folder, files)
    shown = name if remote else (path / gguf if gguf else path).resolve().name
    published, config, tokenizer, raw = _read(role, name, folder, remote, weights, files)
    found = adapters.find(f"{role} adapter", adapter, name) if adapter is not None else None
    shown = f"{shown} + {found.source}" if found else shown
    commit = remote.revision if remote else None
    return Checkpoint(
        role=role,
        name=name,
        folder=folder,
        source=CheckpointSource(
            folders.line(shown) or "", commit, folders.line(licenses.stated(folder))
        ),
        published=published,
        config=config,
        raw=raw,
        tokenizer=tokenizer,
        generation=folders.json_object(where, folder / "generation_config.json"),
        weights=weights,
        remote=remote,
        adapter=found,
    )


def _read(
    role: str,
    name: str,
    folder: Path,
    remote: hub.Snapshot | None,
    weights: list[str],
    files: set[str],
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The config, that of its text part, the tokenizer, and the config as it is in its file."""
    where = f"{role} {name}"
    if not weights[0].endswith(".gguf"):
        raw = folders.json_object(where, folder / "config.json")
        config = _load_config(role, name, folder, raw, files)
        if remote is not None:
            remote.growth = quantised.growth(raw)
        text = text_part.of(where, config)
        return config, text, _load_tokenizer(where, folder, files), raw
    path = folder / weights[0]
    weight_files.check_gguf(where, path.name)
    with tempfile.TemporaryDirectory() as made:
        alone = Path(made)  # what is beside the file is no concern of it
        if remote is not None and not path.exists():
            path = alone / path.name
            hub.fetch_head(remote, path.name, alone)
        gguf_files.check(where, path)
        if remote is not None:
            remote.growth = gguf_files.growth(where, path)
        whole, what = str(path.absolute()), f"{where}: {path.name}"
        config = _pretrained(AutoConfig.from_pretrained, what, alone, gguf_file=whole)
        gguf_files.scale_positions(where, path, config)
        text = text_part.of(where, config)
        return config, text, _load_tokenizer(where, alone, None, gguf_file=whole), {}


def _load_config(role: str, name: str, folder: Path, raw: dict[str, Any], files: set[str]) -> Any:
    if "transformers_weights" in raw:
        raise CheckpointError(f"{role} {name} names its own weights file, which is not supported")
    quantised.check(f"{role} {name}", raw, files, folders.original(role, name, folder))
    kind = raw.get("model_type")
    unknown = isinstance(kind, str) and kind and kind not in CONFIG_MAPPING
    if "auto_map" in raw and (unknown or not kind):
        raise CheckpointError(f"{role} {name} needs its own code to run, which specedge never runs")
    if unknown:
        raise CheckpointError(
            f"{role} {name}: its config.json has the model type '{folders.line(str(kind)[:40])}', "
            f"which transformers does not know ({private.versions()}); give another model"
        )
    config = _pretrained(AutoConfig.from_pretrained, f"{role} {name}: config.json", folder)
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    for part in (config, *parts):
        vars(part).pop("quantization_config", None)  # what is built of it is widened
    return config


def _load_tokenizer(where: str, folder: Path, files: set[str] | None, **options: str) -> Any:
    """The tokenizer of a folder with these files; None where it is in the weights' own."""
    if files is not None and not files & _VOCABULARIES:
        raise CheckpointError(
            f"{where} has no tokenizer; put its tokenizer.json beside config.json"
        )
    what = f"{where}: its tokenizer"
    tokenizer = _pretrained(AutoTokenizer.from_pretrained, what, folder, **options)
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"{where} has no tokenizer that the tokenizers library can run")
    return tokenizer


def _pretrained(load: Callable[..., Any], what: str, folder: Path, **options: str) -> Any:
    with quiet():
        try:
            return load(folder, local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:
            text = one_line(error)
            if "trust_remote_code" in str(error):
                text = "it needs the repository's own code, which specedge never runs"
            raise CheckpointError(f"{what} cannot be read: {text}") from error
