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
    eagle,
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
from .gguf_files import GgufCheckpoint

# Model types of published code whose decoder is a model of transformers. MiMo adds MTP layers to
# Qwen2 (`modeling_mimo.py` of XiaomiMiMo/MiMo-7B-RL).
_DECODERS = {"mimo": "qwen2"}


@dataclass
class Checkpoint:
    """Checkpoint with its config and tokenizer; weights are fetched and read later.

    Attributes:
        role: "target" or "draft".
        name: Name as the user typed it.
        folder: Local folder, or the snapshot's in the hub's cache.
        source: Source in the manifest.
        weights: Names of the weight files.
        remote: Snapshot on the hub; None for a local checkpoint.
        adapter: Adapter to merge into the weights.
        published: Config of the whole checkpoint.
        config: Config of its text decoder.
        raw: Content of config.json; empty for a GGUF file.
        tokenizer: Tokenizer of transformers; None for a draft that reads its target's states.
        generation: Content of generation_config.json.
        dtype: Type to convert matrices to; None to keep theirs.
        is_quantized: True if it has integers that a bundle can keep.
        target: Target of a draft that reads its hidden states.
    """

    role: str
    name: str
    folder: Path
    source: CheckpointSource
    weights: list[str]
    remote: hub.Snapshot | None
    adapter: Adapter | None
    published: Any
    config: Any
    raw: dict[str, Any]
    tokenizer: Any
    generation: dict[str, Any]
    dtype: str | None = None
    is_quantized: bool = False
    target: Checkpoint | None = None

    @property
    def model_type(self) -> str:
        """Model type of transformers."""
        return str(self.config.model_type)

    @property
    def mask_token(self) -> int | None:
        """Mask token of a parallel draft model (PARD), by AMD's key in config.json.

        Raises:
            CheckpointError: It is not a token of a decoder.
        """
        token = self.raw.get("pard_token")
        if token is None or self.role != "draft":
            return None
        if self.target is not None:  # P-EAGLE's key has the same name
            return None
        size = internals.decoder_text_config(self.config).vocab_size
        if self.config.is_encoder_decoder or type(token) is not int or not 0 <= token < size:
            raise CheckpointError(
                f"{self.role} {self.name}: its config.json has pard_token {token!r}, which must be "
                f"one of the {size} tokens of a decoder; remove it to draft one token per pass"
            )
        return token

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
    stated_name = license = None
    if gguf_header.is_gguf(weights[0]):
        contents, opened = _read_gguf(where, [folder / file for file in weights], remote)
        stated_name, license = opened.model_name, opened.license
    else:
        contents = _read_folder(role, name, folder, remote, files)
    shown = name if remote else stated_name or (path / gguf if gguf else path).resolve().name
    lora = adapters.find(f"{role} adapter", adapter, name) if adapter is not None else None
    shown = f"{shown} + {lora.source}" if lora else shown
    source = CheckpointSource(
        folders.printable_line(shown) or "",
        remote.revision if remote else None,
        folders.printable_line(license or licenses.stated_license(folder)),
    )
    return Checkpoint(role, name, folder, source, weights, remote, lora, **contents)


def _read_folder(
    role: str, name: str, folder: Path, remote: hub.Snapshot | None, files: set[str]
) -> dict[str, Any]:
    """Return the fields of a `Checkpoint` that its small files determine."""
    where = f"{role} {name}"
    raw = folders.read_json_object(where, folder / "config.json")
    if (head := _read_head(role, where, raw, files)) is not None:
        return {"published": head, "config": head, "raw": raw, "generation": {}, "tokenizer": None}
    raw = quantized_formats.read_old_config(where, raw, folder)
    config = _load_config(role, name, folder, raw)
    quantization = quantized_formats.read_format(raw)
    if remote is not None and quantization is not None:
        remote.growth = quantization.growth
    return {
        "published": config,
        "config": text_decoder.decoder_config(where, config),
        "raw": raw,
        "generation": folders.read_json_object(where, folder / "generation_config.json"),
        "tokenizer": _load_tokenizer(where, folder, files),
        "is_quantized": quantization is not None and quantization.can_be_kept,
    }


def _read_head(
    role: str, where: str, raw: dict[str, Any], files: set[str]
) -> eagle.EagleConfig | None:
    """Read the config of an EAGLE-3 head; None for another checkpoint."""
    eagle.check_kind(where, raw)
    if not eagle.is_head(raw):
        # Heads of EAGLE-1 and 2 have the config of an ordinary model, and their weights are not
        # downloaded yet.
        is_single_layer = raw.get("num_hidden_layers") == 1
        if role == "draft" and is_single_layer and not files & folders.VOCABULARIES:
            raise CheckpointError(
                f"{where} has one layer and no tokenizer, as heads of EAGLE-1 and 2, which are not "
                "supported; specify a head of EAGLE-3, or put the tokenizer.json of an ordinary "
                "draft model next to its config.json"
            )
        return None
    if role != "draft":
        raise CheckpointError(
            f"{where} is an EAGLE-3 head, which drafts for a target; specify it as --draft"
        )
    return eagle.read_config(where, raw)


def _read_gguf(
    where: str, paths: list[Path], remote: hub.Snapshot | None
) -> tuple[dict[str, Any], GgufCheckpoint]:
    """Return the fields of a `Checkpoint` that a GGUF file's header determines, and the header."""
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
        fields = opened.fields
        return {
            "published": config,
            "config": text_decoder.decoder_config(where, config),
            "raw": {},
            "generation": {"eos_token_id": gguf_tokenizer.end_tokens(fields)},
            "tokenizer": gguf_tokenizer.build_tokenizer(description, fields),
            "is_quantized": opened.is_quantized,
        }, opened


def _load_config(role: str, name: str, folder: Path, raw: dict[str, Any]) -> Any:
    if "transformers_weights" in raw:
        raise CheckpointError(
            f"{role} {name} specifies a custom weights file, which is not supported"
        )
    quantized_formats.check(f"{role} {name}", raw, folders.base_checkpoint(role, name, folder))
    model_type = raw.get("model_type")
    is_named = isinstance(model_type, str) and model_type
    decoder = _DECODERS.get(str(model_type))
    unknown = is_named and decoder is None and model_type not in CONFIG_MAPPING
    if "auto_map" in raw and (unknown or not model_type):
        raise CheckpointError(f"{role} {name} requires custom code, which specedge does not run")
    if unknown:
        shown = folders.printable_line(str(model_type)[:40])
        raise CheckpointError(
            f"{role} {name}: its config.json has the model type '{shown}', which transformers "
            f"does not know ({internals.describe_versions()}); specify another model"
        )
    config_class = AutoConfig if decoder is None else CONFIG_MAPPING[decoder]
    config = _load_pretrained(config_class.from_pretrained, f"{role} {name}: config.json", folder)
    if decoder is not None:
        config.model_type = model_type
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
