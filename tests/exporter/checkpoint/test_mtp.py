"""MTP layers compute what transformers' `MtpModel` or a reference computes, in float64."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from mimo_reference import MimoReference
from mtp_checkpoints import CONFIGS, MIMO_NAMES, NUM_LAYERS, SIZE, layer_prefix, make_mtp_checkpoint
from specedge.errors import CheckpointError
from specedge.exporter import internals
from specedge.exporter.checkpoint.mtp import MtpDraft, read_config, split_tensors

TEXT = torch.tensor([[5, 17, 3, 60, 8, 41, 2]])
NUM_STEPS = 3  # draft tokens after the text


class Checkpoint:
    """A checkpoint, its model in transformers, and the layer as a draft, all in float64."""

    def __init__(self, folder, kind):
        make_mtp_checkpoint(folder, kind)
        self.kind = kind
        config_class = Qwen2Config if kind == "mimo" else AutoConfig
        self.config = config_class.from_pretrained(folder)
        self.config.model_type = kind
        self.config._experts_implementation = "eager"  # the others have no kernels in float64
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, config=self.config, dtype=torch.float64
        ).eval()
        # The class has the numbers of published models' layers.
        self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{NUM_LAYERS}.*"]
        self.tensors = load_file(folder / "model.safetensors")
        if kind != "mimo":
            self.reference = MtpModel.from_pretrained(self.model).double().eval()

    def draft(self, change=lambda tensors: None):
        """Load the draft from the tensors of the file."""
        config = read_config("target", self.config)
        state, own = split_tensors("target", config, self.tensors)
        change(own)
        empty = internals.build_decoder(config.layers)
        decoder, info = type(empty).from_pretrained(
            None, config=empty.config, state_dict=state, dtype=torch.float64,
            output_loading_info=True,
        )  # fmt: skip
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        draft = MtpDraft(config, decoder.eval()).double().eval()
        lacking = draft.load_state_dict(own, strict=False)
        assert not lacking.unexpected_keys
        return draft

    def expected(self):
        """Logits for all tokens of the text but the first, and further ones."""
        hidden = self.model(TEXT, output_hidden_states=True).hidden_states[-1]
        if self.kind == "mimo":
            return self.expected_of_mimo(hidden[0])
        cache = MtpCache(config=self.config.get_mtp_config())
        tokens, positions = TEXT[:, 1:], torch.arange(1, TEXT.shape[1])[None]
        rows, read = [], hidden[:, :-1]
        for _ in range(NUM_STEPS):
            read = self.reference.forward_layer(0, read, positions, cache, input_ids=tokens)
            rows.append(self.reference._project_to_logits(read))
            tokens, positions, read = (
                rows[-1][:, -1:].argmax(-1),
                positions[:, -1:] + 1,
                read[:, -1:],
            )
        return torch.cat(rows, 1)

    def expected_of_mimo(self, hidden):
        theta = self.config.rope_parameters["rope_theta"]
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        reference = MimoReference(self.tensors, *heads, theta, self.config.rms_norm_eps)
        tokens, read, position, rows = TEXT[0, 1:], hidden[:-1], 1, []
        for _ in range(NUM_STEPS):
            logits, states = reference.run(tokens, read, position)
            rows.append(logits)
            position += len(tokens)
            tokens, read = logits[-1:].argmax(-1), states[-1:]
        return torch.cat(rows)[None]


def found(draft, model, start=0):
    """Logits of a draft as `Checkpoint.expected`, the first of them at position `start`."""
    states = []
    handle = model.model.norm.register_forward_hook(lambda _, inputs, output: states.append(output))
    model(TEXT)
    handle.remove()
    tokens, cache, positions = TEXT[:, 1:], None, torch.arange(TEXT.shape[1] - 1)[None] + start
    rows, read, returned = [], draft.fuse(states[0][:, :-1]), [None, None]
    handle = draft.model.norm.register_forward_hook(
        lambda _, inputs, output: returned.__setitem__(slice(None), (*inputs, output))
    )
    for _ in range(NUM_STEPS):
        output = draft(tokens, positions, cache=cache, hidden=read)
        cache, read = output.cache, returned[draft.returned_layer - 1][:, -1:]
        rows.append(output.logits)
        tokens, positions = output.logits[:, -1:].argmax(-1), positions[:, -1:] + 1
    handle.remove()
    return torch.cat(rows, 1)


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    with torch.no_grad():
        yield Checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def test_logits_of_text_and_draft_tokens_equal_the_reference(checkpoint):
    """transformers begins at position 1; rotary embeddings then differ by rounding alone."""
    draft, expected = checkpoint.draft(), checkpoint.expected()
    rows = found(draft, checkpoint.model, start=1)
    # Norms and rotary tables of transformers, which MiMo's reference does not have, are in float32.
    tolerance = 1e-5 if checkpoint.kind == "mimo" else 1e-9
    torch.testing.assert_close(rows, expected, rtol=tolerance, atol=tolerance)
    rows = found(draft, checkpoint.model)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


def swap(tensors):
    tensors["eh_proj.weight"] = tensors["eh_proj.weight"].roll(SIZE, 1)


FAULTS = {
    "halves of eh_proj swapped": swap,
    "no enorm": lambda tensors: tensors.update({"enorm.weight": torch.ones(SIZE)}),
    "no hnorm": lambda tensors: tensors.update({"hnorm.weight": torch.ones(SIZE)}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_tensors_differ_from_the_reference(checkpoint, fault):
    draft = checkpoint.draft(change=FAULTS[fault])
    assert not torch.allclose(found(draft, checkpoint.model), checkpoint.expected(), rtol=1e-3)


@pytest.mark.parametrize("fault", ["no layer", "missing", "other size"])
def test_damaged_layers_are_refused(checkpoint, fault):
    tensors, prefix = dict(checkpoint.tensors), layer_prefix(checkpoint.kind)
    is_mimo = checkpoint.kind == "mimo"
    _, norm, _, projection = MIMO_NAMES if is_mimo else (None, "hnorm", None, "eh_proj")
    if fault == "no layer":
        tensors.clear()
        message = f"its files have no MTP layer, .*{prefix}"
    elif fault == "missing":
        del tensors[f"{prefix}{norm}.weight"]
        message = f"lacks weights, such as {prefix}{norm}.weight"
    else:
        tensors[f"{prefix}{projection}.weight"] = torch.ones(4, 8)
        message = rf"{projection}.weight is \[4, 8\] in its files and \[32, 64\] by its config"
    with pytest.raises(CheckpointError, match=message):
        split_tensors("target X", read_config("target X", checkpoint.config), tensors)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "qwen3_5_text"}, "MTP layers of the model type 'qwen3_5_text' are not"),
        (
            {"model_type": "nemotron_h"},
            "'nemotron_h' are not supported, only .*glm4_moe, mimo",
        ),
        ({"num_nextn_predict_layers": 0}, "its config states no MTP layers"),
    ],
)
def test_other_layers_are_refused_by_name(checkpoint, fields, message):
    config = copy.deepcopy(checkpoint.config)
    for name, value in fields.items():
        setattr(config, name, value)
    with pytest.raises(CheckpointError, match=message):
        read_config("target X", config)


def test_the_first_of_several_layers_drafts_all_tokens(checkpoint):
    config = copy.deepcopy(checkpoint.config)
    config.num_nextn_predict_layers = 3
    draft = read_config("target X", config)
    assert "first of 3 MTP layers" in draft.describe()
    assert draft.layers.num_hidden_layers == 1
    assert draft.prefix == layer_prefix(checkpoint.kind)
    assert draft.build().returned_layer == 2
