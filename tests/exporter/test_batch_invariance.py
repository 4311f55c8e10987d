"""Batch invariance of exported models on this CPU, and a model that is not batch-invariant."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

import specedge
from checkpoints import make_pair
from rows import LENGTHS, dependent_lengths
from specedge.cli import cli
from specedge.errors import SpecEdgeError
from specedge.exporter import Progress, export
from specedge.exporter.verification import checks
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.decoding.invariance import LogitNoise, measure_noise
from specedge.runtime.requests import loader
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.logits import Logits

LENGTH = 100
PROMPTS = (range(40, 52), range(300, 303), [7, 8, 9] * 20)


class Trembling:
    """Model whose logits depend on the pass length, as on a GPU."""

    invariant_lengths = ()

    def __init__(self, model):
        self.model = model
        self.float32_error = model.float32_error
        self.num_experts = model.num_experts

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, tokens, num_rows=None):
        logits = self.model.forward(tokens, num_rows).array().copy()
        if len(tokens) > 1:
            logits += 1e-6 * np.sin(1e6 * logits)
        return Logits(logits)


class Twins(Trembling):
    """Model with pairs of tokens of nearly equal logits, so that noise changes choices."""

    def forward(self, tokens, num_rows=None):
        logits = super().forward(tokens, num_rows).array()
        logits[:, 1:128:2] = logits[:, :128:2] + 1e-5 * np.sin(1e7 * logits[:, 200:264])
        return Logits(logits)


@pytest.fixture(scope="module")
def pair(pairs):
    return specedge.load(pairs.bundle("gpt2").folder, ops="gqa")


@pytest.fixture(scope="module")
def noisy(pair):
    return Pipeline(pair.bundle, pair.tokenizer, Trembling(pair.target), pair.draft)


@pytest.fixture(scope="module")
def twins(pair):
    return Pipeline(pair.bundle, pair.tokenizer, Twins(pair.target), pair.draft)


@pytest.mark.slow(after_first=True)
def test_exported_models_are_batch_invariant(exported):
    for model in exported.models.values():
        for ops in model.parity:
            loaded = OrtModel(exported, model, Device(), ops)
            assert dependent_lengths(loaded, LENGTHS, min(140, model.context_length)) == []


def test_device_noise_is_measured(noisy):
    tokens = np.random.default_rng(0).integers(1, 500, 72).tolist()
    found = measure_noise(noisy.target, tokens, (5,), 16)
    assert 0 < found.by_length[5] < 2 * noisy.target.float32_error * found.largest


@pytest.mark.slow(exhaustive=True)
def test_export_notes_lengths_that_are_not_batch_invariant(tmp_path, monkeypatch):
    def none(runner, tokens, held):
        held.update(dict.fromkeys(held, False))
        return []

    monkeypatch.setattr(checks, "invariance_actions", none)
    draft, target = make_pair(tmp_path, "llama", context=96)
    progress = Progress()
    bundle = export(draft, target, tmp_path / "bundle", ops="gqa", progress=progress)
    assert bundle.target.parity["gqa"].invariant_lengths == ()
    assert sum("so text may differ from plain decoding" in note for note in progress.notes) == 2


@pytest.mark.parametrize("k", [1, 4])
def test_exact_tokens_equal_plain_decoding_on_noisy_device(twins, k):
    turned = 0
    for prompt in PROMPTS:
        plain = twins.generate(prompt, LENGTH, num_draft_tokens=0, ignore_eos=True)
        one, exact = (
            twins.generate(prompt, LENGTH, num_draft_tokens=k, ignore_eos=True, exact=exact)
            for exact in (False, True)
        )
        pairs = zip(one.tokens, plain.tokens, strict=True)
        first = next((i for i, (mine, its) in enumerate(pairs) if mine != its), None)
        assert first is None or first in [tie.position for tie in one.near_ties]
        turned += first is not None
        assert exact.tokens == plain.tokens
        assert exact.stats.num_exact_passes > 0
        assert 2 * exact.noise >= max(tie.margin for tie in one.near_ties)
        assert (plain.noise, plain.near_ties) == (0.0, [])
    assert turned


def test_every_token_is_near_tie_if_expert_routing_is_noisy(noisy):
    target = Trembling(noisy.target.model)
    target.num_experts = 8
    pipeline = Pipeline(noisy.bundle, noisy.tokenizer, target, noisy.draft)
    options = {"ignore_eos": True, "num_draft_tokens": 4}
    one = pipeline.generate(PROMPTS[0], 20, **options)
    assert [tie.position for tie in one.near_ties] == list(range(20))
    with pytest.raises(SpecEdgeError, match="may change the choice of experts; use 0 draft tokens"):
        pipeline.generate(PROMPTS[0], 20, exact=True, **options)
    options["num_draft_tokens"] = 0
    assert pipeline.generate(PROMPTS[0], 20, exact=True, **options).near_ties == []


def test_exact_runs_no_passes_without_near_ties(noisy):
    options = {"num_draft_tokens": 4, "ignore_eos": True}
    one = noisy.generate(PROMPTS[0], LENGTH, **options)
    exact = noisy.generate(PROMPTS[0], LENGTH, exact=True, **options)
    assert (one.near_ties, exact.near_ties) == ([], [])
    assert one.noise == exact.noise > 0
    assert exact.stats.num_exact_passes == 0
    assert exact.stats.num_target_passes == one.stats.num_target_passes


@pytest.mark.slow
def test_noise_is_measured_once_and_skipped_if_export_found_none(noisy, pairs, monkeypatch):
    from specedge.runtime.decoding import invariance as noise

    calls = []

    def counted(*args):
        calls.append(args)
        return measure_noise(*args)

    monkeypatch.setattr(noise, "measure_noise", counted)
    reckoned = LogitNoise(noisy.target, 256)
    assert (
        reckoned.bound([1, 2], 4, trusts_export=True)
        == reckoned.bound([3], 4, trusts_export=False)
        > 0
    )
    assert len(calls) == 1
    quiet = specedge.load(pairs.bundle("bfloat16").folder)
    assert quiet.noise.bound([1, 2], 4, trusts_export=True) == 0
    assert len(calls) == 1
    assert quiet.noise.bound([1, 2], 4, trusts_export=False) > 0
    assert len(calls) == 2


@pytest.fixture
def command(twins, monkeypatch):
    """Run the command line over the noisy pair."""
    monkeypatch.setattr(loader, "load", lambda *_, **options: twins)

    def run(*arguments):
        return CliRunner().invoke(cli, [str(argument) for argument in arguments])

    return run


def test_generate_reports_near_ties_and_cost_of_exact(command):
    options = ("import", "-n", 60, "-k", 4, "--ignore-eos")
    line = command("generate", *options).stderr
    assert re.search(
        r"near-ties? within the device's noise of \de-0\d \(positions? [\d, .]+\): ", line
    )
    assert "--exact resolves" in line
    assert re.search(
        r"resolved exactly by \d+ more passes in",
        command("generate", *options, "--exact").stderr,
    )
    found = json.loads(command("generate", *options, "--json").stdout)
    assert found["noise"] > 0
    assert all(found["tokens"][tie["position"]] == tie["token"] for tie in found["near_ties"])
    assert found["near_ties"][0].keys() == {"position", "token", "runner_up", "margin"}


def test_compare_reports_near_tie_and_exact_resolves_it(command):
    options = ("import", "-n", LENGTH, "-k", 4, "--ignore-eos", "--repeats", 1)
    differing = command("compare", *options)
    assert differing.exit_code == 1
    assert re.search(r"from new token \d+, a near-tie: --exact resolves it", differing.stderr)
    exact = command("compare", *options, "--exact")
    assert exact.exit_code == 0
    assert re.search(r"same tokens +yes", exact.stdout)


def test_exact_can_be_set_per_prompt_line(command, tmp_path):
    lines = [{"prompt": "import", "exact": exact} for exact in (False, True)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = ("--prompts", tmp_path / "in.jsonl", "-n", 60, "-k", 4, "--ignore-eos")
    found = [json.loads(line) for line in command("generate", *options).stdout.splitlines()]
    assert [one["stats"]["num_exact_passes"] > 0 for one in found] == [False, True]
    assert all(one["near_ties"] for one in found)
