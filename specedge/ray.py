"""Speculative decoding on Ray: an actor class for `ray.data` and an application for Ray Serve.

Ray is imported only when needed; `import ray` in this file is the package, not this module.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specedge.errors import MissingExtraError, SpecEdgeError
from specedge.option_specs import check_integer, option_specs
from specedge.request import AUTO, GenerationRequest, build_request, item_seed
from specedge.runtime.requests.batch import (
    BatchItem,
    error_result,
    item_fingerprint,
    parse_item,
    run_items,
)

if TYPE_CHECKING:
    from specedge.runtime.requests.pipeline import Pipeline
    from specedge.serve.app import ServerSettings


class Generate:
    """Actor class for `ray.data.Dataset.map_batches` that generates text for prompts.

        prompts.map_batches(specedge.ray.Generate, fn_constructor_kwargs={"bundle": "/shared/pair"},
                            batch_size=32, concurrency=2, num_cpus=4)

    A batch has a column `prompt` (text or lists of token ids) or `messages`, and optionally columns
    named like the options of `Pipeline.generate`; null selects the default. It is returned with
    three more columns: `result` (a line of JSON as written by `specedge generate --prompts`),
    `generated_text` and `error`, one of which is null. A row with invalid values gets an error;
    other rows are not affected.

    A row is sampled with its own `seed`, or with `seed` plus its `index`, a column that is required
    then. The number of draft tokens is the bundle's unless specified: an adaptive number would make
    texts depend on the speed of each machine. `remember` is rejected for the same reason.

    Args:
        bundle: Folder of a bundle, at the same path on each node; None is the embedded pair.
        device: Device of the target, as in `specedge.load`.
        draft_device: Device of the draft model; None is the target's.
        threads: CPU threads; None is the number of CPUs assigned to the actor.
        ops: Graph variant, as in `specedge.load`.
        slots: Prompts of a batch that share passes; None is at most 8, as many as fit into a share
            of the node's memory, which is the actor's share of its CPUs.
        **request: Options of all prompts, as in `Pipeline.generate`.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str] | None = None,
        *,
        device: str = "cpu",
        draft_device: str | None = None,
        threads: int | None = None,
        ops: str = AUTO,
        slots: int | None = None,
        **request: Any,
    ) -> None:
        from specedge.bundle import store
        from specedge.cpu_count import cpu_count
        from specedge.runtime.requests.loader import BATCH_SLOTS, batch_slots

        self._request = dataclasses.asdict(build_request(**request))
        if slots is None:
            folder, share = bundle or store.embedded_folder(), 1.0
            if (assigned := _assigned_cpus()) is not None:
                share = assigned / cpu_count()
            slots = batch_slots(folder, BATCH_SLOTS, device, draft_device, ops, share)
        self.pipeline = load_pipeline(bundle, device, draft_device, threads, ops, slots)
        fix_draft_length({**self._request}, self.pipeline.bundle.num_draft_tokens)  # validates
        self._fingerprint = self.pipeline.bundle.digest(), ops

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the columns `result`, `generated_text` and `error`."""
        items = [self._item_or_error(row) for row in self._rows(batch)]
        valid = (item for item in items if isinstance(item, BatchItem))
        generated = run_items(self.pipeline, [*valid])
        results = [next(generated) if isinstance(i, BatchItem) else i for i in items]
        return batch | {
            "result": [json.dumps(result, ensure_ascii=False) for result in results],
            "generated_text": [result.get("text") for result in results],
            "error": [result.get("error") for result in results],
        }

    def _rows(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the values of each row, without nulls."""
        if not batch.keys() & {"prompt", "messages"}:
            raise ValueError(f"a batch needs a column prompt or messages, got {', '.join(batch)}")
        if self._request["seed"] is not None and not batch.keys() & {"index", "seed"}:
            raise ValueError("a seed needs a column index: prompt i is sampled with seed + i")
        columns = option_specs(GenerationRequest).keys() | {"id", "index", "prompt", "messages"}
        names = [*(columns & {*batch})]
        for row in zip(*(batch[name] for name in names), strict=True):
            values = {
                name: _restore_integer(_to_python(value))
                for name, value in zip(names, row, strict=True)
            }
            yield {name: value for name, value in values.items() if value is not None}

    def _item_or_error(self, row: dict[str, Any]) -> BatchItem | dict[str, Any]:
        try:
            return self._item(row)
        except (ValueError, SpecEdgeError) as error:
            index, id_ = row.get("index"), row.get("id")
            index = index if type(index) is int else 0
            id_ = id_ if type(id_) in (str, int) else None
            return error_result(BatchItem(index, id_, None, None, {}), str(error))

    def _item(self, row: dict[str, Any]) -> BatchItem:
        index, seed = check_integer("index", row.get("index", 0), 0), self._request["seed"]
        if seed is not None and not row.keys() & {"index", "seed"}:
            raise ValueError("a seed needs an index: prompt i is sampled with seed + i")
        seeds = {} if seed is None else {"seed": item_seed(seed, index)}
        item = parse_item(index, row, self._request | seeds)
        fix_draft_length(item.request, self.pipeline.bundle.num_draft_tokens)
        return dataclasses.replace(item, fingerprint=item_fingerprint(item, *self._fingerprint))


def load_pipeline(
    bundle: str | os.PathLike[str] | None,
    device: str,
    draft_device: str | None,
    threads: int | None,
    ops: str,
    slots: int = 1,
    max_length: int | None = None,
) -> Pipeline:
    """Load a bundle in an actor, with a thread for each CPU that Ray assigned to it."""
    from specedge.bundle import store
    from specedge.runtime.requests.loader import load

    num_cpus = _assigned_cpus() if {"cpu", AUTO} & {device, draft_device or device} else None
    pipeline = load(
        bundle or store.embedded_folder(),
        device,
        threads or num_cpus,
        share_threads=num_cpus is not None,  # no other code of its process has sessions
        ops=ops,
        draft_device=draft_device,
        slots=slots,
        max_length=max_length,
    )
    for note in pipeline.notes:
        logging.getLogger(__name__).warning(note)
    return pipeline


def fix_draft_length(request: dict[str, Any], num_draft_tokens: int) -> bool:
    """Make a request independent of the machine and of earlier requests.

    Args:
        request: Options of a `GenerationRequest`, changed in place.
        num_draft_tokens: Number of draft tokens that replaces "auto".

    Returns:
        True if the request left the number of draft tokens open.

    Raises:
        SpecEdgeError: If the request drafts from earlier outputs.
    """
    if request.get("remember"):
        raise SpecEdgeError(
            "remember makes drafts depend on earlier outputs, which other actors may have "
            "generated; omit it"
        )
    is_open = request["num_draft_tokens"] in (AUTO, None) and request.get("replay") is None
    if is_open:
        request["num_draft_tokens"] = num_draft_tokens
    return is_open


def deployment(
    bundle: str | os.PathLike[str] | None = None,
    *,
    slots: int = 4,
    max_length: int | None = None,
    device: str = "cpu",
    draft_device: str | None = None,
    threads: int | None = None,
    ops: str = AUTO,
    settings: ServerSettings | None = None,
    num_replicas: int = 1,
    max_replicas: int | None = None,
    **options: Any,
) -> Any:
    """Return a Ray Serve application with the server of `specedge serve` in each replica.

    Args:
        bundle: Folder of a bundle, at the same path on each node; None is the embedded pair.
        slots: Concurrent requests of a replica.
        max_length: Limit of a text in tokens, prompt included; None is the context length.
        device: Device of the target, as in `specedge.load`.
        draft_device: Device of the draft model; None is the target's.
        threads: CPU threads, which Ray reserves; None is 1.
        ops: Graph variant, as in `specedge.load`.
        settings: Settings of the server.
        num_replicas: Number of replicas, or the smallest number if `max_replicas` is specified.
        max_replicas: Largest number of replicas, scaled by requests per slot.
        **options: Options of `ray.serve.deployment`.

    Raises:
        MissingExtraError: If Ray or the server's packages are not installed.
    """
    serve = import_ray("ray.serve")
    try:
        from specedge.serve.app import ServerSettings, make_app
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed: pip install 'specedge[serve]'"
        ) from error
    server = settings or ServerSettings()

    def build() -> Any:
        pipeline = load_pipeline(bundle, device, draft_device, threads, ops, slots, max_length)
        return make_app(pipeline, server)

    scaling: dict[str, Any] = {"num_replicas": num_replicas}
    if max_replicas is not None:
        scaling = {
            "autoscaling_config": {
                "min_replicas": num_replicas,
                "max_replicas": max_replicas,
                "target_ongoing_requests": slots,
            }
        }
    # The server reports a full queue itself, with the status and body of OpenAI's API.
    defaults = scaling | {
        "name": "specedge",
        "max_ongoing_requests": slots + server.max_waiting + 1,
        "ray_actor_options": actor_resources(threads or 1, device, draft_device),
    }
    return serve.deployment(**defaults | options)(serve.ingress(build)()).bind()


def actor_resources(threads: int, *devices: str | None) -> dict[str, Any]:
    """Return the resources that Ray reserves for an actor."""
    return {"num_cpus": threads, "num_gpus": 0 if {*devices} <= {"cpu", None} else 1}


def import_ray(name: str) -> Any:
    """Import Ray or one of its modules, with usage statistics off unless enabled by the user.

    Raises:
        MissingExtraError: If it is not installed.
    """
    import importlib

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed: pip install 'specedge[ray]'"
        ) from error


def _assigned_cpus() -> int | None:
    """Return the CPUs assigned to this actor, at most those available; None outside of an actor."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    assigned = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))
    from specedge.cpu_count import cpu_count

    return min(assigned, cpu_count()) or None


def _restore_integer(value: Any) -> Any:
    """Return an integer for a float without fraction: columns with nulls become floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _to_python(value: Any) -> Any:
    """Return arrays as lists and NaN as None.

    Structs of a column have the keys of all its rows, with null for those that a row lacks.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        entries = {key: _to_python(entry) for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_to_python(entry) for entry in value]
    return None if isinstance(value, float) and value != value else value
