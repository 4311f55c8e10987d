"""The tests' own host, in Python, on the installed ONNX Runtime and on an older one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hosts]

ROOT = Path(__file__).parents[2]
OLDEST = "SPECEDGE_OLDEST_PYTHON"
# Needs NumPy and ONNX Runtime alone.
REPLAY = """
import json, sys
from pathlib import Path
from types import SimpleNamespace

import onnxruntime as ort

from round_host import Fused, Split
from specedge import int8_products

folder = Path(sys.argv[1])
manifest = json.loads((folder / "bundle.json").read_text("utf-8"))
golden = json.loads((folder / manifest["hosts"]["golden"]).read_text("utf-8"))
target, ops = manifest["models"]["target"], manifest["hosts"]["ops"]
graphs = {(g["name"], g["num_draft_tokens"]): g["file"] for g in manifest["hosts"]["graphs"]}
decoders = {g["ops"]: g["file"] for g in target["graphs"] if g["name"] == "decoder"}
sizes = SimpleNamespace(vocab_size=target["vocab_size"])
ends = SimpleNamespace(pass_boundaries=manifest["hosts"].get("pass_boundaries", ()))
bundle = SimpleNamespace(context_length=target["context_length"], target=sizes, hosts=ends)
ends = manifest["end_tokens"]
first = manifest.get("decoder_start", []) + manifest.get("decoder_prefix", [])


def session(path, entries):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


entries = dict(manifest["hosts"]["session_options"])
product = session(int8_products.PRODUCT_GRAPH, entries)
if not int8_products.are_exact(lambda x: product.run(None, {"x": x})[0]):
    entries[int8_products.UNSIGNED_OPTION] = "1"


def opened(file):
    return session(folder / file, entries)


opener = opened(graphs["open", None]) if first else None


def host(k):
    if ("round", k) in graphs:
        return Fused(opened(graphs["round", k]), bundle, ends, opener)
    draft, accept = (opened(graphs[name, None]) for name in ("draft", "accept"))
    fuse = [opened(graphs["fuse", None])] if ("fuse", None) in graphs else []
    return Split((draft, opened(decoders[ops]), accept, *fuse), bundle, k, ends, opener)


SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
hosts, verdicts = {}, []
for one in golden["transcripts"]:
    k = one["num_draft_tokens"]
    hosts[k] = hosts.get(k) or host(k)
    settings = {name: one[name] for name in SETTINGS}
    prompt = one["prompt_tokens"]
    text = {"prompt": first, "source": prompt} if first else {"prompt": prompt}
    found = hosts[k].generate(max_new_tokens=one["max_new_tokens"], **text, **settings)
    verdicts.append(found == (one["tokens"], one["num_accepted"]))
print(json.dumps({"version": ort.__version__, "verdicts": verdicts}))
"""


@pytest.fixture(params=["fused", "split"])
def bundle(request):
    """A bundle of each layout."""
    return request.getfixturevalue(f"{request.param}_bundle")


def replay(python, bundle):
    """The version of a Python's ONNX Runtime, and which transcripts are written again."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths}
    command = [python, "-c", REPLAY, bundle]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["version"], found["verdicts"]


def release(version):
    return tuple(int(part) for part in version.split(".")[:2])


def test_golden_transcripts_are_reproduced(bundle):
    golden = json.loads((bundle / "golden.json").read_text("utf-8"))
    version, verdicts = replay(sys.executable, bundle)
    assert version == golden["onnxruntime"]
    assert verdicts == [True] * len(golden["transcripts"])
    assert len(verdicts) >= 5


@pytest.mark.parametrize(
    "name", ["encoder_decoder", "split_encoder_decoder", "eagle_head", "mtp_head"]
)
def test_golden_transcripts_of_other_models_are_reproduced(name, request):
    _, verdicts = replay(sys.executable, request.getfixturevalue(name))
    assert verdicts == [True] * len(verdicts)
    assert len(verdicts) >= 5


def test_golden_transcripts_are_reproduced_on_oldest_onnxruntime(bundle):
    if not (python := os.environ.get(OLDEST)):
        pytest.skip(f"set {OLDEST} to the Python of an environment with an older onnxruntime")
    hosts = json.loads((bundle / "bundle.json").read_text("utf-8"))["hosts"]
    find = "import onnxruntime; print(onnxruntime.__version__)"
    found = subprocess.run([python, "-c", find], capture_output=True, text=True, check=True)
    if release(found.stdout) < release(hosts["oldest_onnxruntime"]):
        pytest.skip(f"{found.stdout.strip()} is below what the bundle needs")
    version, verdicts = replay(python, bundle)
    assert release(version) < release(hosts["onnxruntime"])
    assert verdicts == [True] * len(verdicts)
