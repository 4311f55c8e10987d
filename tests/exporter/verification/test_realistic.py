"""Models with real magnitudes are accepted, and each fault planted into their graphs is refused."""

import functools
from functools import partial

import pytest
import torch

import realistic
from comparing import CONTEXT, computed, graphs_of, measure, traced
from faults import DIFFERS, FAULTS
from specedge.errors import ParityError
from specedge.exporter.tracing import tracing

OPS = ("onnx", "gqa")
TOKENS = torch.arange(64)
# The families in which a mechanism shows most, those that have all faults, and one with a router;
# Gemma's and GPT-2's heads are tied.
CASES = {"qwen2": {}, "gemma2": {}, "llama": {"layers": 6}, "qwen3": {}, "gpt2": {}, "mixtral": {}}
OFTEN_AND_SELDOM = [
    family
    if family in ("qwen2", "gemma2", "llama")
    else pytest.param(family, marks=pytest.mark.slow(exhaustive=True))
    for family in CASES
]
ANY = ["scale off by 1%", "shifted position", "swapped heads", "stale row"]
PLANTED = {
    "gemma2": [
        *ANY,
        "scale off by 0.1%",
        "missing softcap",
        "missing softcap of the logits",
        "window off by one",
        "epsilon tenfold",
        "epsilon of one norm tenfold",
    ],
    "qwen2": ["no bias of queries", "no bias of keys", "no bias of values"],
    "llama": [
        "scale of one layer off by 0.1%",
        "feed-forward matrix off by 0.1%",
        "two layers' matrices swapped",
    ],
}


def planted():
    """Each fault: the first is quick, the others slow in one op set and exhaustive in the other."""
    pairs = [(family, name) for family in PLANTED for name in PLANTED[family]]
    for i, (family, name) in enumerate(pairs):
        for ops in OPS:
            mark = pytest.mark.slow if ops == OPS[i % 2] else pytest.mark.slow(exhaustive=True)
            yield pytest.param(family, name, ops, marks=[mark] if i or ops != OPS[0] else [])


class Case:
    """A family's model, its graphs and what PyTorch computes, each made once."""

    def __init__(self, family):
        self.model = realistic.make_model(family, context=CONTEXT, **CASES[family])

    @functools.cached_property
    def graphs(self):
        return graphs_of(self.model)[1]

    def compare(self, graph, ops, folder, monkeypatch):
        monkeypatch.setattr(tracing, "trace", lambda *args: graph)
        runner = traced(self.model, folder, ops)
        if not hasattr(self, "references"):
            self.references = computed(self.model, runner)
        return measure(self.model, runner, references=self.references)


@pytest.fixture(scope="module")
def cases():
    return functools.cache(Case)


def largest(model, part):
    """The largest number of a parameter."""
    (found,) = [p for name, p in model.named_parameters() if name.endswith(part)]
    return float(found.detach().abs().max())


def residual(model):
    """The largest number between two layers."""
    return max(size for size, _ in realistic.residuals(model, TOKENS))


def inequality(model, axis):
    """How many times the median the largest of embeddings' rows or columns is."""
    found = model.get_input_embeddings().weight.detach().abs().median(axis).values
    return float(found.max() / found.median())


def sinks(model):
    """What attention every sixteenth token gets, in the half of heads where it gets most."""
    with torch.no_grad():
        weights = model(TOKENS[None], output_attentions=True).attentions[-1][0, :, 48:, ::16]
    return float(weights.sum(-1).mean(1).sort().values[len(weights) // 2])


@pytest.mark.parametrize(
    ("mechanism", "family", "measured", "least"),
    [
        ("unequal_embeddings", "gemma2", partial(inequality, axis=1), 3),
        ("outlier_channels", "qwen2", partial(inequality, axis=0), 100),
        ("norm_gains", "gemma2", partial(largest, part="0.input_layernorm.weight"), 59),
        ("attention_biases", "qwen2", partial(largest, part="0.self_attn.q_proj.bias"), 69),
        ("attention_biases", "qwen2", partial(largest, part="0.self_attn.k_proj.bias"), 175),
        ("qk_gains", "qwen3", partial(largest, part="0.self_attn.q_norm.weight"), 30),
        ("massive_channel", "llama", residual, 2600),
        ("massive_channel", "gpt2", residual, 2900),
        ("sink_attention", "llama", sinks, 0.3),
    ],
)
def test_the_models_have_each_mechanism_of_trained_ones(mechanism, family, measured, least, cases):
    without = [name for name in realistic.MECHANISMS if name != mechanism]
    spared = realistic.make_model(family, mechanisms=without, context=CONTEXT, **CASES[family])
    assert measured(cases(family).model) >= least > measured(spared)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("family", OFTEN_AND_SELDOM)
def test_a_model_with_real_magnitudes_is_the_model_in_float64_and_as_good_as_float32(
    family, ops, cases, tmp_path, monkeypatch
):
    case = cases(family)
    found = case.compare(case.graphs[ops].clone(), ops, tmp_path, monkeypatch)
    assert found.structure_error < 1e-10
    assert found.tolerance is None


@pytest.mark.parametrize(("family", "name", "ops"), planted())
def test_a_fault_planted_among_real_magnitudes_is_refused_with_its_place(
    family, name, ops, cases, tmp_path, monkeypatch
):
    case = cases(family)
    graph = case.graphs[ops].clone()
    before = str(graph.graph)
    FAULTS[name](graph.graph)
    assert str(graph.graph) != before
    with pytest.raises(ParityError, match=DIFFERS):
        case.compare(graph, ops, tmp_path, monkeypatch)
