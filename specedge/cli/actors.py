"""The actors that a Ray cluster has room for, and what its nodes must have in common."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from specedge.bundle import Bundle, store
from specedge.cli.ray_process import Heard, last_line
from specedge.cli.terminal import one_line
from specedge.errors import BundleError, SpecEdgeError
from specedge.ray import Generate, imported, reserved
from specedge.runtime.planning.cost_files import processor
from specedge.runtime.requests.items import Item, answered, check_drafters
from specedge.runtime.text.chat import load_template
from specedge.version import __version__

MOST_STARTS = 2  # that fail in a row: one may have been on a node that dies
PATIENCE = 120  # seconds for a node to start a process and answer


class Shared:
    """A bundle that every node has: the one that comes with specedge, or a folder at one place."""

    def __init__(self, name: str | None) -> None:
        found = store.find_bundle(name)
        bundle = Bundle.read(found)
        self.num_draft_tokens = bundle.num_draft_tokens
        self.digest = bundle.digest()
        self.place = None if found == store.embedded_folder() else str(found.absolute())

    def check(self) -> Bundle:
        """The bundle, on the node that asks. Raises BundleError."""
        folder = store.embedded_folder() if self.place is None else Path(self.place)
        found = Bundle.read(folder)
        if found.digest() != self.digest:
            raise BundleError(f"{folder} is another bundle than here; copy it anew")
        return found


def check_device(*devices: str | None) -> None:
    """Refuse what the nodes could not have in common."""
    for device in devices:
        if device is not None and (device == "auto" or ":" in device):
            raise SpecEdgeError(
                f"--ray needs one kind of device for all actors, got {device}; give cpu or cuda, "
                "without a number: Ray gives each actor a GPU of its own"
            )


class Lines(Generate):
    """Generate for prompts that were read and checked already."""

    def __init__(self, shared: Shared, **models: Any) -> None:
        shared.check()
        super().__init__(shared.place, **models)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        items = [pickle.loads(item) for item in batch["item"]]
        found = [(item.index, pickle.dumps(answered(self.pipeline, item))) for item in items]
        return dict(zip(("index", "result"), map(list, zip(*found, strict=True)), strict=True))


class Pool:
    """Actors on the nodes that are there, one pass after the other."""

    def __init__(
        self,
        bundle: Shared,
        models: dict[str, Any],
        num_actors: int | None,
        items: list[Item],
        heard: Heard,
    ) -> None:
        self._ray, self._data = imported("ray"), imported("ray.data")
        self._bundle, self._asked, self._heard = bundle, num_actors, heard
        self._models = {name: value for name, value in models.items() if name != "bundle"}
        threads = self._models["threads"] or self._usual_threads()
        self._needs = reserved(threads, models["device"], models["draft_device"])
        self._size()
        self._check(items)

    def run(self, items: list[Item]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Results as they come; those that a lost worker had begun are missing."""
        context = self._data.DataContext.get_current()
        context.enable_progress_bars = False
        # What an actor loses Ray would give to its successor, for which there may never be room:
        # such a block is left out, and the others go on.
        context.max_errored_blocks = -1
        context.max_consecutive_actor_init_deaths = MOST_STARTS
        rows = [{"item": pickle.dumps(item)} for item in items]
        results = self._data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Lines,
            fn_constructor_args=(self._bundle,),
            fn_constructor_kwargs=self._models,
            batch_size=1,
            concurrency=min(self._size(), len(rows)),
            max_restarts=0,
            max_task_retries=0,
            **self._needs,
        )
        try:
            for batch in results.iter_batches(batch_size=None, prefetch_batches=0):
                for index, result in zip(batch["index"], batch["result"], strict=True):
                    yield int(index), pickle.loads(result)
        except self._ray.exceptions.RayError as error:
            if "creation task" in str(error):
                raise SpecEdgeError(f"an actor could not start: {last_line(error)}") from error
            self._heard.last = last_line(error)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _usual_threads(self) -> int:
        """All CPUs of the smallest node, so that an actor fits on each; one beside a GPU."""
        if self._models["device"] != "cpu":
            return 1
        found = [int(node["Resources"].get("CPU", 0)) for node in self._nodes()]
        return max(1, min([number for number in found if number], default=1))

    def _size(self) -> int:
        """How many actors there are to be."""
        fits = sum(self._room(node) for node in self._nodes())
        if not fits:
            cpus, gpus = self._needs.values()
            raise SpecEdgeError(
                f"no node of the cluster has the {cpus} CPUs and {gpus} GPUs of an actor; give "
                "fewer --threads, or add nodes"
            )
        return min(fits, self._asked or fits)

    def _room(self, node: dict[str, Any]) -> int:
        has = node["Resources"]
        wanted = {"CPU": self._needs["num_cpus"], "GPU": self._needs["num_gpus"]}
        return min(int(has.get(name, 0) // number) for name, number in wanted.items() if number)

    def _check(self, items: Iterable[Item]) -> None:
        """Ask every node that may have an actor whether it can give the same lines."""
        places = {item.place: item.request["drafter"] for item in items}
        if any(item.messages for item in items):
            load_template(self._bundle.check())
        asked = [
            (_name(node), self._ask(node, places)) for node in self._nodes() if self._room(node)
        ]
        kinds, errors = set(), self._ray.exceptions
        for name, answer in asked:
            try:
                facts = self._ray.get(answer, timeout=PATIENCE)
            except (errors.NodeDiedError, errors.TaskUnschedulableError, errors.WorkerCrashedError):
                continue  # it is going; what is given to it will be given to others again
            except errors.RayError as error:
                raise SpecEdgeError(f"{name}: {last_line(error)}") from error
            if "error" in facts:
                raise SpecEdgeError(f"{name}: {facts['error']}")
            kinds.add(facts["kind"])
        if len(kinds) > 1:
            shown = "; ".join(sorted(kinds))
            said = "nodes differ, and so may last bits of numbers, and near-ties of texts"
            click.echo(one_line(f"note: {said}: {shown}"), err=True)

    def _ask(self, node: dict[str, Any], places: dict[str, object]) -> Any:
        pinned = imported("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        there = {"num_cpus": 0, "scheduling_strategy": pinned(node["NodeID"], soft=False)}
        return self._ray.remote(**there)(_facts).remote(self._bundle, places)


def _facts(shared: Shared, drafters: dict[str, object]) -> dict[str, str]:
    """What a node says of itself: its kind, or why it cannot give the lines that others give."""
    from specedge.runtime.backend.ort import onnxruntime
    from specedge.runtime.drafters.registry import Drafters

    try:
        check_drafters(Drafters(shared.check()), drafters.items())
        version = onnxruntime().__version__
    except SpecEdgeError as error:
        return {"error": str(error)}
    name = processor().rpartition(",")[0]
    return {"kind": f"{name} with ONNX Runtime {version} and specedge {__version__}"}


def _name(node: dict[str, Any]) -> str:
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
