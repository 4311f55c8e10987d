"""Exports of a target with its own MTP layer as draft model."""

import pytest

import specedge
from checkpoints import VOCAB_SIZE, make_checkpoint, make_tokenizer
from mtp_checkpoints import CONFIGS, NUM_LAYERS, SIZE, make_mtp_checkpoint
from quantized import check_greedy
from specedge.errors import CheckpointError, ExportError
from specedge.exporter import Progress, export

K = 4
PROMPT = "def parse(self):"


class Exported:
    def __init__(self, folder, kind, **options):
        self.target = make_mtp_checkpoint(folder / "target", kind, vocab_size=VOCAB_SIZE)
        make_tokenizer(self.target)
        self.progress = Progress()
        self.bundle = export(
            "mtp", self.target, folder / "bundle",
            **{"num_draft_tokens": K, "progress": self.progress, "precision": "fp32"} | options,
        )  # fmt: skip
        self.pipeline = specedge.load(self.bundle.folder)


@pytest.fixture(scope="module", params=CONFIGS)
def exported(request, tmp_path_factory):
    return Exported(tmp_path_factory.mktemp(request.param), request.param)


def test_the_draft_reads_states_of_the_last_layer(exported):
    """Before or after the final norm: the layer is not trained."""
    target, draft = exported.bundle.target, exported.bundle.draft
    assert target.hidden.layers in {(NUM_LAYERS,), (NUM_LAYERS + 1,)}
    assert draft.hidden.layers == target.hidden.layers
    assert draft.hidden.size == draft.hidden.draft_size == target.hidden.size == SIZE
    assert len(draft.layers) == 1
    assert not draft.has_graph("fuse")
    assert any("MTP layer" in note for note in exported.progress.notes)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_greedy_text_equals_plain_decoding(exported, k):
    check_greedy(exported.pipeline, PROMPT, 24, k)


@pytest.mark.parametrize("kind", ["glm4_moe"])
def test_int8_text_equals_plain_decoding(tmp_path, kind):
    exported = Exported(tmp_path, kind, precision="int8", ops="onnx")
    check_greedy(exported.pipeline, PROMPT, 24, K)


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
