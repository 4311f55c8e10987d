"""What `--ray` and `specedge.ray` promise, where no Ray is needed to see it."""

import dataclasses
import json
import logging
import os
import shutil
import sys
from types import SimpleNamespace

import pytest

from installed import run
from specedge.bundle import store
from specedge.cpu_count import cpu_count
from specedge.errors import BundleError, MissingExtraError, SpecEdgeError
from specedge.request import GenerationRequest
from specedge.runtime.requests.items import Item, seed_of

pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")

from specedge.bundle import MANIFEST, Bundle
from specedge.cli import actors, cluster
from specedge.cli.ray_process import Heard, last_line, quiet
from specedge.ray import deployment, fixed, imported, loaded, reserved


def items(number):
    return [Item(i, f"id {i}", "a", None, {"num_draft_tokens": 4}) for i in range(number)]


def heard(last="it died"):
    found = Heard()
    found.last = last
    return found


def results(left):
    return [(item.index, {"index": item.index}) for item in left]


def test_results_come_in_order_and_as_soon_as_those_before_them_are_there():
    given = []

    def run_backwards(left):
        for index, result in [*results(left[:2])[::-1], *results(left[2:])]:
            given.append(index)
            yield index, result

    seen = [(r["index"], len(given)) for r in cluster.in_order(items(4), run_backwards, heard())]
    assert seen == [(0, 2), (1, 2), (2, 3), (3, 4)]


def test_what_a_lost_worker_had_is_done_again_and_no_more(capsys):
    passes = []

    def losing(left):
        passes.append([item.index for item in left])
        yield from results([item for item in left if item.index not in (1, 2) or len(passes) > 1])

    found = [r["index"] for r in cluster.in_order(items(5), losing, heard())]
    assert found == [0, 1, 2, 3, 4]
    assert passes == [[0, 1, 2, 3, 4], [1, 2]]
    assert capsys.readouterr().err == (
        "note: 2 lines lost with a worker or a node, and done again: it died\n"
    )


def test_a_prompt_that_every_worker_dies_of_fails_alone():
    def killing(left):
        yield from results([item for item in left if item.index != 1])

    found = list(cluster.in_order(items(3), killing, heard()))
    assert [r["index"] for r in found] == [0, 1, 2]
    assert found[1] == {
        "index": 1,
        "id": "id 1",
        "asked": "",
        "error": "its worker was lost 5 times: it died",
    }
    with pytest.raises(SpecEdgeError, match="no worker lived to do a line: it died"):
        list(cluster.in_order(items(2), lambda left: iter(()), heard()))


def test_a_prompt_that_every_worker_dies_of_fails_alone_as_its_parts_only_one(monkeypatch):
    """That ended the job: a file of one prompt, or a long one whose last part has one."""
    monkeypatch.setattr(cluster, "AT_A_TIME", 2)
    for number in (1, 3):

        def killing(left, last=number - 1):
            yield from results([item for item in left if item.index != last])

        *before, found = cluster.in_order(items(number), killing, heard())
        assert [r["index"] for r in before] == [*range(number - 1)]
        assert found["error"] == "its worker was lost 5 times: it died"


def test_workers_that_no_longer_live_end_the_job_and_leave_the_rest_to_resume(monkeypatch):
    """Each line of the rest was an error, which `--resume` keeps."""
    monkeypatch.setattr(cluster, "AT_A_TIME", 2)

    def dying(left):
        yield from results([item for item in left if item.index < 2])

    lines = cluster.in_order(items(6), dying, heard())
    assert [next(lines)["index"] for _ in range(2)] == [0, 1]
    with pytest.raises(SpecEdgeError, match="no worker lived to do a line: it died"):
        next(lines)


def test_a_long_file_goes_by_parts_so_that_a_loss_holds_few_lines_back(monkeypatch):
    monkeypatch.setattr(cluster, "AT_A_TIME", 2)
    passes = []

    def noting(left):
        passes.append(len(left))
        yield from results(left)

    assert len(list(cluster.in_order(items(5), noting, heard()))) == 5
    assert passes == [2, 2, 1]


def test_nothing_is_left_to_clocks_or_to_what_ran_before():
    request = dataclasses.asdict(GenerationRequest())
    assert fixed(request, 3)
    assert request["num_draft_tokens"] == 3
    assert not fixed(request, 5)
    replayed = dataclasses.asdict(GenerationRequest(replay=[["model", 4, 9]]))
    assert not fixed(replayed, 3)
    with pytest.raises(SpecEdgeError, match="remember"):
        fixed(dataclasses.asdict(GenerationRequest(remember=True)), 3)


def test_one_kind_of_device_for_all_and_its_own_gpu_for_each():
    actors.check_device("cpu", None)
    actors.check_device("cuda", "cpu")
    for device in ("auto", "cuda:1"):
        with pytest.raises(SpecEdgeError, match=f"got {device}; give cpu or cuda"):
            actors.check_device("cpu", device)
    assert reserved(3, "cpu", None) == {"num_cpus": 3, "num_gpus": 0}
    assert reserved(1, "cuda", "cpu") == {"num_cpus": 1, "num_gpus": 1}
    assert reserved(2, "cpu", "cuda") == {"num_cpus": 2, "num_gpus": 1}


@pytest.mark.parametrize(
    ("devices", "threads"),
    [
        (("cpu", None), 1),
        (("cuda", "cpu"), 1),
        (("cpu", "cuda"), 1),
        (("cuda", None), None),
        (("cuda", "cuda"), None),
    ],
)
def test_threads_are_an_actors_cpus_where_a_model_is_on_them(monkeypatch, devices, threads):
    from specedge.runtime.requests import loading

    given = []

    def load(bundle, device, threads, draft_device, share_threads, **_):
        loading.devices_of(
            Bundle.read(bundle), device, threads, share_threads, "auto", draft_device
        )
        given.append(threads)

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr("specedge.ray._num_cpus", lambda: 1)
    loaded(None, *devices, None, "auto")
    assert given == [threads]


def test_a_node_without_the_bundle_or_with_another_says_so(tmp_path):
    copy = shutil.copytree(store.embedded_folder(), tmp_path / "pair")
    shared = actors.Shared(str(copy))
    assert actors._facts(shared, {})["kind"].endswith(f"specedge {actors.__version__}")
    manifest = json.loads((copy / MANIFEST).read_text("utf-8"))
    (copy / MANIFEST).write_text(json.dumps(manifest | {"chat_template": "Hi"}), "utf-8")
    assert actors._facts(shared, {})["error"] == f"{copy} is another bundle than here; copy it anew"
    with pytest.raises(BundleError):
        actors.Lines(shared)
    shutil.rmtree(copy)
    assert str(copy) in actors._facts(shared, {})["error"]
    assert actors.Shared(None).place is None
    tables = {"prompts.jsonl, line 3: ": "ngram:gone"}
    said = actors._facts(actors.Shared(None), tables)["error"]
    assert said.startswith("prompts.jsonl, line 3: gone: No such file")


def test_a_node_that_claims_more_cpus_than_there_are_gives_an_actor_those_that_are(monkeypatch):
    found = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1000.0})
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: found)
    monkeypatch.setitem(sys.modules, "ray", ray)
    given = []
    monkeypatch.setattr(
        "specedge.runtime.requests.loading.load", lambda *args, **_: given.append(args[2])
    )
    loaded(None, "cpu", None, None, "auto")
    assert given == [cpu_count()]


def test_seeds_stay_within_those_that_there_are():
    assert [seed_of(2**64 - 1, i) for i in (0, 1)] == [2**64 - 1, 0]
    assert seed_of(-5, 2) == -3


def test_a_missing_ray_is_one_line_that_names_the_extra(text, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    text.write_text("a\n", "utf-8")
    result = run("generate", "--prompts", text, "--ray", "-k", 2)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "specedge: ray is not installed: pip install 'specedge[ray]'\n"
    with pytest.raises(MissingExtraError, match=r"specedge\[ray\]"):
        deployment()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--ray"], "--ray needs --prompts"),
        (["--prompts", "f", "--ray-actors", "2"], "--ray-actors needs --ray"),
    ],
)
def test_options_of_a_cluster_need_one(arguments, said):
    result = run("generate", *arguments)
    assert result.returncode == 1
    assert said in result.stderr.splitlines()[-1]


def test_what_ray_prints_and_logs_is_kept_off_and_its_last_error_is_known(capsys):
    before = list(logging.getLogger("ray").handlers)
    with quiet() as found:
        print("(raylet) Raylet is terminated.")
        try:
            raise RuntimeError("Traceback:\n  File\n\nDeviceError: no GPU\n")
        except RuntimeError:
            logging.getLogger("ray.data.internal").exception("An exception was raised")
    assert capsys.readouterr() == ("", "")
    assert found.last == "DeviceError: no GPU"
    assert logging.getLogger("ray").handlers == before
    assert last_line(ValueError()) == "ValueError"


def test_ray_is_told_to_report_nothing(monkeypatch):
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    imported("json")
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
