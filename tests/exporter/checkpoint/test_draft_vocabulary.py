"""A head cut to some tokens gives the whole head's logits of these, in every family."""

import pytest
import torch
from torch import nn

from architectures import ARCHITECTURES
from cases import exhaustive
from checkpoints import make_config, make_model
from specedge.errors import ExportError
from specedge.exporter.checkpoint import draft_vocabulary, self_draft
from specedge.exporter.checkpoint.loader import LoadedCheckpoint
from specedge.exporter.checkpoint.placeholders import WeightSources

IDS = (0, 3, 4, 100, 255, 509, 511)
TOKENS = torch.tensor([[511, 7, 3, 300, 42]])


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def check(model):
    wanted = logits(model)[..., list(IDS)]
    num_tokens = model.get_output_embeddings().out_features
    table = model.get_input_embeddings().weight
    cut = draft_vocabulary.prune_head(LoadedCheckpoint(model, "float32", WeightSources()), IDS)
    assert logits(cut.model).shape == (1, 5, len(IDS))
    torch.testing.assert_close(logits(cut.model), wanted, rtol=1e-5, atol=1e-5)
    assert cut.model.get_input_embeddings().weight is table
    assert cut.num_tokens == num_tokens
    assert not any(
        parameter.requires_grad for parameter in cut.model.get_output_embeddings().parameters()
    )


FEW = ("llama", "gpt2", "gemma2", "mixtral", "phi")


@pytest.mark.parametrize(
    "name",
    [x if x in FEW else exhaustive(x) for x in ARCHITECTURES],
)
def test_pruned_head_equals_columns_of_full_head(name):
    check(make_model(ARCHITECTURES[name][1]()))


@pytest.mark.parametrize("tied", [False, True])
def test_pruning_unties_the_head(tied):
    model = make_model(make_config("llama", tied=tied))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    check(model)


def test_pruned_head_keeps_logit_transformations():
    """Softcaps and scales, which a test of LM heads only would miss."""
    model = make_model(make_config("gemma2", final_logit_softcapping=2.0, head_size=16))
    assert logits(model).abs().max() <= 2
    check(model)
    assert logits(model).abs().max() <= 2


def test_pruned_head_of_self_draft_leaves_the_targets_head():
    loaded = LoadedCheckpoint(
        make_model(make_config("llama", tied=True)), "float32", WeightSources()
    )
    before = logits(loaded.model)
    draft = draft_vocabulary.prune_head(self_draft.keep_layers(loaded, 1), IDS)
    assert logits(draft.model).shape[-1] == len(IDS)
    assert torch.equal(logits(loaded.model), before)


def test_large_pruned_head_rows_are_not_loaded():
    """A placeholder for the rows, in the type that the checkpoint has."""
    sources, model = WeightSources(), make_model(make_config("llama", hidden=128))
    stored = torch.randn(8192, 128).to(torch.bfloat16)
    model.lm_head = nn.Linear(128, 8192, bias=False, device="meta")
    model.lm_head.weight = sources.parameter(stored)
    ids = list(range(1, 8192, 2))
    cut = draft_vocabulary.prune_head(LoadedCheckpoint(model, "bfloat16", sources), ids)
    assert torch.equal(cut.sources.stored_matrix(cut.model.lm_head.weight), stored[ids])
    assert cut.sources.stored_matrix(cut.model.lm_head.weight).dtype == torch.bfloat16


def test_head_that_is_not_a_single_matrix_is_rejected():
    class Two(nn.Linear):
        pass

    model = make_model(make_config("llama"))
    model.lm_head = Two(64, 512)
    with pytest.raises(ExportError, match=r"head is Two, not one matrix.*omit --draft-vocab"):
        draft_vocabulary.prune_head(LoadedCheckpoint(model, "float32", WeightSources()), IDS)
