"""Batch generation on a Ray cluster: `specedge generate --prompts FILE --ray`."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import click

from specedge.bundle import Bundle, store
from specedge.cli.options import ANY_CLUSTER
from specedge.cli.terminal import pluralize, sanitize_line
from specedge.errors import BundleError, SpecEdgeError
from specedge.ray import Generate, actor_resources, fix_draft_length, import_ray
from specedge.runtime.requests.batch import (
    BatchItem,
    check_items,
    error_result,
    run_items,
)

HEAD_PORT = 6379  # Ray's default
CONNECT_TIMEOUT = 10.0  # seconds; Ray itself retries for minutes
MAX_ATTEMPTS = 5  # attempts that may lose a prompt's worker before the prompt gets an error
MAX_BATCH = 16  # prompts of a worker that are lost with it, several of which share passes

Attempt = Callable[[list[BatchItem], bool], Iterator[tuple[int, dict[str, Any]]]]


class ItemGenerator(Generate):
    """Ray Data actor that generates for pickled items with the driver's bundle."""

    def __init__(self, digest: str, bundle: str | None, **models: Any) -> None:
        folder = store.embedded_folder() if bundle is None else Path(bundle)
        if Bundle.read(folder).digest() != digest:
            raise BundleError(f"{folder} differs from this machine's bundle; copy the bundle again")
        super().__init__(bundle, **models)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        items = [pickle.loads(item) for item in batch["item"]]
        return {
            "index": [item.index for item in items],
            "result": [pickle.dumps(result) for result in run_items(self.pipeline, items)],
        }


@contextmanager
def generate_results(
    address: str, num_actors: int | None, models: dict[str, Any], items: list[BatchItem]
) -> Iterator[Iterator[dict[str, Any]]]:
    """Connect to a cluster and yield the results of prompts, in their order.

    Args:
        address: HOST:PORT of the cluster's head, or `ANY_CLUSTER`.
        num_actors: Number of actors; None starts as many as fit.
        models: The options of `load`: bundle, device, draft_device, threads, ops.
        items: Prompts.

    Raises:
        SpecEdgeError: If the cluster cannot be reached or no node has the resources of an actor.
    """
    check_devices(models["device"], models["draft_device"])
    folder = store.find_bundle(models["bundle"])
    bundle = Bundle.read(folder)
    _check_items(bundle, items)
    models = models | {
        "bundle": None if folder == store.embedded_folder() else str(folder.resolve())
    }
    with _connected(address) as ray:
        threads = models["threads"] or _default_threads(ray, models["device"])
        resources = actor_resources(threads, models["device"], models["draft_device"])
        capacity = sum(_capacity(node, resources) for node in _nodes(ray))
        if not capacity:
            raise SpecEdgeError(
                f"no node of the cluster has {pluralize(resources['num_cpus'], 'CPU')} and "
                f"{pluralize(resources['num_gpus'], 'GPU')} for an actor; reduce --threads, or add "
                "nodes"
            )
        yield in_order(
            items,
            partial(
                _attempt,
                ray,
                digest=bundle.digest(),
                models=models,
                concurrency=min(capacity, num_actors or capacity),
                resources=resources,
            ),
        )


def check_devices(*devices: str | None) -> None:
    """Raise SpecEdgeError for a device that may differ between actors."""
    for device in devices:
        if device is not None and (device == "auto" or ":" in device):
            raise SpecEdgeError(
                f"--ray needs the same device type for every actor, got {device}; use cpu or "
                "cuda without a number, as Ray assigns a GPU to each actor"
            )


def in_order(items: list[BatchItem], attempt: Attempt) -> Iterator[dict[str, Any]]:
    """Yield results in the order of their prompts, and retry prompts whose worker was lost.

    Ray's own retries would wait for the lost actor to restart, which never happens if the cluster
    has no resources left for it. `attempt` is called with prompts, and with True the first time:
    workers retry single prompts, so that one that crashes them does not take others with it.
    """
    missing = {item.index: item for item in items}
    due, ready = deque(missing), dict[int, dict[str, Any]]()
    for number in range(MAX_ATTEMPTS):
        for index, result in attempt(list(missing.values()), number == 0):
            ready[index] = result
            missing.pop(index, None)
            while due and due[0] in ready:
                yield ready.pop(due.popleft())
        if not missing:
            return
        click.echo(f"note: retrying {pluralize(len(missing), 'prompt')} of lost workers", err=True)
    if len(missing) == len(items) > 1:
        raise SpecEdgeError("every worker was lost before it completed a prompt; see Ray's logs")
    for index, item in missing.items():
        ready[index] = error_result(
            item, f"its worker was lost {MAX_ATTEMPTS} times; see Ray's logs"
        )
    yield from (ready[index] for index in due)


def _check_items(bundle: Bundle, items: list[BatchItem]) -> None:
    """Fix K of each prompt; raise errors before the first prompt runs."""
    from specedge.runtime.drafters.registry import DrafterRegistry

    k = bundle.num_draft_tokens
    if sum(fix_draft_length(item.request, k) for item in items):
        click.echo(
            f"note: K is fixed to {k} (-k {k}), as auto depends on the speed of each machine",
            err=True,
        )
    check_items(items, bundle, DrafterRegistry(bundle))


def _attempt(
    ray: Any,
    items: list[BatchItem],
    is_first: bool,
    *,
    digest: str,
    models: dict[str, Any],
    concurrency: int,
    resources: dict[str, Any],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield results with their index; those of lost workers are missing."""
    data = import_ray("ray.data")
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    context.max_errored_blocks = -1
    context.max_consecutive_actor_init_deaths = 2
    rows = [{"item": pickle.dumps(item)} for item in items]
    size = min(MAX_BATCH, -(-len(rows) // concurrency)) if is_first else 1
    results = data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        ItemGenerator,
        fn_constructor_args=(digest,),
        fn_constructor_kwargs=models,
        batch_size=size,
        concurrency=min(concurrency, -(-len(rows) // size)),
        max_restarts=0,
        max_task_retries=0,
        **resources,
    )
    try:
        for batch in results.iter_batches(batch_size=None, prefetch_batches=0):
            for index, result in zip(batch["index"], batch["result"], strict=True):
                yield int(index), pickle.loads(result)
    except ray.exceptions.RayError as error:
        if "creation task" in str(error):
            reason = sanitize_line(str(error).strip().splitlines()[-1].strip())
            raise SpecEdgeError(f"an actor could not start: {reason}") from error


def _nodes(ray: Any) -> list[dict[str, Any]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _default_threads(ray: Any, device: str) -> int:
    """Return all CPUs of the smallest node, so that an actor fits each; 1 on a GPU."""
    if device != "cpu":
        return 1
    counts = [int(node.get("CPU", 0)) for node in _nodes(ray)]
    return max(1, min([count for count in counts if count], default=1))


def _capacity(node: dict[str, Any], resources: dict[str, Any]) -> int:
    """Return the number of actors that a node has resources for."""
    needs = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
    return min(int(node.get(name, 0) // number) for name, number in needs.items() if number)


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect to a cluster, silence Ray's own output and keep this process's signal handlers."""
    ray = import_ray("ray")
    head = os.environ.get("RAY_ADDRESS") if address == ANY_CLUSTER else address
    _check_reachable(head)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with open(os.devnull, "w") as null, redirect_stdout(null), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ray.init(head, log_to_driver=False, logging_level=logging.CRITICAL)
        except (OSError, RuntimeError, ValueError) as error:  # no cluster, or another version
            raise SpecEdgeError(
                f"cannot connect to a Ray cluster at {head or 'this machine'}: {error}"
            ) from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        import_ray("ray.data")  # configures its loggers
        for name in ("ray", "ray.data"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_reachable(address: str | None) -> None:
    if address in (None, "auto", "local"):
        return
    assert address is not None
    if "://" in address:
        raise SpecEdgeError(
            f"expected HOST:PORT of the cluster's head, got {address}; run the command on a machine"
            " of the cluster, for example with 'ray job submit'"
        )
    host, _, port = address.rpartition(":") if ":" in address else (address, "", str(HEAD_PORT))
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
    except (OSError, OverflowError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecEdgeError(
            f"no Ray cluster at {address}: {reason}; start one with 'ray start --head', or omit "
            "the address"
        ) from error
