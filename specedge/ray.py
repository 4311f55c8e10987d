"""A pair on a Ray cluster: batches of `ray.data`, and an application of Ray Serve.

Ray itself is imported by its absolute name, which finds it though this module is called so, too,
and only where it is needed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from specedge.errors import MissingExtraError, SpecEdgeError
from specedge.option_specs import check_integer, option_specs
from specedge.request import AUTO, GenerationRequest, build_request
from specedge.runtime.requests.items import Item, answered, asked_of, failed, item_of, seed_of

if TYPE_CHECKING:
    from specedge.runtime.requests.pipeline import Pipeline
    from specedge.serve.app import ServerSettings


class Generate:
    """Continues the prompts of batches; an actor holds one set of weights.

        prompts.map_batches(specedge.ray.Generate, fn_constructor_kwargs={"bundle": "/shared/pair"},
                            batch_size=4, concurrency=2, num_cpus=4)

    `bundle` is a folder that each node has at that place, by default the pair that comes with
    specedge. `device`, `draft_device`, `ops` and `threads`, by default the actor's CPUs, are those
    of `specedge.load`. What remains are options of all prompts, as of `Pipeline.generate`.

    A batch has a column `prompt` (text, or lists of token ids) or `messages`, and may have columns
    of options by their names, where null is not given, nor within an object. A prompt is drawn with
    its own `seed`, else with `seed` + its `index`, a column that must be there then. Columns stay
    as they are, and three come new: `result`, a line of JSON as `specedge generate --prompts`
    writes it, `generated_text`, and `error`, one of which is null. A row whose values cannot be
    has that as its error, and the others go on.

    `num_draft_tokens` is the bundle's own K unless it is given: to choose it by the clock would let
    a text depend on the machine that it was drawn on. `remember` is refused for the same reason.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str] | None = None,
        *,
        device: str = "cpu",
        draft_device: str | None = None,
        threads: int | None = None,
        ops: str = AUTO,
        **request: Any,
    ) -> None:
        self._request = dataclasses.asdict(build_request(**request))
        self.pipeline = loaded(bundle, device, draft_device, threads, ops)
        fixed({**self._request}, self.pipeline.bundle.num_draft_tokens)  # refuses what cannot be
        self._told = self.pipeline.bundle.digest(), ops

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = [self._answered(facts) for facts in self._rows(batch)]
        return batch | {
            "result": [json.dumps(one, ensure_ascii=False) for one in found],
            "generated_text": [one.get("text") for one in found],
            "error": [one.get("error") for one in found],
        }

    def _rows(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What each row gives."""
        if not batch.keys() & {"prompt", "messages"}:
            raise ValueError(f"a batch needs a column prompt or messages, got {', '.join(batch)}")
        if self._request["seed"] is not None and not batch.keys() & {"index", "seed"}:
            raise ValueError("a seed needs a column index: prompt i is drawn with seed + i")
        names = [
            *(option_specs(GenerationRequest).keys() | {"id", "index", "prompt", "messages"})
            & {*batch}
        ]
        for row in zip(*(batch[name] for name in names), strict=True):
            facts = {name: _whole(_plain(value)) for name, value in zip(names, row, strict=True)}
            yield {name: value for name, value in facts.items() if value is not None}

    def _answered(self, facts: dict[str, Any]) -> dict[str, Any]:
        try:
            item = self._item(facts)
        except (ValueError, SpecEdgeError) as error:
            index, id_ = facts.get("index"), facts.get("id")
            index = index if type(index) is int else 0
            id_ = id_ if type(id_) in (str, int) else None
            return failed(Item(index, id_, None, None, {}), str(error))
        return answered(self.pipeline, item)

    def _item(self, facts: dict[str, Any]) -> Item:
        index, seed = check_integer("index", facts.get("index", 0), 0), self._request["seed"]
        if seed is not None and not facts.keys() & {"index", "seed"}:
            raise ValueError("a seed needs an index: prompt i is drawn with seed + i")
        own = {} if seed is None else {"seed": seed_of(seed, index)}
        item = item_of(index, facts, self._request | own)
        fixed(item.request, self.pipeline.bundle.num_draft_tokens)
        return dataclasses.replace(item, asked=asked_of(item, *self._told))


def loaded(
    bundle: str | os.PathLike[str] | None,
    device: str,
    draft_device: str | None,
    threads: int | None,
    ops: str,
    slots: int = 1,
    max_length: int | None = None,
) -> Pipeline:
    """A pair in an actor, with a thread for each CPU, where a model is on them, and a pool that its
    sessions share.
    """
    from specedge.bundle import store
    from specedge.runtime.requests.loading import load

    num_cpus = _num_cpus() if {"cpu", AUTO} & {device, draft_device or device} else None
    return load(
        bundle or store.embedded_folder(),
        device,
        threads or num_cpus,
        share_threads=num_cpus is not None,  # no other code of its process has sessions
        ops=ops,
        draft_device=draft_device,
        slots=slots,
        max_length=max_length,
    )


def fixed(request: dict[str, Any], num_draft_tokens: int) -> bool:
    """Let nothing of a request depend on clocks, or on what ran before; whether K was left open."""
    if request.get("remember"):
        raise SpecEdgeError(
            "remember lets a text's drafts depend on the texts before it, which other actors may "
            "have; leave it out"
        )
    left_open = request["num_draft_tokens"] in (AUTO, None) and request.get("replay") is None
    if left_open:
        request["num_draft_tokens"] = num_draft_tokens
    return left_open


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
    """An application for `ray.serve.run`: the server of `specedge serve` in each replica.

    `bundle` is a folder on each node, by default the pair that comes with specedge. A replica is
    as `specedge serve` with these `slots` and `max_length`; `settings` are
    `specedge.serve.app.ServerSettings`. There are `num_replicas`, or from so many to
    `max_replicas` by the queue: as many as have a request a slot. `options` are those of
    `ray.serve.deployment`; `ray_actor_options` reserve a CPU for each of `threads`, and a GPU where
    the device is one.
    """
    serve = imported("ray.serve")
    try:
        from specedge.serve.app import ServerSettings, make_app
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed: pip install 'specedge[serve]'"
        ) from error
    how = settings or ServerSettings()

    def build() -> Any:
        pipeline = loaded(bundle, device, draft_device, threads, ops, slots, max_length)
        return make_app(pipeline, how)

    number: dict[str, Any] = {"num_replicas": num_replicas}
    if max_replicas is not None:
        number = {
            "autoscaling_config": {
                "min_replicas": num_replicas,
                "max_replicas": max_replicas,
                "target_ongoing_requests": slots,
            }
        }
    # The server itself says when its queue is full, in words that clients of OpenAI's API know.
    usual = number | {
        "name": "specedge",
        "max_ongoing_requests": slots + how.max_waiting + 1,
        "ray_actor_options": reserved(threads or 1, device, draft_device),
    }
    return serve.deployment(**usual | options)(serve.ingress(build)()).bind()


def reserved(threads: int, *devices: str | None) -> dict[str, Any]:
    """What Ray sets aside for an actor."""
    return {"num_cpus": threads, "num_gpus": 0 if {*devices} <= {"cpu", None} else 1}


def imported(name: str) -> Any:
    """Ray, or a module of it. Raises MissingExtraError."""
    import importlib

    # Ray reports its use to its makers unless told otherwise before a cluster is started.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed: pip install 'specedge[ray]'"
        ) from error


def _num_cpus() -> int | None:
    """The CPUs that Ray has set aside for this actor, as far as there are so many; None outside of
    one.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    claimed = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))
    from specedge.cpu_count import cpu_count

    return min(claimed, cpu_count()) or None


def _whole(value: Any) -> Any:
    """A whole number as such: with a null beside it, a column of them is of floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(value: Any) -> Any:
    """A value of a batch, arrays and what they hold as lists, not a number as None.

    Objects of a column have all the keys that any of them has, with null for those that they lack.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        found = {key: _plain(one) for key, one in value.items()}
        return {key: one for key, one in found.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and value != value else value
