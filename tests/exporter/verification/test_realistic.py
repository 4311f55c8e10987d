"""Models with real magnitudes are accepted, and each fault planted into their graphs is refused."""

import functools

import pytest

import realistic
from cases import exhaustive, slow
from comparing import CONTEXT, computed, graph_of, measure, traced
from faults import DIFFERS, FAULTS
from specedge.errors import ParityError
from specedge.exporter.tracing import tracer

OPS = ("onnx", "gqa")
CASES = {"qwen2": {}, "gemma2": {}, "llama": {"layers": 6}, "qwen3": {}}
OFTEN_AND_SELDOM = [
    family if family in ("qwen2", "gemma2", "llama") else exhaustive(family) for family in CASES
]
PLANTED = {  # the smallest of similar faults first
    "qwen2": {"no bias of keys": slow, "no bias of queries": exhaustive,
              "no bias of values": exhaustive},
    "gemma2": {
        "scale off by 0.1%": slow, "scale off by 1%": exhaustive,
        "swapped heads": slow, "stale row": slow, "shifted position": exhaustive,
        "missing softcap of the logits": slow, "missing softcap": exhaustive,
        "window off by one": slow,
        "epsilon of one norm tenfold": slow, "epsilon tenfold": exhaustive,
    },
    "llama": {"scale of one layer off by 0.1%": slow, "two layers' matrices swapped": slow,
              "feed-forward matrix off by 0.1%": exhaustive},
}  # fmt: skip


def planted():
    """Each fault in both graph variants, of which one is exhaustive."""
    for family in PLANTED:
        for name, case in PLANTED[family].items():
            for ops in OPS:
                is_first = (ops == "gqa") is (family == "gemma2")
                yield (case if is_first else exhaustive)(family, name, ops)


class Case:
    """Model, graphs and PyTorch references of a family, each created once."""

    def __init__(self, family):
        self.model = realistic.make_model(family, context=CONTEXT, **CASES[family])
        self.graph = functools.cache(functools.partial(graph_of, self.model))

    def compare(self, graph, ops, folder, monkeypatch):
        monkeypatch.setattr(tracer, "trace", lambda *args: tracer.TracedModel(graph))
        runner = traced(self.model, folder, ops)
        if not hasattr(self, "references"):
            self.references = computed(self.model, runner)
        return measure(self.model, runner, references=self.references)


@pytest.fixture(scope="module")
def cases():
    return functools.cache(Case)


@pytest.mark.slow
@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("family", OFTEN_AND_SELDOM)
def test_realistic_model_passes_float64_and_float32_checks(
    family, ops, cases, tmp_path, monkeypatch
):
    case = cases(family)
    found = case.compare(case.graph(ops).clone(), ops, tmp_path, monkeypatch)
    assert found.structure_error < 1e-10
    assert found.tolerance is None


@pytest.mark.parametrize(("family", "name", "ops"), planted())
def test_planted_fault_in_realistic_model_is_located(
    family, name, ops, cases, tmp_path, monkeypatch
):
    case = cases(family)
    graph = case.graph(ops).clone()
    before = str(graph.graph)
    FAULTS[name](graph.graph)
    assert str(graph.graph) != before
    with pytest.raises(ParityError, match=DIFFERS):
        case.compare(graph, ops, tmp_path, monkeypatch)
