"""LoRA adapters, merged by peft into one matrix at a time when it is read."""

from __future__ import annotations

import copy
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specedge.errors import CheckpointError, MissingExtraError

from ..libraries import quiet, translate_errors
from ..progress import Progress
from . import folders, hub, licenses
from .lazy_tensors import LazyTensor, materialize

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Options that cannot be merged per matrix, or that change more than the matrices.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
    "velora_config",
)
_BASE_CHANGING_INITS = ("corda", "loftq", "lora_ga", "olora", "pissa")


@dataclass
class Adapter:
    """LoRA adapter with its config; weights are fetched later."""

    role: str
    name: str
    folder: Path
    remote: hub.Snapshot | None

    @property
    def source(self) -> str:
        """Name of the adapter in the manifest, after its model's name."""
        commit = f"@{self.remote.revision}" if self.remote else ""
        return f"{self.name if self.remote else self.folder.resolve().name}{commit}"


def find(role: str, name: str, model: str) -> Adapter:
    """Find an adapter's config and check that it fits the model. Raises CheckpointError."""
    where = f"{role} {name}"
    _check_peft(where)
    path = Path(name).expanduser()

    def choose(folder: Path, names: set[str]) -> list[str]:
        return [file for file in WEIGHTS if file in names][:1]

    remote = None if path.is_dir() else hub.find(role, name, None, choose)
    folder = path if remote is None else remote.folder
    files = {p.name for p in folder.iterdir()} if remote is None else remote.names
    if CONFIG not in files or not set(WEIGHTS) & files:
        raise CheckpointError(f"{where} has no {CONFIG} with {WEIGHTS[0]}; specify a LoRA adapter")
    _check(where, folder, model)
    return Adapter(role, name, folder, remote)


def merge(adapter: Adapter, model: Any, progress: Progress) -> Any:
    """Return the model with lazy matrices that peft merges, in float32, when they are read."""
    import peft

    where = f"{adapter.role} {adapter.name}"
    if adapter.remote is not None:
        hub.fetch_weights(adapter.remote, progress)
    with quiet():
        config = peft.PeftConfig.from_pretrained(str(adapter.folder))
        config.inference_mode = True
        with translate_errors(CheckpointError, f"{where} cannot be read: ", "; download it again"):
            weights = peft.load_peft_weights(str(adapter.folder), device="cpu")
        cure = "; specify the model that it was trained on"
        with translate_errors(CheckpointError, f"{where} does not fit the model: ", cure):
            _load_replaced_modules(model, weights)
            wrapped = peft.get_peft_model(model, config)  # type: ignore[arg-type]
            result: Any = peft.set_peft_model_state_dict(wrapped, weights)
    lacking = [key for key in result.missing_keys if "lora_" in key or "modules_to_save" in key]
    if mismatches := [*result.unexpected_keys, *lacking]:
        raise CheckpointError(
            f"{where} does not fit the model, which differs in {mismatches[0]}{cure}"
        )
    lock = threading.Lock()
    for layer in [m for m in wrapped.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]:
        base = layer.get_base_layer()
        base.weight = nn.Parameter(_merge_layer(layer, base.weight, lock), requires_grad=False)
    license = folders.printable_line(licenses.stated_license(adapter.folder)) or "none stated"
    base = folders.printable_line(str(config.base_model_name_or_path or "an unspecified model"))
    progress.note(
        f"{where}, trained on {base}, is merged into the model in float32; its license: {license}"
    )
    return _mark_untied(wrapped.unload())


def _merge_layer(layer: Any, weight: torch.Tensor, lock: threading.Lock) -> LazyTensor:
    """Return a layer's lazy merged matrix; the layer itself holds no weights. [R, C]"""
    weight = weight.detach()

    def read() -> torch.Tensor:
        with lock, torch.no_grad():
            original, layer.base_layer = layer.base_layer, copy.copy(layer.base_layer)
            try:
                full = materialize(weight).to(torch.float32, copy=True)
                layer.base_layer._parameters = {
                    **original._parameters, "weight": nn.Parameter(full, requires_grad=False)
                }  # fmt: skip
                layer.merge()
                result: torch.Tensor = layer.base_layer.weight.detach()
            finally:
                layer.base_layer = original
                layer.merged_adapters.clear()
        return result

    return LazyTensor(torch.empty(weight.shape, dtype=torch.float32, device="meta"), read)


def _load_replaced_modules(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Load modules that the adapter replaces as a whole, so that peft can copy into them."""
    whole = {key.replace(".base_layer", "").rpartition(".")[0] for key in weights}
    for name, module in model.named_modules():
        if name and any(module_name.endswith(f".{name}") for module_name in whole):
            for key, parameter in module.named_parameters(recurse=False):
                full = materialize(parameter.detach()).to(torch.float32, copy=True)
                setattr(module, key, nn.Parameter(full, requires_grad=False))


def _mark_untied(model: Any) -> Any:
    """Mark the model as untied if the adapter separated its LM head from its embedding."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not table.weight:
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False
    return model


def _check(where: str, folder: Path, model: str) -> None:
    """Reject adapters that cannot be merged, and those of other models."""
    with translate_errors(CheckpointError, f"{where}: {CONFIG} cannot be read: "):
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        adapter_type, base = str(config["peft_type"]), config.get("base_model_name_or_path")
    if adapter_type != "LORA":
        raise CheckpointError(
            f"{where} is a {adapter_type} adapter; only LoRA adapters can be merged"
        )
    if unsupported := [name for name in _UNSUPPORTED if config.get(name)]:
        raise CheckpointError(
            f"{where} has {unsupported[0]}, which cannot be merged per matrix; merge it with "
            "peft's merge_and_unload(), and export the merged checkpoint"
        )
    if str(config.get("init_lora_weights")).lower().startswith(_BASE_CHANGING_INITS):
        raise CheckpointError(
            f"{where} started from {config['init_lora_weights']}, which modifies the base model; "
            "save it with peft's path_initial_model_for_weight_conversion, which converts it to "
            "a plain adapter"
        )
    if _are_different_repositories(base, model):
        raise CheckpointError(f"{where} was trained on {base}, not on {model}; specify {base}")


def _are_different_repositories(base: object, model: str) -> bool:
    """Return True if both names are hub repositories and differ; local folders are accepted."""
    if not isinstance(base, str) or Path(model).expanduser().exists() or Path(base).exists():
        return False
    return base.count("/") == model.count("/") == 1 and base.lower() != model.lower()


def _check_peft(where: str) -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"{where} is an adapter, which requires: pip install peft"
        ) from error
