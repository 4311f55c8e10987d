"""Exports of a target with its own MTP layer as draft model."""

import numpy as np
import pytest

import specedge
from auditing import check_power, passed_checks
from cases import slow
from checkpoints import VOCAB_SIZE, make_checkpoint, make_tokenizer
from mtp_checkpoints import CONFIGS, NUM_LAYERS, SIZE, make_mtp_checkpoint
from quantized import check_greedy
from specedge.errors import CheckpointError, ExportError
from specedge.exporter import Progress, export
from specedge.exporter.quantization import hidden_state_conventions
from specedge.exporter.quantization.target_states import TargetStates
from specedge.exporter.quantization.texts import MAX_PIECES, NEAREST_STEP, CalibrationTexts

K = 4
PROMPT = "def parse(self):"


class Exported:
    def __init__(self, folder, kind, **options):
        self.target = make_mtp_checkpoint(folder / "target", kind, vocab_size=VOCAB_SIZE)
        make_tokenizer(self.target)
        self.progress, self.rates = Progress(), []
        measure = hidden_state_conventions.measure_conventions
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                hidden_state_conventions,
                "measure_conventions",
                lambda *args: self.rates.extend(measure(*args)) or self.rates,
            )
            self.bundle = export(
                "mtp", self.target, folder / "bundle",
                **{"num_draft_tokens": K, "progress": self.progress, "precision": "fp32"} | options,
            )  # fmt: skip
        self.pipeline = specedge.load(self.bundle.folder)


@pytest.fixture(
    scope="module",
    params=[
        *((kind, "fp32") for kind in CONFIGS),
        ("glm4_moe", "int8"),
        slow(("deepseek_v3", "int8")),
        slow(("mimo", "int8")),
    ],
    ids="-".join,
)
def exported(request, tmp_path_factory):
    kind, precision = request.param
    options = {"ops": "onnx"} if precision == "int8" else {}
    return Exported(tmp_path_factory.mktemp(kind), kind, precision=precision, **options)


def test_the_draft_reads_the_states_with_the_highest_rates(exported):
    """The layer is not trained, so the states may be those before or after the final norm."""
    target, draft, rates = exported.bundle.target, exported.bundle.draft, exported.rates
    layers = [rate.config.hidden.layers for rate in rates]
    assert sorted(layers) == 2 * [(NUM_LAYERS,)] + 2 * [(NUM_LAYERS + 1,)]
    accepted = [rate.first * (1 + rate.second) for rate in rates]
    assert target.hidden.layers == layers[np.argmax(accepted)]
    (note,) = (n for n in exported.progress.notes if "by the hidden states that it reads" in n)
    assert note.endswith("; ".join(rate.describe() for rate in rates))
    assert draft.hidden.layers == target.hidden.layers
    assert draft.hidden.size == draft.hidden.draft_size == target.hidden.size == SIZE
    assert len(draft.layers) == 1
    assert not draft.has_graph("fuse")
    assert any("MTP layer" in note for note in exported.progress.notes)


def test_all_steps_are_predicted(exported):
    progress = exported.progress
    assert [*progress.seconds] == [step for step in progress.predicted if step in progress.seconds]


@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_text_equals_plain_decoding(exported, k):
    check_greedy(exported.pipeline, PROMPT, 24, k)


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("exported", [("glm4_moe", "fp32")], indirect=True, ids="-".join)
def test_audit_passes(exported):
    findings = passed_checks(exported.bundle)
    assert len(findings) == 9
    check_power(findings)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "int8", "rounding": "nearest", "ops": "onnx"},
        slow({"precision": "int8-block", "cache": "int8"}),
    ],
    ids=["nearest", "int8-block and caches"],
)
def test_windows_that_are_not_calibrated_with_are_not_read(tmp_path, monkeypatch, options):
    """Windows of each use, and those that the target runs over for the hidden states."""
    read, selected = [], []
    select, run = CalibrationTexts.select, TargetStates.run

    def record_select(texts, *args):
        selected.append(select(texts, *args))
        return selected[-1]

    def record_run(states, texts, with_logits=True):
        if not with_logits:
            read.append(len(texts))
        return run(states, texts, with_logits)

    monkeypatch.setattr(CalibrationTexts, "select", record_select)
    monkeypatch.setattr(TargetStates, "run", record_run)
    Exported(tmp_path, "mimo", **options)
    *_, texts = selected
    assert len(texts.calibration) == MAX_PIECES / NEAREST_STEP
    assert len(texts.caches) == (MAX_PIECES if "cache" in options else 0)
    assert read == [len(texts.caches or texts.calibration) + len(texts.evaluation)]


def test_a_reduced_vocabulary_preserves_the_text(tmp_path):
    exported = Exported(tmp_path, "glm4_moe", draft_vocab=80)
    assert exported.bundle.draft.padded_vocab_size == 80
    check_greedy(exported.pipeline, PROMPT, 24, K)


def test_revision_and_adapter_do_not_apply(tmp_path):
    target = make_mtp_checkpoint(tmp_path / "target", "glm4_moe", vocab_size=VOCAB_SIZE)
    make_tokenizer(target)
    with pytest.raises(ExportError, match="--draft-revision does not apply to --draft mtp"):
        export("mtp", target, tmp_path / "bundle", draft_revision="main")


def test_models_without_such_layers_are_refused_by_name(tmp_path):
    target = make_checkpoint(tmp_path / "target", "llama", make_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(CheckpointError, match="MTP layers of the model type 'llama'"):
        export("mtp", target, tmp_path / "bundle")
