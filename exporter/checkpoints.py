"""A checkpoint from a local folder or the hub: safetensors only, no code, no pickle."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from specedge.errors import CheckpointError
from specedge.manifest import Source

from . import hub, licences
from .licences import front_matter
from .progress import Progress
from .quiet import one_line, quiet
from .sources import Sources

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float32"}
_OPTIONS: dict[str, Any] = {
    "dtype": torch.float32,
    "output_loading_info": True,
}
_CONVERT = (
    "convert it with transformers, AutoModelForCausalLM.from_pretrained(...).save_pretrained(...), "
    "where you trust its pickle, and export that folder"
)


@dataclass
class Checkpoint:
    """A config and a tokenizer at hand; the weights are fetched and read when asked for."""

    role: str
    name: str
    folder: Path
    source: Source
    config: Any
    tokenizer: Any
    generation: dict[str, Any]
    remote: hub.Snapshot | None

    @property
    def kind(self) -> str:
        """The architecture, as transformers names it."""
        return str(self.config.model_type)


def find(role: str, name: str, revision: str | None) -> Checkpoint:
    """Config and tokenizer of a local folder or a hub id, without its weights."""
    if not name:
        raise CheckpointError(f"the {role} has no name; give a checkpoint's folder or a hub id")
    path = Path(os.path.expanduser(name))
    local = os.path.isdir(path)
    if not local and (os.path.exists(path) or _looks_like_a_path(name)):
        what = "is a file, not a folder" if os.path.exists(path) else "does not exist"
        raise CheckpointError(f"{role} {name} {what}; give a checkpoint's folder or a hub id")
    if local and revision is not None:
        raise CheckpointError(f"{role} {name} is a folder, which has no revisions; leave it out")
    remote = None if local else hub.find(role, name, revision)
    folder = path if remote is None else remote.folder
    files = {p.name for p in path.iterdir()} if remote is None else remote.names
    _check_files(role, name, folder, files)
    shown, commit = (name, remote.revision) if remote else (path.resolve().name, None)
    config = _load_config(role, name, folder)
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise CheckpointError(
            f"{role} {name} ({config.model_type}) attends to an encoder, and cross-attention "
            "cannot be exported; give a decoder alone"
        )
    return Checkpoint(
        role=role,
        name=name,
        folder=folder,
        source=Source(_line(shown) or "", commit, _line(licences.stated(folder))),
        config=config,
        tokenizer=_load_tokenizer(role, name, folder),
        generation=_json(role, name, folder / "generation_config.json"),
        remote=remote,
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
    files = weight_files(checkpoint.folder)
    dtype = stored_dtype(where, files)
    with quiet():
        try:
            model, info, sources = _with_stand_ins(checkpoint, files) or _whole(checkpoint)
        except Exception as error:
            raise CheckpointError(f"{where} cannot be loaded: {one_line(error)}") from error
    if lacking := sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"]))):
        raise CheckpointError(f"{where} lacks weights, such as {lacking[0]}; download it again")
    model.eval().requires_grad_(False)
    _tie(model, sources)
    return Loaded(model, dtype, sources)


def _with_stand_ins(checkpoint: Checkpoint, files: list[Path]) -> tuple[Any, Any, Sources] | None:
    """The model without its large matrices; None if loading computes something with them."""
    sources, state = Sources(), {}
    for file in files:
        with safetensors.safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                state[key] = sources.stand_in(tensors.get_tensor(key))
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            copy.deepcopy(checkpoint.config), trust_remote_code=False
        )
    model, info = type(empty).from_pretrained(
        None, config=empty.config, state_dict=state, **_OPTIONS
    )
    arrived = {parameter.data_ptr() for parameter in model.parameters()}
    lost = {key for key, tensor in state.items() if tensor.data_ptr() not in arrived}
    if any(sources.behind(state[key]) is not None for key in lost - set(info["unexpected_keys"])):
        return None
    return model, info, sources


def _whole(checkpoint: Checkpoint) -> tuple[Any, Any, Sources]:
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        **_OPTIONS,
    )
    return model, info, Sources()


def _tie(model: Any, sources: Sources) -> None:
    """An output matrix that is stored twice but equals the embedding is the embedding."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    a, b = (sources.behind(getattr(module, "weight", None)) for module in (table, head))
    if a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b):
        head.weight = table.weight


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a checkpoint's weights."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    return [folder / name for name in hub.shards(folder)]


def stored_dtype(where: str, files: list[Path]) -> str:
    """The type of most weights, from the files' headers, which also shows a truncated file."""
    sizes: Counter[str] = Counter()
    for file in files:
        try:
            with safetensors.safe_open(file, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(key)
                    sizes[part.get_dtype()] += torch.Size(part.get_shape()).numel()
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{where}: {file.name} cannot be read ({one_line(error)}); download it again"
            ) from error
    kind = sizes.most_common(1)[0][0] if sizes else "none"
    if kind not in _DTYPES:
        raise CheckpointError(
            f"{where} stores {kind} weights; give one in float32, float16 or bfloat16"
        )
    return _DTYPES[kind]


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1


def _check_files(role: str, name: str, folder: Path, files: set[str]) -> None:
    """Say early, and what to do, when a folder holds something other than a checkpoint."""
    where = f"{role} {name}"
    if not files:
        raise CheckpointError(f"{where} is an empty folder; give one with a checkpoint")
    if "bundle.json" in files:
        raise CheckpointError(f"{where} is a bundle already; give the checkpoint it was made from")
    if "adapter_config.json" in files:
        raise CheckpointError(f"{where} is an adapter; merge it into its model and export that")
    if SINGLE in files or INDEX in files:
        if "config.json" not in files:
            raise CheckpointError(f"{where} has weights but no config.json; download it again")
        return
    if any(f.endswith((".bin", ".pt", ".pth", ".ckpt")) for f in files):
        raise CheckpointError(
            f"{where} has only pickled weights (.bin), which can run code; {_CONVERT}"
        )
    if any(f.endswith(".onnx") for f in files) or "onnx" in files:
        raise CheckpointError(f"{where} {_onnx_trouble(role, name, folder)}")
    raise CheckpointError(f"{where} has no {SINGLE}; give a folder with a whole checkpoint")


def _onnx_trouble(role: str, name: str, folder: Path) -> str:
    """Why an ONNX export is no checkpoint, and which checkpoint it names as its own."""
    origin = _json(role, name, folder / "config.json").get("_name_or_path")
    if not isinstance(origin, str) or not origin:
        origin = front_matter(folder).get("base_model")
        origin = origin[0] if isinstance(origin, list) and origin else origin
    if not isinstance(origin, str) or not origin:
        cure = "give the checkpoint it was made from, with config.json and model.safetensors"
    else:
        cure = f"it was made from {_line(origin)}: give that, with its model.safetensors"
    return f"is an ONNX export, as optimum writes it, without the weights to export from; {cure}"


def _load_config(role: str, name: str, folder: Path) -> Any:
    raw = _json(role, name, folder / "config.json")
    if "transformers_weights" in raw:
        raise CheckpointError(f"{role} {name} names its own weights file, which is not supported")
    if "quantization_config" in raw:
        raise CheckpointError(f"{role} {name} is quantised; give the checkpoint it was made from")
    if "auto_map" in raw and not raw.get("model_type"):
        raise CheckpointError(f"{role} {name} needs its own code to run, which specedge never runs")
    return _pretrained(AutoConfig.from_pretrained, f"{role} {name}: config.json", folder)


def _load_tokenizer(role: str, name: str, folder: Path) -> Any:
    tokenizer = _pretrained(AutoTokenizer.from_pretrained, f"{role} {name}: its tokenizer", folder)
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"{role} {name} has no tokenizer that the tokenizers library can run")
    return tokenizer


def _pretrained(load: Callable[..., Any], what: str, folder: Path) -> Any:
    with quiet():
        try:
            return load(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            text = one_line(error)
            if "trust_remote_code" in str(error):
                text = "it needs the repository's own code, which specedge never runs"
            raise CheckpointError(f"{what} cannot be read: {text}") from error


def _json(role: str, name: str, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{role} {name}: {path.name} cannot be read: {one_line(error)}"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{role} {name}: {path.name} is not a JSON object")
    return value


def _line(text: str | None) -> str | None:
    """Text that fits in one line of a manifest, whatever a folder or a README is called."""
    return text and "".join(c if c.isprintable() else "?" for c in text[:500])
