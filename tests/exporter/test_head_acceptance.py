"""Acceptance rates of EAGLE-3 heads, measured at export by position."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import eagle_heads
import fitted_heads
from cases import exhaustive
from checkpoints import make_checkpoint, make_tokenizer
from eagle_heads import SAFEAILAB, HeadSpec
from eagle_reference import EagleReference
from specedge.errors import ParityError
from specedge.exporter import Progress, export
from specedge.exporter.checkpoint import eagle
from specedge.exporter.checkpoint.draft_heads import DraftHeadModule
from specedge.exporter.graph import external_data
from specedge.exporter.graph.external_data import WeightsFile
from specedge.exporter.quantization import draft_acceptance, float_model
from specedge.exporter.quantization.draft_acceptance import (
    PositionRates,
    draft_from_states,
    rates_by_confidence,
    rates_by_position,
)
from specedge.exporter.quantization.float_model import FloatModel
from specedge.exporter.quantization.target_states import TargetStates
from specedge.exporter.verification import runner
from specedge.exporter.verification.fused_states import FusedStates
from specedge.exporter.verification.subgraph import open_session

SPEC = HeadSpec(SAFEAILAB, vocab_size=512, columns=300)
LAYERS, K = (2, 3, 3), 3  # the default of 6 layers


class Pair:
    """A target and a head, exported in float32 and as references in PyTorch."""

    def __init__(self, folder):
        tokenizer = make_tokenizer(folder / "tokenizer")
        self.target = make_checkpoint(
            folder / "target", "llama", tokenizer, layers=6, hidden=32, kv_heads=2
        )
        self.head = eagle_heads.write_head(folder / "head", SPEC)
        self.progress = Progress()
        self.bundle = export(
            self.head, self.target, folder / "bundle",
            ops="gqa", num_draft_tokens=K, max_length=96, progress=self.progress,
        )  # fmt: skip

    def expected(self, text):
        """By position and row: overlap, equality of greedy tokens, largest probability."""
        model = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()
        with torch.no_grad():
            output = model(torch.from_numpy(text)[None], output_hidden_states=True)
        states = torch.cat([output.hidden_states[layer][0] for layer in LAYERS], -1)
        probabilities = output.logits[0].double().softmax(-1)
        weights = load_file(self.target / "model.safetensors")["model.embed_tokens.weight"]
        expected = {}
        for first in range(len(text) - 1):
            head = EagleReference(SPEC, eagle_heads.head_tensors(SPEC), weights)
            tokens = torch.from_numpy(text[1:])
            fused = head.fuse(states[: first + 1])
            logits, hidden = head.run(tokens[: first + 1], fused)
            for position in range(K):
                if position:
                    row = first + position
                    if row >= len(tokens):
                        break
                    logits, hidden = head.run(tokens[row : row + 1], hidden[-1:])
                drafted = head.target_tokens(logits[-1:])[0].softmax(-1)
                target = probabilities[first + position + 1]
                expected[position, first + position + 1] = (
                    float(torch.minimum(drafted, target).sum()),
                    bool(drafted.argmax() == target.argmax()),
                    float(drafted.max()),
                )
        return expected


def final_models(bundle):
    ids = np.array(bundle.ids_of(bundle.draft))
    return (
        FloatModel("target", bundle.target, bundle.folder / "target"),
        FloatModel("draft", bundle.draft, bundle.folder / "draft", ids),
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("pair"))


def test_rates_by_position_are_those_of_the_reference(pair, monkeypatch):
    monkeypatch.setattr(draft_acceptance, "NUM_CHAINS", 1 << 20)  # every row begins a chain
    text = np.random.default_rng(0).integers(0, 512, 14)
    expected = pair.expected(text)
    target, draft = final_models(pair.bundle)
    logits, fused = TargetStates(target, draft).run([text])
    ((agree, overlaps, confidences),) = draft_from_states(draft, [text], logits, fused, K)
    for (position, row), (rate, is_equal, confidence) in expected.items():
        at = row - position, position
        assert agree[at] == is_equal
        assert overlaps[at] == pytest.approx(rate, abs=1e-5)
        assert confidences[at] == pytest.approx(confidence, abs=1e-5)
    assert np.isfinite(overlaps).sum() == len(expected)
    means = np.nanmean(overlaps, 0)
    assert min(np.abs(np.diff(means))) > 1e-4  # so that positions are not confused


def test_export_stores_rates_and_warns_of_a_head_that_is_not_trained(pair):
    rates = pair.bundle.draft.acceptance
    assert 0 < rates.sampled < 0.5
    assert len(rates.greedy_by_confidence) == len(rates.sampled_by_confidence) == 7
    notes = [note for note in pair.progress.notes if note.startswith("draft: ")]
    assert any("acceptance by position" in note for note in notes)
    assert any("of first draft tokens are accepted" in note for note in notes)


class Fitted:
    """A target and a head that fits it."""

    def __init__(self, folder):
        self.folder, self.target = folder, fitted_heads.make_target(folder)
        self.tensors = fitted_heads.fit_head(self.target, fitted_heads.SPEC, fitted_heads.LAYERS)

    def export(self, **changes):
        """Return the greedy rates by position and the notes that name causes of low ones."""
        spec, progress = replace(fitted_heads.SPEC, **changes), Progress()
        head = eagle_heads.write_head(self.folder / "head", spec, self.tensors)
        with tempfile.TemporaryDirectory() as folder:
            export(
                head, self.target, Path(folder) / "bundle",
                ops="onnx", num_draft_tokens=K, max_length=96, progress=progress,
            )  # fmt: skip
        (rates,) = (note for note in progress.notes if "acceptance by position" in note)
        greedy = rates.partition("position ")[2].partition(" greedy")[0]
        warnings = [note for note in progress.notes if "draft tokens are accepted" in note]
        return [int(rate.rstrip("%")) for rate in greedy.split(", ")], warnings


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    return Fitted(tmp_path_factory.mktemp("fitted"))


def read_layers_before(monkeypatch):
    pair_with = eagle.pair_with

    def misread(*args):
        config = pair_with(*args)
        before = tuple(layer - 1 for layer in config.hidden.layers)
        return replace(config, aux_layers=(before,))

    monkeypatch.setattr(eagle, "pair_with", misread)


def ignore_d2t(monkeypatch):
    monkeypatch.setattr(
        eagle, "_read_tokens", lambda where, config, *tensors: torch.arange(config.columns)
    )


@pytest.mark.slow
def test_a_head_that_fits_is_accepted_without_a_warning(fitted):
    rates, warnings = fitted.export()
    assert len(rates) == K
    assert min(rates) > 80
    assert not warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "changes"),
    [(read_layers_before, {}), (ignore_d2t, {}), (None, {"norm_before_residual": True})],
)
def test_misread_heads_are_exported_with_a_warning(fitted, monkeypatch, plant, changes):
    if plant is not None:
        plant(monkeypatch)
    rates, warnings = fitted.export(**changes)
    (text,) = warnings
    assert "the layers whose hidden states it reads" in text
    assert rates[0] < 40


@pytest.mark.slow
def test_a_misread_returned_state_is_exported_with_a_warning(fitted):
    rates, warnings = fitted.export(norm_output=True)
    (text,) = warnings
    assert "norm_output" in text
    assert rates[0] >= 40
    assert rates[1] < rates[0] / 2


@pytest.mark.slow
def test_verification_finds_shifted_positions(fitted, monkeypatch):
    forward = DraftHeadModule.forward

    @functools.wraps(forward)  # whose parameters the exporter inspects
    def shifted(self, input_ids, position_ids=None, *args, **options):
        position_ids = None if position_ids is None else position_ids + 1
        return forward(self, input_ids, position_ids, *args, **options)

    monkeypatch.setattr(DraftHeadModule, "forward", shifted)
    with pytest.raises(ParityError, match=r"draft: present\.0\.key"):
        fitted.export()


@pytest.mark.parametrize(
    ("greedy", "warning"),
    [
        ((0.7, 0.6, 0.5), None),
        ((0.3, 0.3, 0.3), "trained for this target"),
        ((0.36, 0.3, 0.3), "undertrained"),
        ((0.7, 0.1, 0.1), "norm_output"),
        ((0.7,), None),
    ],
)
def test_implausible_rates_name_their_likely_causes(greedy, warning):
    text = PositionRates(greedy, (0.5,)).warning()
    assert text is None if warning is None else warning in text


def test_rates_are_those_of_tokens_whose_predecessors_are_accepted():
    """A second draft token is tested where the first is accepted."""
    acceptance = np.array([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    rates, mean = rates_by_position(acceptance)
    assert rates == pytest.approx([2 / 3, 1 / 2])
    assert mean == pytest.approx(3 / 5)
    by_confidence = rates_by_confidence(np.array([[0.3, 0.1]] * 3), acceptance)
    shift = 3 / 5 - (3 * 0.3 + 2 * 0.1) / 5
    assert by_confidence[0] == pytest.approx((1 + 4 * (0.1 + shift)) / (2 + 4))
    assert by_confidence[1] == pytest.approx((2 + 4 * (0.275 + shift)) / (3 + 4))


def test_calibration_reads_the_hidden_states_of_its_texts(pair):
    states = TargetStates(*final_models(pair.bundle))
    texts = [np.random.default_rng(seed).integers(0, 512, 40) for seed in range(2)]
    _, fused = states.run(texts)
    read = FusedStates(
        fused[0], tuple((text[1:], rows[:-1]) for text, rows in zip(texts, fused, strict=True))
    )
    assert np.array_equal(read.rows(0, 39, texts[1][1:])[0], fused[1][:-1])
    assert np.array_equal(read.rows(900, 5, texts[1][1:6])[0], fused[1][:5])  # at any position
    with pytest.raises(ValueError, match="no hidden states of this text"):
        read.rows(0, 3, texts[0][:3])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", *map(exhaustive, ("int4", "int8-block"))])
def test_heads_are_quantized_with_the_states_of_a_quantized_target(
    pair, tmp_path, precision, monkeypatch
):
    monkeypatch.setattr(float_model, "random_states", None)  # no random states
    progress = Progress()
    bundle = export(
        pair.head, pair.target, tmp_path / "bundle",
        ops="gqa", num_draft_tokens=K, max_length=96, precision="int8", draft_precision=precision,
        progress=progress,
    )  # fmt: skip
    assert not [note for note in progress.notes if note.startswith("target: it is not rotated")]
    assert [*progress.seconds] == [s for s in progress.predicted if s in progress.seconds]
    text = np.random.default_rng(0).integers(0, 512, 40)
    fused, exact_fused = (
        TargetStates(*final_models(made)).run([text])[1][0] for made in (bundle, pair.bundle)
    )
    assert np.linalg.norm(fused - exact_fused) < 0.2 * np.linalg.norm(exact_fused)
    monkeypatch.setattr(runner, "WHOLE_BYTES", 0)  # partitions the target
    (in_parts,) = TargetStates(*final_models(bundle)).run([text])[1]
    assert np.linalg.norm(in_parts - fused) < 0.02 * np.linalg.norm(fused)
    (report,) = bundle.draft.quantization.values()
    assert report.divergence < 0.2
    exact, rates = pair.bundle.draft.acceptance, bundle.draft.acceptance
    assert rates.sampled == pytest.approx(exact.sampled, abs=0.05)
    # Three channels are hundreds of times as large as others, as in the residual streams of LLMs.
    hidden = np.random.default_rng(0).standard_normal((1, 40, 96), np.float32)
    hidden[:, :, [3, 40, 77]] *= 300
    paths = (made.path(made.draft.graph("fuse", "gqa").file) for made in (pair.bundle, bundle))
    sessions = [open_session(path, ort.SessionOptions()) for path in paths]
    expected, fused = (session.run(["fused"], {"hidden": hidden})[0] for session in sessions)
    assert 0 < np.linalg.norm(fused - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.slow
def test_float_weights_of_a_large_head_are_not_written_but_those_of_its_graph_fuse(
    pair, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "WHOLE_BYTES", 0)
    finish, files, written = WeightsFile.finish, [], []
    for is_allowed in (True, False):

        def finished(file, advance=lambda amount: None, is_sparse=False, is_allowed=is_allowed):
            finish(file, advance, is_sparse and is_allowed)
            written.append(512 * (file.folder / external_data.FILE).stat().st_blocks)

        monkeypatch.setattr(WeightsFile, "finish", finished)
        bundle = export(
            pair.head, pair.target, tmp_path / f"{is_allowed}",
            ops="gqa", num_draft_tokens=K, max_length=96, precision="int8", rounding="nearest",
        )  # fmt: skip
        files.append(bundle.files["draft/weights.bin"])
    assert files[0] == files[1]
    count = len(written) // 2
    assert 0 < sum(written[:count]) < sum(written[count:]) / 2
