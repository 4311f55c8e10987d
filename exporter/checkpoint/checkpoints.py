"""A checkpoint from a local folder or the hub; no code of its own ever runs."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from specedge.errors import CheckpointError, SpecEdgeError
from specedge.manifest import Source

from ..progress import Progress
from ..quiet import one_line, quiet
from . import adapters, folders, gguf_files, hub, licences, quantised, text_part, weight_files
from .adapters import Adapter
from .lazy_tensors import LazyTensor, lazy, stored
from .lazy_weights import Sources

# Masks and tables of old versions; transformers knows those of some families.
_NEEDLESS = (".attn.bias", ".attention.bias", "masked_bias", "inv_freq", "position_ids")


@dataclass
class Checkpoint:
    """A config and a tokenizer at hand; the weights are fetched and read when asked for.

    `raw` is the config as its file has it; of a GGUF file, which has none, it is empty.
    """

    role: str
    name: str
    folder: Path
    source: Source
    published: Any  # the config as it is in the folder, of which `config` is the text part's
    config: Any
    raw: dict[str, Any]
    tokenizer: Any
    generation: dict[str, Any]
    weights: list[str]
    remote: hub.Snapshot | None
    adapter: Adapter | None

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

    An `adapter`, which is a folder or a hub id, too, is merged into the weights that are loaded.
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
    published, tokenizer, raw = _read(role, name, folder, remote, weights, files)
    config = text_part.of(where, published)
    found = adapters.find(f"{role} adapter", adapter, name) if adapter is not None else None
    shown = f"{shown} + {found.source}" if found else shown
    commit = remote.revision if remote else None
    return Checkpoint(
        role=role,
        name=name,
        folder=folder,
        source=Source(folders.line(shown) or "", commit, folders.line(licences.stated(folder))),
        published=published,
        config=config,
        raw=raw,
        tokenizer=tokenizer,
        generation=folders.json_object(role, name, folder / "generation_config.json"),
        weights=weights,
        remote=remote,
        adapter=found,
    )


@dataclass
class Loaded:
    """A model in float32 whose large matrices are stand-ins, and where their numbers are."""

    model: torch.nn.Module
    dtype: str
    sources: Sources


def load(checkpoint: Checkpoint, progress: Progress) -> Loaded:
    """The model, with `dtype` the type that most of its weights are stored in."""
    where = f"{checkpoint.role} {checkpoint.name}"
    if checkpoint.remote is not None:
        hub.fetch_weights(checkpoint.remote, progress)
    with quiet():
        try:
            model, info, dtype = _model(where, checkpoint)
        except SpecEdgeError:
            raise
        except Exception as error:
            raise CheckpointError(f"{where} cannot be loaded: {one_line(error)}") from error
    _check_loaded(where, model, info)
    _note_left_out(checkpoint.role, sorted(info["unexpected_keys"]), progress)
    _note_format(where, checkpoint, model, progress)
    if checkpoint.adapter is not None:
        model = adapters.merged(checkpoint.adapter, model, progress)
        dtype = weight_files.stored_dtype(where, dict(model.named_parameters()))
    model.eval().requires_grad_(False)
    sources = Sources()
    _put_stand_ins(model, sources)
    _tie(model, sources)
    return Loaded(model, dtype, sources)


def _model(where: str, checkpoint: Checkpoint) -> tuple[Any, Any, str]:
    """The model, what transformers says of its loading, and the type of most weights."""
    files = [checkpoint.folder / name for name in checkpoint.weights]
    if files[0].suffix == ".gguf":
        model, info = gguf_files.load(files[0], checkpoint.config)
        return model, info, gguf_files.stored_dtype(where, files[0])
    state = quantised.widened(where, checkpoint.raw, weight_files.read(where, files))
    state = text_part.named(checkpoint.published, checkpoint.config, state)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            copy.deepcopy(checkpoint.config), trust_remote_code=False
        )
    weight_files.check_forms(where, state, empty.state_dict())
    dtype = weight_files.stored_dtype(where, state)
    model, info = type(empty).from_pretrained(
        None,
        config=empty.config,
        state_dict={key: _lazy(tensor) for key, tensor in state.items()},
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused with their names
    )
    return model, info, dtype


def _check_loaded(where: str, model: torch.nn.Module, info: Any) -> None:
    """Refuse a model whose weights are not all its checkpoint's numbers."""
    if other := sorted(info["mismatched_keys"]):
        key, found, wanted = other[0]
        raise CheckpointError(
            f"{where}: {key} is {list(found)} in its files and {list(wanted)} by its config; "
            "give the files and the config of one model"
        )
    if lacking := sorted(map(str, info["missing_keys"])):
        raise CheckpointError(f"{where} lacks weights, such as {lacking[0]}; download it again")
    weight_files.check_types(where, model.named_parameters())


def _note_left_out(role: str, names: list[str], progress: Progress) -> None:
    """Say what has no place in the model, apart from buffers of old versions."""
    if names := [name for name in names if not name.endswith(_NEEDLESS)]:
        progress.note(
            f"{role}: the model has no place for {len(names)} of its tensors, such as "
            f"{folders.line(names[0])}, which are left out"
        )


def _lazy(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix that is renamed and joined without being read; what is small is read at once."""
    if isinstance(tensor, LazyTensor):
        return tensor
    # Of what is no float it is remembered what it was.
    return lazy(tensor) if tensor.ndim > 1 or not tensor.is_floating_point() else tensor.clone()


def _put_stand_ins(model: torch.nn.Module, sources: Sources) -> None:
    """Large matrices get stand-ins, smaller ones their numbers; what is tied stays so."""
    known: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, LazyTensor):
                if id(parameter) not in known:
                    tensor = sources.stand_in(stored(parameter))
                    known[id(parameter)] = torch.nn.Parameter(tensor, requires_grad=False)
                module._parameters[name] = known[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                module._buffers[name] = buffer.read().to(buffer.dtype, copy=True)


def _note_format(where: str, checkpoint: Checkpoint, model: Any, progress: Progress) -> None:
    """Say what is special about how the weights are stored."""
    role, file = checkpoint.role, checkpoint.folder / checkpoint.weights[0]
    how = quantised.method(checkpoint.raw)
    if file.suffix == ".gguf":
        how = gguf_files.kind(where, file)
        if count := gguf_files.left_out(where, file, model):
            progress.note(
                f"{role}: the model has no place for {count} numbers of its GGUF file, which are "
                "left out"
            )
    if how is not None:
        progress.note(
            f"{role}: its weights are stored in {how} and widened to what they stand for; "
            f"the {role} is this quantised model"
        )
    if file.suffix == ".bin":
        progress.note(
            f"{role}: its weights are pickled, and were read with torch's weights-only loader, "
            "which runs no code"
        )


def _tie(model: Any, sources: Sources) -> None:
    """An output matrix that is stored twice but equals the embedding is the embedding."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    a, b = (sources.behind(getattr(module, "weight", None)) for module in (table, head))
    if a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b):
        head.weight = table.weight


def _read(
    role: str,
    name: str,
    folder: Path,
    remote: hub.Snapshot | None,
    weights: list[str],
    files: set[str],
) -> tuple[Any, Any, dict[str, Any]]:
    """Config and tokenizer, and the config as it is in its file. Raises CheckpointError."""
    if not weights[0].endswith(".gguf"):
        raw = folders.json_object(role, name, folder / "config.json")
        config = _load_config(role, name, folder, raw, files)
        if remote is not None:
            remote.growth = quantised.growth(raw)
        return config, _load_tokenizer(role, name, folder), raw
    where, path = f"{role} {name}", folder / weights[0]
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
        return config, _load_tokenizer(role, name, alone, gguf_file=whole), {}


def _load_config(role: str, name: str, folder: Path, raw: dict[str, Any], files: set[str]) -> Any:
    if "transformers_weights" in raw:
        raise CheckpointError(f"{role} {name} names its own weights file, which is not supported")
    quantised.check(f"{role} {name}", raw, files, folders.original(role, name, folder))
    if "auto_map" in raw and not raw.get("model_type"):
        raise CheckpointError(f"{role} {name} needs its own code to run, which specedge never runs")
    config = _pretrained(AutoConfig.from_pretrained, f"{role} {name}: config.json", folder)
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    for part in (config, *parts):
        vars(part).pop("quantization_config", None)  # what is built of it is widened
    return config


def _load_tokenizer(role: str, name: str, folder: Path, **options: str) -> Any:
    what = f"{role} {name}: its tokenizer"
    tokenizer = _pretrained(AutoTokenizer.from_pretrained, what, folder, **options)
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"{role} {name} has no tokenizer that the tokenizers library can run")
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
