"""One bundle on the oldest Python and ONNX Runtime, and on this process's, as on a Jetson.

SPECEDGE_OLDEST_PYTHON is an interpreter of Python 3.10 with `pip install -e . onnxruntime==1.23.*`.
"""

import json
import os
import subprocess

import pytest

from checkpoints import make_pair
from installed import run
from specedge.exporter import export

OLD_PYTHON = os.environ.get("SPECEDGE_OLDEST_PYTHON")
PROMPT = "def read_config(path):"

pytestmark = pytest.mark.skipif(
    OLD_PYTHON is None, reason="SPECEDGE_OLDEST_PYTHON names no interpreter of Python 3.10"
)


def run_old(*arguments):
    done = subprocess.run(
        [OLD_PYTHON, "-m", "specedge", *map(str, arguments)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def float_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    draft, target = make_pair(folder, "llama", kv_heads=2)
    return export(draft, target, folder / "bundle", precision="fp32", ops="all").folder


def arguments(bundle, k):
    return ["generate", PROMPT, "--bundle", bundle, "-n", 48, "-k", k, "--ignore-eos", "--json"]


def test_interpreter_is_old():
    facts = json.loads(run_old("doctor", "--json"))
    assert facts["python"].startswith("3.10.")
    assert facts["packages"]["onnxruntime"].startswith("1.23.")


@pytest.mark.parametrize("k", [0, 4])
def test_float_bundle_gives_equal_text(float_pair, k):
    new = run(*arguments(float_pair, k))
    assert (
        json.loads(run_old(*arguments(float_pair, k)))["tokens"] == json.loads(new.stdout)["tokens"]
    )


def test_int8_pair_gives_text_of_plain_decoding():
    plain, speculative = (
        json.loads(run_old("generate", PROMPT, "-n", 96, "-k", k, "--json"))["tokens"]
        for k in (0, 4)
    )
    assert plain == speculative


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_bundles_pass_the_audit(float_pair, precision):
    bundle = ["--bundle", float_pair] if precision == "fp32" else []
    report = json.loads(run_old("verify", *bundle, "--minutes", 1.5, "--json"))
    assert report["result"] == "PASSED"
