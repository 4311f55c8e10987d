"""K draft steps of an EAGLE-3 head in one graph are K passes that read the head's own states."""

import numpy as np
import pytest

from checkpoints import make_checkpoint, make_tokenizer
from draft_calls import pipelines_by_draft
from eagle_heads import SAFEAILAB, HeadSpec, write_head
from specedge.bundle.gpu_signatures import ONE_CALL, SAMPLED, UNROLLED, one_call
from specedge.exporter import export
from specedge.exporter.graph import draft_loop
from specedge.exporter.graph.nodes import GraphTemplate
from specedge.runtime.backend.cuda.draft_graphs import (
    DraftGraph,
    GreedyDraftGraph,
    SampledDraftGraph,
)
from specedge.runtime.backend.model_session import ModelSession
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.decoding.verification import DraftRequest, draw_draft
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

OPS = "onnx"  # float32 is batch-invariant
SPEC = HeadSpec(SAFEAILAB, vocab_size=512, columns=100)
H, K = 32, 3
TEXT = [7 * i % 500 for i in range(300)]
STATES = np.random.default_rng(0).standard_normal((300, H)).astype(np.float32)
SAMPLINGS = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loop")
    tokenizer = make_tokenizer(folder / "tokenizer")
    target = make_checkpoint(folder / "target", "llama", tokenizer, layers=6, hidden=H, kv_heads=2)
    head = write_head(folder / "head", SPEC)
    options = {"num_draft_tokens": K, "max_length": 64, "ops": OPS}
    return export(head, target, folder / "bundle", **options)


@pytest.fixture
def models(bundle):
    return [OrtModel(bundle, bundle.draft, Device(), OPS) for _ in range(2)]


def open_loop(bundle, model, name):
    session = ModelSession(bundle, bundle.draft, Device(), OPS, name)
    if name == UNROLLED:
        return GreedyDraftGraph(session, model.cache)
    return SampledDraftGraph(session, model.cache, model.ids)


def by_passes(model, tokens, request, states):
    def next_row(drafted):
        hidden = model.hidden[-1:].copy() if drafted else states
        return model.forward(drafted[-1:] or tokens, 1, hidden)[-1]

    return draw_draft(next_row, request)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_draft_loop_equals_passes_that_recycle_hidden_states(bundle, models, sampling):
    """The same tokens and distributions, and bitwise the same rows after them."""
    passes, cached = models
    loop = open_loop(
        bundle, cached, UNROLLED if sampling.greedy and not sampling.edits else SAMPLED
    )
    tokens = set()
    for num_fed in (1, 2, K + 1, 9):
        for count in (1, K, K + 1, 2 * K + 1):
            for model in models:
                model.truncate(0)
                model.prefill(TEXT[:20], STATES[:20])
            end = 20 + num_fed
            numbers = np.random.default_rng(count).random(count)
            request = DraftRequest(History(TEXT[:end]), count, sampling, numbers)
            args = TEXT[20:end], request, STATES[20:end]
            found, expected = loop.draft(*args), by_passes(passes, *args)
            assert found.tokens == expected.tokens
            tokens.update(found.tokens)
            assert cached.cache._tokens == passes.cache._tokens
            rows = (model.cache_rows(0, model.length) for model in (cached, passes))
            assert all(map(np.array_equal, *rows))
            for i in range(count if not sampling.greedy else 0):
                mine, its = found.distribution(i), expected.distribution(i)
                np.testing.assert_allclose(mine.row(512), its.row(512), rtol=1e-5, atol=1e-7)
    ids = {*bundle.ids_of(bundle.draft)}
    assert tokens <= ids
    assert len(tokens) > 3


@pytest.mark.parametrize("name", ONE_CALL)
def test_last_hidden_state_is_that_of_the_last_pass(bundle, models, name):
    passes, cached = models
    loop = open_loop(bundle, cached, name)
    sampling = SAMPLINGS[name == SAMPLED]
    request = DraftRequest(History(TEXT[:2]), K, sampling, np.full(K, 0.4))
    args = TEXT[:2], request, STATES[:2]
    assert loop.draft(*args).tokens == by_passes(passes, *args).tokens
    assert np.array_equal(loop._next_hidden(loop._passes[2]), passes.hidden)


def test_graphs_that_repeat_single_tokens_draft_the_same(bundle):
    """In 16-bit variants, where passes of one row differ, each step reads its token twice."""
    folder, draft, drafted = bundle.folder / "draft", bundle.draft, []
    caches = {
        f"past_key_values.{s.name}": np.random.default_rng(1)
        .standard_normal(s.sizes(draft.capacity))
        .astype(np.float32)
        for s in draft.states
    }
    signature = one_call(UNROLLED, draft.signatures["chosen_logits"], draft.num_columns, K)
    for step_length in (1, 2):
        parts = [GraphTemplate(folder, "decoder.onnx")]
        parts += [GraphTemplate(folder, f"{'step' if step_length == 1 else 'catchup'}.onnx")] * 2
        ids = bundle.ids_of(draft)
        graph = draft_loop._build_graph(draft, parts, step_length, signature, ids)
        path = folder / f"loop-{step_length}.onnx"
        draft_loop.ir.save(draft_loop.ir.Model(graph, ir_version=10), path)
        session, results = Device().open(path), []
        for count in (1, 3):
            feeds = {"input_ids": np.array([TEXT[:count]]), "past_length": np.array([9])}
            feeds |= {"hidden": STATES[np.newaxis, :count]} | caches
            results += session.run(["drafted", "next_hidden"], feeds)
        drafted.append(results)
        path.unlink()
    for one, other in zip(*drafted, strict=True):
        assert one.shape == other.shape
        assert np.array_equal(one, other)


@pytest.fixture(scope="module")
def pipelines(bundle):
    """One that drafts by passes and one that does in one call, on the CPU."""
    with pipelines_by_draft(bundle.folder, OPS) as pipelines:
        yield pipelines


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("drafter", ["model", "chain"])
def test_texts_equal_drafts_by_passes(pipelines, sampling, drafter, monkeypatch):
    calls = []
    run = DraftGraph._run
    monkeypatch.setattr(
        DraftGraph, "_run", lambda self, *args: calls.append(len(args[0])) or run(self, *args)
    )
    names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
    options = {name: getattr(sampling, name) for name in names}
    for k in (K, 2, 2 * K):
        request = {"seed": k, "num_draft_tokens": k, "drafter": drafter, "ignore_eos": True}
        one, other = (p.generate(TEXT[k : k + 9], 40, **request, **options) for p in pipelines)
        assert one.tokens == other.tokens
        assert one.stats.num_accepted == other.stats.num_accepted
        assert one.stats.num_drafted == other.stats.num_drafted
    assert bool(calls) is (drafter == "model")  # a chain asks its model for single tokens
    assert len({*calls}) > 1 or drafter == "chain"  # rounds with accepted tokens and without


def test_requests_under_a_grammar_draft_by_passes(pipelines, monkeypatch):
    monkeypatch.setattr(DraftGraph, "_run", None)
    request = {"seed": 1, "num_draft_tokens": K, "drafter": "model", "regex": "[a-z ]{30}"}
    one, other = (p.generate(TEXT[:9], 20, **request) for p in pipelines)
    assert one.tokens == other.tokens


@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_graph_that_reads_other_states_is_not_used(bundle, monkeypatch, is_faulty):
    """The self-test at load compares a draft with passes."""
    model, run = OrtModel(bundle, bundle.draft, Device(), OPS), DraftGraph._run
    monkeypatch.setattr(DraftGraph, "_median", lambda self, run: 1.0)
    if is_faulty:
        monkeypatch.setattr(
            DraftGraph,
            "_run",
            lambda self, tokens, hidden=None, inputs=None: run(
                self, tokens, None if hidden is None else -hidden, inputs
            ),
        )
    assert model.unroll(bundle, bundle.draft, Device()) is None
    assert len(model._draft_graphs) == (0 if is_faulty else len(ONE_CALL))
