"""A Ray cluster of three nodes in processes here: prompts over it, and a server on it."""

import json
import signal
import socket
import subprocess
import time

import pytest

from installed import COMMAND, run_process

ray = pytest.importorskip("ray", reason="needs the ray extra")

PROMPTS = "".join(f"def read_{i}(path):\n" for i in range(60))
OPTIONS = ["-n", "24", "--temperature", "0.8", "--seed", "5", "-k", "4", "--ignore-eos"]
STORE = 80 * 2**20  # bytes of a node's object store, about the least that Ray takes
# How soon a node that is gone counts as dead; Ray's own is 15 seconds.
NOTICING = {"health_check_period_ms": 1000, "health_check_failure_threshold": 4}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head and two nodes, a CPU each; one of them claims a GPU that is not there."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        home = str(tmp_path_factory.mktemp("home"))
        for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HOME"):
            patch.setenv(variable, home)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray Serve kills a proxy that does not start in 5 seconds, too few on a busy machine.
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        patch.delenv("RAY_ADDRESS", raising=False)
        own = {"num_cpus": 1, "object_store_memory": STORE}
        head = own | {"include_dashboard": False, "_system_config": NOTICING}
        found = Cluster(initialize_head=True, head_node_args=head)
        found.add_node(**own, num_gpus=1)
        yield found
        ray.shutdown()
        found.shutdown()


@pytest.fixture
def connected(cluster):
    """This process as a driver of the cluster."""
    ray.init(cluster.address, log_to_driver=False, logging_level="CRITICAL")
    yield
    ray.shutdown()


def lines_of(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until_lines(process, path, number):
    end = time.monotonic() + 90
    while lines_of(path) < number:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end, "no lines came"
        time.sleep(0.02)


@pytest.mark.slow(exhaustive=True)
def test_resumed_job_with_lost_node_writes_single_machine_output(cluster, text, tmp_path):
    text.write_text(PROMPTS, "utf-8")
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    assert run_process("generate", "--prompts", text, "--output", alone, *OPTIONS).returncode == 0
    command = [*COMMAND, "generate", "--prompts", str(text), "--output", str(spread), *OPTIONS]
    command += ["--ray", cluster.address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until_lines(process, spread, 4)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    done = lines_of(spread)
    first, *more = said.split("\n")
    assert first == f"{done} of 60 prompts done, 0 failed, {done * 24} tokens"
    assert "".join(more) == "specedge: interrupted"
    assert spread.read_bytes() == b"".join(alone.read_bytes().splitlines(True)[:done])

    third = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    with subprocess.Popen([*command, "--resume"], stderr=subprocess.PIPE, text=True) as process:
        until_lines(process, spread, done + 12)
        cluster.remove_node(third, allow_graceful=False)
        said = process.communicate(timeout=120)[1].splitlines()
    assert process.returncode == 0, said
    assert spread.read_bytes() == alone.read_bytes()
    left = 60 - done
    assert said[-1] == f"{left} of {left} prompts done, 0 failed, {left * 24} tokens"
    assert all(line.startswith("note: ") and "of lost workers" in line for line in said[:-1])


def test_stdout_has_only_results_and_note_reports_fixed_k(cluster, jsonl):
    lines = [{"prompt": "def f(", "id": "a"}, {"prompt": ""}, {"prompt": "import", "seed": 3}]
    jsonl.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    options = ["--prompts", jsonl, "-n", 8, "--temperature", 1, "--seed", 2]
    alone = run_process("generate", *options, "-k", 4)
    options += ["--ray", "--ray-actors", 1]
    spread = run_process("generate", *options, RAY_ADDRESS=cluster.address)
    assert spread.stdout == alone.stdout, spread.stderr
    assert spread.returncode == alone.returncode == 1
    assert spread.stderr.splitlines() == [
        "note: K is fixed to 4 (-k 4), as auto depends on the speed of each machine",
        "3 of 3 prompts done, 1 failed, 16 tokens",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ray", "127.0.0.1:1"], "no Ray cluster at 127.0.0.1:1: Connection refused; start one"),
        (["--ray", "ray://127.0.0.1:1"], "expected HOST:PORT of the cluster's head"),
    ],
)
def test_unreachable_cluster_is_one_line_error_within_30_seconds(text, options, said):
    text.write_text("a\n", "utf-8")
    began = time.monotonic()
    result = run_process("generate", "--prompts", text, "-k", 4, *options)
    assert time.monotonic() - began < 30
    assert (result.returncode, result.stdout) == (1, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("all_cpus")
def test_missing_resources_are_one_line_error(cluster, text):
    text.write_text("a\n", "utf-8")
    asked = ["generate", "--prompts", text, "-k", 4, "--ray", cluster.address]
    result = run_process(*asked, "--threads", 2)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "no node of the cluster has 2 CPUs and 0 GPUs for an actor" in result.stderr
    result = run_process(*asked, "--device", "cuda")
    assert result.returncode == 1
    assert "an actor could not start: " in result.stderr.splitlines()[-1]
    assert "threads" not in result.stderr  # but for what this machine lacks


def test_ray_data_continues_a_column_of_prompts(connected, pipeline):
    import specedge.ray

    rows = [{"index": i, "prompt": prompt} for i, prompt in enumerate(("def f(", "import"))]
    options = {"max_new_tokens": 8, "temperature": 0.8, "num_draft_tokens": 4}
    made = ray.data.from_items(rows).map_batches(
        specedge.ray.Generate,
        fn_constructor_kwargs={"seed": 7, **options},
        concurrency=1,
        num_cpus=1,
    )
    found = sorted(made.take_all(), key=lambda row: row["index"])
    for row in found:
        alone = pipeline.generate(row["prompt"], seed=7 + row["index"], **options)
        assert row["generated_text"] == alone.text
        assert json.loads(row["result"])["tokens"] == alone.tokens


def test_ray_serve_response_equals_server_response(connected, pipeline):
    import openai
    from ray import serve

    import specedge.ray

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(specedge.ray.deployment(slots=2, max_replicas=2))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60)
        asked = {"model": client.models.list().data[0].id, "prompt": "def f(", "max_tokens": 8}
        more = {
            "temperature": 0.8,
            "seed": 3,
            "extra_body": {"speculative": {"num_draft_tokens": 4}},
        }
        alone = pipeline.generate("def f(", 8, 0.8, seed=3, num_draft_tokens=4)
        whole = client.completions.create(**asked, **more)
        assert whole.choices[0].text == alone.text
        pieces = client.completions.create(**asked, **more, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == alone.text
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(**asked, temperature=-1)
    finally:
        serve.shutdown()
