"""Checkpoints from a local folder or the hub, whose code never runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PreTrainedConfig

from specedge.bundle.integrity import has_encodable_path
from specedge.bundle.manifest import CheckpointSource
from specedge.errors import CheckpointError

from .. import internals
from ..libraries import first_line, quiet
from . import (
    adapters,
    folders,
    gguf_files,
    gguf_header,
    gguf_tokenizer,
    hub,
    licenses,
    quantized_formats,
    sentencepiece_model,
    text_decoder,
    weight_files,
)
from .adapters import Adapter


@dataclass
class Checkpoint:
    """Checkpoint with its config and tokenizer; weights are fetched and read later.

    Attributes:
        role: "target" or "draft".
        name: Name as the user typed it.
        folder: Local folder, or the snapshot's in the hub's cache.
        source: Source in the manifest.
        published: Config of the whole checkpoint.
        config: Config of its text decoder.
        raw: Content of config.json; empty for a GGUF file.
        tokenizer: Tokenizer of transformers.
        generation: Content of generation_config.json.
        weights: Names of the weight files.
        remote: Snapshot on the hub; None for a local checkpoint.
        adapter: Adapter to merge into the weights.
        dtype: Type to convert matrices to; None to keep theirs.
        is_quantized: True if it has integers that a bundle can keep.
    """

    role: str
    name: str
    folder: Path
    source: CheckpointSource
    published: Any
    config: Any
    raw: dict[str, Any]
    tokenizer: Any
    generation: dict[str, Any]
    weights: list[str]
    remote: hub.Snapshot | None
    adapter: Adapter | None
    dtype: str | None = None
    is_quantized: bool = False

    @property
    def model_type(self) -> str:
        """Model type of transformers."""
        return str(self.config.model_type)

    @property
    def remotes(self) -> list[hub.Snapshot]:
        """Snapshots on the hub whose weights are yet to be fetched."""
        candidates = (self.remote, self.adapter.remote if self.adapter else None)
        return [remote for remote in candidates if remote is not None]


def find(role: str, name: str, revision: str | None, adapter: str | None = None) -> Checkpoint:
    """Find the config and tokenizer of a folder, a GGUF file or a hub id, without its weights.

    Args:
        role: "target" or "draft".
        name: Folder, GGUF file or hub id.
        revision: Branch, tag or commit on the hub.
        adapter: Folder or hub id of an adapter to merge into the weights when they are loaded.

    Raises:
        CheckpointError: There is no such checkpoint, or it is not supported.
    """
    if not name:
        raise CheckpointError(f"no {role} is specified; specify a checkpoint folder or a hub id")
    where = f"{role} {name}"
    path, gguf = folders.split_gguf_name(name)
    if not has_encodable_path(path):
        raise CheckpointError(f"{where}: the path is not valid UTF-8; rename it")
    local = path.is_dir()
    if not local and (path.exists() or folders.is_path_like(name)):
        problem = "is a file, not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{where} {problem}; specify a checkpoint folder or a hub id")
    if local and revision is not None:
        raise CheckpointError(f"{where} is a folder and has no revisions; omit the revision")

    def choose(folder: Path, names: set[str]) -> list[str]:
        if gguf and gguf in names:
            return gguf_files.parts_of(where, gguf, names)
        return weight_files.select_files(where, folder, set() if gguf else names)

    remote = None if local else hub.find(role, str(path), revision, choose)
    folder = path if remote is None else remote.folder
    files = {p.name for p in path.iterdir()} if remote is None else remote.names
    if gguf and gguf not in files:
        raise CheckpointError(f"{where}: {path} has no {gguf}")
    folders.check_layout(role, name, folder, {gguf} if gguf else files)
    weights = choose(folder, files)
    shown = name if remote else (path / gguf if gguf else path).resolve().name
    contents = _read(role, name, folder, remote, weights, files)
    if remote is None and contents.name is not None:
        shown = contents.name
    lora = adapters.find(f"{role} adapter", adapter, name) if adapter is not None else None
    shown = f"{shown} + {lora.source}" if lora else shown
    commit = remote.revision if remote else None
    return Checkpoint(
        role=role,
        name=name,
        folder=folder,
        source=CheckpointSource(
            folders.printable_line(shown) or "",
            commit,
            folders.printable_line(contents.license or licenses.stated_license(folder)),
        ),
        published=contents.published,
        config=contents.config,
        raw=contents.raw,
        tokenizer=contents.tokenizer,
        generation=contents.generation,
        weights=weights,
        remote=remote,
        adapter=lora,
        is_quantized=contents.is_quantized,
    )


@dataclass(frozen=True)
class _Contents:
    """Contents of a checkpoint's small files, or of a GGUF file's header.

    Fields as in `Checkpoint`; a header also has `name` and `license`.
    """

    published: Any
    config: Any
    tokenizer: Any
    raw: dict[str, Any]
    generation: dict[str, Any]
    name: str | None = None
    license: str | None = None
    is_quantized: bool = False


def _read(
    role: str,
    name: str,
    folder: Path,
    remote: hub.Snapshot | None,
    weights: list[str],
    files: set[str],
) -> _Contents:
    """Read everything except the weights."""
    where = f"{role} {name}"
    if not gguf_header.is_gguf(weights[0]):
        raw = folders.read_json_object(where, folder / "config.json")
        raw = quantized_formats.read_old_config(where, raw, folder)
        config = _load_config(role, name, folder, raw)
        quantization = quantized_formats.read_format(raw)
        if remote is not None and quantization is not None:
            remote.growth = quantization.growth
        text = text_decoder.decoder_config(where, config)
        generation = folders.read_json_object(where, folder / "generation_config.json")
        return _Contents(
            published=config,
            config=text,
            tokenizer=_load_tokenizer(where, folder, files),
            raw=raw,
            generation=generation,
            is_quantized=quantization is not None and quantization.can_be_kept,
        )
    paths = [folder / name for name in weights]
    with tempfile.TemporaryDirectory() as temporary:
        header_folder = Path(temporary)  # other files in the folder must not be read
        if remote is not None and remote.missing():
            paths = [header_folder / path.name for path in paths]
            for path in paths:
                hub.fetch_header(remote, path.name, header_folder)
        opened = gguf_files.open_files(where, paths)
        if remote is not None:
            remote.growth = opened.expansion
        whole, description = str(paths[0].absolute()), f"{where}: {paths[0].name}"
        config = opened.build_config() or _load_pretrained(
            AutoConfig.from_pretrained, description, header_folder, gguf_file=whole
        )
        opened.complete_config(config)
        text = text_decoder.decoder_config(where, config)
        fields = opened.fields
        return _Contents(
            published=config,
            config=text,
            tokenizer=gguf_tokenizer.build_tokenizer(description, fields),
            raw={},
            generation={"eos_token_id": gguf_tokenizer.end_tokens(fields)},
            name=opened.model_name,
            license=opened.license,
            is_quantized=opened.is_quantized,
        )


def _load_config(role: str, name: str, folder: Path, raw: dict[str, Any]) -> Any:
    if "transformers_weights" in raw:
        raise CheckpointError(
            f"{role} {name} specifies a custom weights file, which is not supported"
        )
    quantized_formats.check(f"{role} {name}", raw, folders.base_checkpoint(role, name, folder))
    model_type = raw.get("model_type")
    unknown = isinstance(model_type, str) and model_type and model_type not in CONFIG_MAPPING
    if "auto_map" in raw and (unknown or not model_type):
        raise CheckpointError(f"{role} {name} requires custom code, which specedge does not run")
    if unknown:
        shown = folders.printable_line(str(model_type)[:40])
        raise CheckpointError(
            f"{role} {name}: its config.json has the model type '{shown}', which transformers "
            f"does not know ({internals.describe_versions()}); specify another model"
        )
    config = _load_pretrained(AutoConfig.from_pretrained, f"{role} {name}: config.json", folder)
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    for part in (config, *parts):
        vars(part).pop("quantization_config", None)  # the loaded model is dequantized
    return config


def _load_tokenizer(where: str, folder: Path, files: set[str]) -> Any:
    """Load the tokenizer of a folder with these files."""
    if not files & folders.VOCABULARIES:
        raise CheckpointError(
            f"{where} has no tokenizer; put its tokenizer.json next to config.json"
        )
    description = f"{where}: its tokenizer"
    processor = sentencepiece_model.find(where, folder, files)
    tokenizer = _load_pretrained(AutoTokenizer.from_pretrained, description, folder)
    if processor is not None:
        sentencepiece_model.check(where, folder, processor, tokenizer)
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"{where} has no tokenizer that the tokenizers library can run")
    return tokenizer


def _load_pretrained(
    load: Callable[..., Any], description: str, folder: Path, **options: str
) -> Any:
    with quiet():
        try:
            return load(folder, local_files_only=True, trust_remote_code=False, **options)
        except Exception as error:
            text = first_line(error)
            if "trust_remote_code" in str(error):
                text = "it requires the repository's code, which specedge does not run"
            raise CheckpointError(f"{description} cannot be read: {text}") from error
