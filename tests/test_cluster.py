"""Batch generation on Ray, without a cluster."""

import dataclasses
import os
import shutil
import sys
from types import SimpleNamespace

import pytest

from installed import run
from specedge.bundle import store
from specedge.cli import cluster
from specedge.cpu_count import cpu_count
from specedge.errors import BundleError, MissingExtraError, SpecEdgeError
from specedge.ray import (
    actor_resources,
    deployment,
    fix_draft_length,
    import_ray,
    load_pipeline,
)
from specedge.request import GenerationRequest, item_seed
from specedge.runtime.requests import loader
from specedge.runtime.requests.batch import BatchItem


def items(number):
    return [BatchItem(i, f"id {i}", "a", None, {"num_draft_tokens": 4}) for i in range(number)]


def recording(threads):
    """A load without notes that appends its number of threads."""
    return lambda *args, **_: threads.append(args[2]) or SimpleNamespace(notes=[])


def results(missing):
    return [(item.index, {"index": item.index}) for item in missing]


def test_results_are_ordered_and_yielded_as_soon_as_possible():
    yielded = []

    def attempt(missing, is_first):
        for index, result in [*results(missing[:2])[::-1], *results(missing[2:])]:
            yielded.append(index)
            yield index, result

    seen = [(r["index"], len(yielded)) for r in cluster.in_order(items(4), attempt)]
    assert seen == [(0, 2), (1, 2), (2, 3), (3, 4)]


def test_prompts_of_a_lost_worker_are_retried(capsys):
    attempts = []

    def attempt(missing, is_first):
        attempts.append(([item.index for item in missing], is_first))
        yield from results([i for i in missing if i.index not in (1, 2) or len(attempts) > 1])

    assert [r["index"] for r in cluster.in_order(items(5), attempt)] == [0, 1, 2, 3, 4]
    assert attempts == [([0, 1, 2, 3, 4], True), ([1, 2], False)]
    assert capsys.readouterr().err == "note: retrying 2 prompts of lost workers\n"


@pytest.mark.parametrize(("number", "lost"), [(3, 1), (1, 0)])
def test_prompt_crashing_its_workers_yields_error_line(number, lost):
    def attempt(missing, is_first):
        yield from results([item for item in missing if item.index != lost])

    lines = list(cluster.in_order(items(number), attempt))
    assert [line["index"] for line in lines] == [*range(number)]
    assert lines[lost]["error"].startswith("its worker was lost 5 times")


def test_cluster_without_completed_prompts_is_an_error():
    with pytest.raises(SpecEdgeError, match="every worker was lost"):
        list(cluster.in_order(items(2), lambda missing, is_first: iter(())))


def test_requests_fix_machine_dependent_draft_length():
    request = dataclasses.asdict(GenerationRequest())
    assert fix_draft_length(request, 3)
    assert request["num_draft_tokens"] == 3
    assert not fix_draft_length(request, 5)
    replayed = dataclasses.asdict(GenerationRequest(replay=[["model", 4, 9]]))
    assert not fix_draft_length(replayed, 3)
    with pytest.raises(SpecEdgeError, match="remember"):
        fix_draft_length(dataclasses.asdict(GenerationRequest(remember=True)), 3)


def test_all_actors_have_the_same_kind_of_device():
    cluster.check_devices("cpu", None)
    cluster.check_devices("cuda", "cpu")
    for device in ("auto", "cuda:1"):
        with pytest.raises(SpecEdgeError, match=f"got {device}; use cpu or cuda"):
            cluster.check_devices("cpu", device)
    assert actor_resources(3, "cpu", None) == {"num_cpus": 3, "num_gpus": 0}
    assert actor_resources(1, "cuda", "cpu") == {"num_cpus": 1, "num_gpus": 1}


def test_capacity_of_a_node():
    node = {"CPU": 7.0, "GPU": 2.0}
    assert cluster._capacity(node, {"num_cpus": 2, "num_gpus": 0}) == 3
    assert cluster._capacity(node, {"num_cpus": 2, "num_gpus": 1}) == 2
    assert cluster._capacity({}, {"num_cpus": 1, "num_gpus": 0}) == 0


@pytest.mark.parametrize(("devices", "threads"), [(("cpu", None), 1), (("cuda", None), None)])
def test_threads_are_the_cpus_of_an_actor(monkeypatch, devices, threads):
    loaded = []
    monkeypatch.setattr(loader, "load", recording(loaded))
    monkeypatch.setattr("specedge.ray._assigned_cpus", lambda: 1)
    load_pipeline(None, *devices, None, "auto")
    assert loaded == [threads]


def test_a_different_bundle_on_a_node_is_refused(tmp_path):
    copy = shutil.copytree(store.embedded_folder(), tmp_path / "pair")
    with pytest.raises(BundleError, match="differs from this machine's bundle"):
        cluster.ItemGenerator("0" * 64, str(copy))


def test_an_actor_uses_no_more_cpus_than_are_available(monkeypatch):
    context = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1000.0})
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    loaded = []
    monkeypatch.setattr(loader, "load", recording(loaded))
    load_pipeline(None, "cpu", None, None, "auto")
    assert loaded == [cpu_count()]


def test_seeds_wrap_around_at_64_bits():
    assert [item_seed(2**64 - 1, i) for i in (0, 1)] == [2**64 - 1, 0]
    assert item_seed(-5, 2) == -3


def test_a_missing_ray_names_the_extra(text, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    text.write_text("a\n", "utf-8")
    result = run("generate", "--prompts", text, "--ray", "-k", 2)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "specedge: ray is not installed: pip install 'specedge[ray]'\n"
    with pytest.raises(MissingExtraError, match=r"specedge\[ray\]"):
        deployment()


def test_usage_statistics_of_ray_are_off(monkeypatch):
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    import_ray("json")
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_an_actor_logs_the_notes_of_its_load(monkeypatch, caplog):
    loaded = SimpleNamespace(notes=["costs were measured again"])
    monkeypatch.setattr(loader, "load", lambda *_, **__: loaded)
    assert load_pipeline("pair", "cpu", None, 1, "auto") is loaded
    assert caplog.messages == loaded.notes
