"""EAGLE-3 heads of the published formats, compared with speculators and a reference in float64."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import eagle_heads
from eagle_heads import FORMATS, LAYER_IDS, NVIDIA, SAFEAILAB, SPECULATORS, VARIANTS, HeadSpec
from eagle_reference import EagleReference
from specedge.errors import CheckpointError, PairError
from specedge.exporter.checkpoint import eagle
from specedge.exporter.tracing.hidden_states import HiddenStateRecorder

VECTORS = json.loads(Path(__file__).with_name("eagle_vectors.json").read_text("utf-8"))
NUM_LAYERS = 8


def target_config(spec, **options):
    sizes = {"hidden_size": spec.target_hidden, "vocab_size": spec.vocab_size}
    return LlamaConfig(**{"num_hidden_layers": NUM_LAYERS, **sizes, **options})


def paired(spec, raw=None, **options):
    config = eagle.read_config("draft head", eagle_heads.head_config(spec) if raw is None else raw)
    return eagle.pair_with(config, "head", "target", target_config(spec, **options))


def load(spec, tensors=None, config=None, num_tokens=None, shared=None):
    """Return a head's module and the tokens of its columns."""
    tensors = eagle_heads.head_tensors(spec) if tensors is None else tensors
    shared = shared or {"embedding": eagle_heads.embedding(spec)}
    num_tokens = spec.vocab_size if num_tokens is None else num_tokens
    config, state, ids = eagle.match_tensors(
        "draft head", config or paired(spec), tensors, num_tokens, shared.__getitem__
    )
    model = config.build()
    eagle.restore_rotary(model)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False), ids


def columns_of(spec, ids):
    """Columns of the published head in the order of ascending tokens."""
    if ids is None:
        return torch.arange(spec.columns)
    d2t = eagle_heads.head_tensors(spec)["d2t"]
    tokens = (torch.arange(spec.columns) + d2t).tolist()
    return torch.tensor([tokens.index(token) for token in ids])


def run(model, *inputs, **options):
    """Return a pass's output and the hidden states that further draft tokens read."""
    recorder = HiddenStateRecorder(model, [model.returned_layer])
    with recorder.recorded():
        output = model(*inputs, **options)
    return output, recorder.take()[0]


def chain(model, spec, row, num_steps):
    """Read rows up to `row`, then feed hidden states back; return results of each step's row."""
    tokens, states = eagle_heads.example(spec)
    fused = model.fuse(states.float())
    output, hidden = run(model, tokens[:, : row + 1], hidden=fused[:, : row + 1])
    results = [(output.logits[0, -1], hidden[0, -1])]
    for step in range(1, num_steps):
        token, position = tokens[:, row + step][None], torch.tensor([[row + step]])
        output, hidden = run(model, token, position, cache=output.cache, hidden=hidden[:, -1:])
        results.append((output.logits[0, -1], hidden[0, -1]))
    return fused[0, row], results


def is_close(actual, expected):
    expected = torch.as_tensor(expected).float()
    return torch.allclose(actual.float(), expected, rtol=1e-4, atol=1e-4)


def equals_vectors(name, config=None, replaced=()):
    """True if a head computes the vectors of a variant, with some modules replaced by Identity."""
    variant, published = VECTORS["variants"][name], VARIANTS[name]
    model, ids = load(published, config=config)
    for module in replaced:
        model.set_submodule(module, torch.nn.Identity())
    fused, steps = chain(model, published, VECTORS["row"], len(variant["logits"]))
    columns = columns_of(published, ids)
    equal = [is_close(fused, variant["fused"][0])]
    for step, (logits, states) in enumerate(steps):
        equal.append(is_close(logits, torch.tensor(variant["logits"][step])[columns]))
        equal.append(is_close(states, variant["next_hidden"][step]))
    return all(equal)


@pytest.mark.parametrize("name", VARIANTS)
def test_head_computes_what_speculators_computes(name):
    assert equals_vectors(name)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("norm_before_residual", {"norm_before_residual": False}),
        ("plain", {"norm_before_residual": True}),
        ("fc_norm", {"norm_output": False}),
    ],
)
def test_wrong_variants_differ_from_speculators(name, changes):
    config = replace(paired(VARIANTS[name]), **changes)
    assert not equals_vectors(name, config=config)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("plain", "model.norm"),
        ("plain", "model.layers.0.hidden_norm"),
        ("plain", "model.layers.0.input_layernorm"),
        ("norm_before_fc", "input_norm"),
        ("fc_norm", "fc_norm.3"),
        ("qwen3", "model.layers.1.self_attn.k_norm"),
    ],
)
def test_missing_norms_differ_from_speculators(name, module):
    assert not equals_vectors(name, replaced=[module])


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm"])
def test_norms_of_the_checkpoint_apply_without_a_flag(name):
    flags = {"norm_before_fc": False, "fc_norm": False}
    assert equals_vectors(name, config=replace(paired(VARIANTS[name]), **flags))


@pytest.mark.parametrize(
    "spec", [*(HeadSpec(format=name) for name in FORMATS), HeadSpec(NVIDIA, num_layers=2)]
)
def test_formats_equal_a_reference_in_float64(spec):
    tensors = eagle_heads.head_tensors(spec)
    names = {name: name.replace("layers.0.", "midlayer.") for name in tensors}
    reference = EagleReference(
        spec, {names[name]: x for name, x in tensors.items()}, eagle_heads.embedding(spec)
    )
    tokens, states = eagle_heads.example(spec)
    model, ids = load(spec)
    output, hidden = run(model, tokens, hidden=model.fuse(states.float()))
    logits, next_hidden = reference.run(tokens[0], reference.fuse(states[0]))
    by_token = reference.target_tokens(logits)
    assert is_close(hidden[0], next_hidden)
    assert is_close(output.logits[0], by_token[:, list(ids)])
    assert ids == tuple(sorted(ids))
    assert (by_token > -torch.inf).sum() == len(ids) * len(logits)
    # A wrong position and an ignored d2t show.
    moved = model(tokens, torch.arange(9)[None] * 2, hidden=model.fuse(states.float()))
    assert not is_close(moved.logits, output.logits)
    assert not is_close(output.logits[0], logits)


def test_columns_without_a_token_are_removed():
    spec = HeadSpec()
    all_ids, (model, ids) = load(spec)[1], load(spec, num_tokens=50)
    assert ids == tuple(token for token in all_ids if token < 50)
    assert model.lm_head.out_features == len(ids) < len(all_ids)


@pytest.mark.parametrize(
    ("ids", "readings"),
    [
        (None, [(2, 4, 5)]),
        ([2, 4, 5], [(2, 4, 5)]),
        ([4, 6, 8], [(4, 6, 8)]),  # the last layer's output
        ([1, 3, 4], [(2, 4, 5), (1, 3, 4)]),  # outputs, or inputs
        ([1, 4, 8], [(1, 4, 8)]),  # inputs: the last layer's output is 7
    ],
)
@pytest.mark.parametrize("format_name", FORMATS)
def test_layer_ids_of_both_conventions(ids, readings, format_name):
    spec = HeadSpec(format=format_name, layer_ids=None if ids is None else tuple(ids))
    config = paired(spec)
    assert config.hidden.layers == readings[0]
    assert [convention.hidden.layers for convention in config.conventions] == readings
    for convention in config.conventions:
        assert list(convention.conventions) == [convention]
        assert (convention.hidden.size, convention.hidden.draft_size) == (96, 32)


@pytest.mark.parametrize("key", eagle.LAYER_IDS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_layer_ids_have_several_keys(key, format_name):
    raw = eagle_heads.head_config(HeadSpec(format=format_name, layer_ids=(3, 4, 6)))
    fields = raw["eagle_config"] if format_name == NVIDIA else raw
    fields[key] = fields.pop(LAYER_IDS)
    assert paired(HeadSpec(), raw).hidden.layers == (3, 4, 6)
    raw["target_layer_ids"] = [3, 4, 6]
    assert paired(HeadSpec(), raw).hidden.layers == (3, 4, 6)
    raw[LAYER_IDS] = [2, 3, 5]
    with pytest.raises(CheckpointError, match="remove the layers"):
        paired(HeadSpec(), raw)


@pytest.mark.parametrize("others", [{}, {"norm_output": False}, {"norm_output": None}])
def test_returned_states_of_nvidias_heads_may_be_normalized(others):
    raw = eagle_heads.head_config(HeadSpec(NVIDIA)) | others
    for is_normalized in (True, False):
        raw["eagle_config"]["return_hidden_post_norm"] = is_normalized
        assert paired(HeadSpec(NVIDIA), raw).norm_output == is_normalized


def test_a_null_of_eagle_config_keeps_the_value_beside_it():
    raw = eagle_heads.head_config(HeadSpec(NVIDIA)) | {"norm_before_residual": True}
    raw["eagle_config"]["norm_before_residual"] = None
    assert paired(HeadSpec(NVIDIA), raw).norm_before_residual


@pytest.mark.parametrize("verifier", ["x", {"verifier": "x"}, {"verifier": None}])
def test_an_invalid_name_of_the_target_is_ignored(verifier):
    raw = eagle_heads.head_config(HeadSpec(format=SPECULATORS))
    config = eagle.read_config("draft head", raw | {"speculators_config": verifier})
    assert config.verifier is None


def test_recognition_by_config():
    for name in FORMATS:
        assert eagle.is_head(eagle_heads.head_config(HeadSpec(format=name)))
    assert not eagle.is_head(LlamaConfig().to_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, "layers of the type 'deepseek_v3'"),
        ({"draft_vocab_size": 97}, "a draft_vocab_size of 97"),
        ({"draft_vocab_size": "x"}, "draft_vocab_size is 'x'"),
        ({LAYER_IDS: ["a"]}, "not a list of layers"),
        ({"num_hidden_layers": 0}, "says 0 layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "last hidden states only"),
        ({"eagle_config": {"next_layer_regular": False}}, "later layers read embeddings"),
        ({"parallel_drafting": True}, "a P-EAGLE head"),
        ({"norm_before_fc": True, "fc_norm": True}, "both norm_before_fc and fc_norm"),
        ({"quantization_config": {}}, "a quantized EAGLE-3 head"),
        ({"layer_types": ["sliding_attention"]}, "layers of the type 'sliding_attention'"),
        ({"layer_types": ["full_attention"], "num_hidden_layers": "1"}, "cannot be read"),
        ({"norm_before_fc": "false"}, "norm_before_fc is 'false', not true or false"),
    ],
)
def test_unsupported_configs_are_refused(changes, message):
    raw = eagle_heads.head_config(HeadSpec(format=SAFEAILAB)) | changes
    with pytest.raises(CheckpointError, match=message) as caught:
        eagle.read_config("draft head", raw)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"dflash_config": {}}, "a DFlash drafter"),
        ({"architectures": ["DFlashDraftModel"]}, "a DFlash drafter"),
        ({"medusa_num_heads": 4}, "Medusa heads"),
        ({"model_type": "gemma4_assistant"}, "a Gemma 4 assistant"),
        ({"speculators_model_type": "peagle"}, "a drafter of the kind 'peagle'"),
    ],
)
def test_other_drafters_are_refused_by_name(raw, message):
    with pytest.raises(CheckpointError, match=message):
        eagle.check_kind("draft head", raw)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 64}, "a hidden size of 32, target target has 64"),
        ({"vocab_size": 100}, "a vocabulary of 96, target target has 100"),
        ({"num_hidden_layers": 2}, "at the layers 2, 1, -1, target target has 2 layers"),
    ],
)
def test_heads_of_another_target_are_refused(options, message):
    with pytest.raises(PairError, match=message):
        paired(HeadSpec(), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("d2t"), "has no d2t"),
        (lambda x: x["d2t"].zero_().sub_(torch.arange(40)), "does not map to different tokens"),
        (lambda x: x["t2d"].logical_not_(), "name different tokens"),
        (lambda x: x.pop("norm.weight"), "lacks weights, such as model.norm.weight"),
        (lambda x: x.update({"model.norm.weight": x["norm.weight"]}), "two tensors for model.norm"),
        (lambda x: x.update({"mask_hidden": torch.zeros(1, 96)}), "has mask_hidden, which is no"),
        (lambda x: x.update({"fc.weight": torch.zeros(32, 64)}), r"fc.weight is \[32, 64\]"),
    ],
)
def test_damaged_heads_are_refused(change, message):
    tensors = eagle_heads.head_tensors(HeadSpec())
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        load(HeadSpec(), tensors)


def test_an_embedding_of_the_target_that_does_not_fit_is_named():
    spec = HeadSpec(hidden=16, head_size=4)
    with pytest.raises(
        CheckpointError, match=r"is \[96, 32\] in the target's files and \[96, 16\]"
    ):
        load(spec, shared={"embedding": torch.zeros(96, 32)})


def test_nvidias_later_layers_without_a_norm_of_their_input_are_refused():
    """Early exports of Model-Optimizer lack it, so that the head's computation is unknown."""
    spec = HeadSpec(NVIDIA, num_layers=2)
    tensors = eagle_heads.head_tensors(spec)
    del tensors["midlayer.1.hidden_norm.weight"]
    with pytest.raises(CheckpointError, match=r"such as model.layers.1.input_layernorm.weight"):
        load(spec, tensors)


def test_head_without_lm_head_has_that_of_the_target():
    spec = HeadSpec(format=SPECULATORS)
    tensors = eagle_heads.head_tensors(spec)
    del tensors["lm_head.weight"]
    shared = {"embedding": eagle_heads.embedding(spec), "head": torch.randn(96, 32)}
    _, state, ids = eagle.match_tensors("draft", paired(spec), tensors, 96, shared.__getitem__)
    assert torch.equal(state["lm_head.weight"], shared["head"][list(ids)])
