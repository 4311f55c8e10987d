"""Commands on an encoder-decoder: each works, or refuses it in one line."""

import json
import shutil

import pytest
from click.testing import CliRunner

from auditing import Ticks
from encoder_decoder_bundles import make_encoder_decoder
from specedge.cli import cli
from specedge.errors import SpecEdgeError
from specedge.runtime.backend.sessions import Device
from specedge.verification import audit
from specedge.verification.report import PASSED, SKIPPED

PROMPT = "w1 w2 w3"


@pytest.fixture(scope="module", params=["own", "shared", None])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    make_encoder_decoder(folder, request.param)
    return folder


def run(*arguments):
    result = CliRunner().invoke(cli, arguments)
    if isinstance(result.exception, SpecEdgeError):
        return str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.output


def test_generate_takes_a_decoder_prefix(folder):
    options = ("--bundle", folder, "-n", "8", "--ignore-eos", "--json", PROMPT)
    tokens = [
        json.loads(run("generate", *map(str, options), *prefix).rpartition("}")[0] + "}")["tokens"]
        for prefix in ((), ("--decoder-prefix", "fra_Latn"), ("--decoder-prefix", "deu_Latn"))
    ]
    assert tokens[0] == tokens[1] != tokens[2]


def test_a_batch_may_set_a_prefix_for_each_prompt(folder, tmp_path):
    lines = [{"prompt": PROMPT}, {"prompt": PROMPT, "decoder_prefix": [4]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    output = tmp_path / "out.jsonl"
    run(
        "generate", "--bundle", str(folder), "--prompts", str(file), "--output", str(output),
        "--ignore-eos", "-n", "8",
    )  # fmt: skip
    first, second = (json.loads(line)["tokens"] for line in output.open(encoding="utf-8"))
    assert first != second


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("generate", PROMPT, "--chat"), "is an encoder-decoder, which has no chats"),
        (("compare", PROMPT, "--chat"), "is an encoder-decoder, which has no chats"),
        (("build", "--device", "tensorrt"), "tensorrt does not run encoder-decoders"),
        (("generate", PROMPT, "--device", "rtx"), "rtx does not run encoder-decoders"),
        (("generate", "w1 " * 40), "reads at most 30"),
    ],
)
def test_refusals(folder, arguments, problem):
    name, *rest = arguments
    assert problem in run(name, "--bundle", str(folder), *rest)


def test_inspect_shows_the_encoder(folder):
    assert "encoder        up to 30 tokens" in run("inspect", "--bundle", str(folder))


def test_compare_finds_the_same_tokens(folder):
    text = run("compare", "--bundle", str(folder), PROMPT, "--repeats", "1", "--ignore-eos")
    assert "same tokens          yes" in text


@pytest.mark.parametrize("is_speech", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_check_of_verify_passes(tmp_path, is_speech):
    bundle = make_encoder_decoder(tmp_path, is_speech=is_speech)
    ticks = Ticks(1000)

    def on_progress(check):
        steps = {"caches": 0.1, "self-draft": 0.1, "greedy": 0.05, "coupled": 3.0, "graphs": 0.3}
        ticks.step = ({"joint": 0.06, "sampled": 3.0} | steps).get(check, 1.0)

    report = audit.audit(bundle, audit.ExecutionSettings(Device()), (), ticks.budget, on_progress)
    statuses = {finding.check: finding.status for finding in report.findings}
    assert statuses.pop("batched") == SKIPPED
    assert {*statuses.values()} == {PASSED}, report.findings


def test_damage_of_an_encoder_is_an_error(tmp_path):
    make_encoder_decoder(tmp_path)
    shutil.copy(tmp_path / "draft" / "encoder.onnx", tmp_path / "target" / "open.onnx")
    assert "open.onnx: " in run("generate", "--bundle", str(tmp_path), PROMPT)
