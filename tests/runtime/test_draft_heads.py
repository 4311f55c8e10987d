"""Bundles with a draft head: passes with hidden states, requests, slots, plans and measurements."""

from itertools import zip_longest

import numpy as np
import pytest

import specedge
from draft_head_bundles import (
    CONTEXT,
    FEATURES,
    HIDDEN,
    TOKEN_IDS,
    VOCAB_SIZE,
    make_draft_head,
)
from specedge.benchmarks.acceptance import acceptances
from specedge.bundle import Bundle
from specedge.bundle.manifest import chunk_length
from specedge.runtime.backend.memory import pair_memory
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.decoding.observed_states import WINDOW
from specedge.runtime.drafters.draft_head import DraftHead, create_drafter
from specedge.runtime.planning.cost_table import CostTable, ModeCosts
from specedge.runtime.planning.measurement import measure
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import MAX_DRAFT_TOKENS, Sampling

PROMPTS = ([5, 8, 13, 21, 34], [3, 5, 8, 13], [7])
LONG = [int(token) for token in np.random.default_rng(0).integers(5, VOCAB_SIZE, 280)]
TOKENS = 60
OPTIONS = {"max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module", params=[True, False], ids=["fuse", "no fuse"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    make_draft_head(folder, TOKEN_IDS if request.param else None, request.param)
    return folder


@pytest.fixture(scope="module")
def pair(folder):
    with specedge.load(folder) as pipeline:
        yield pipeline


def models(folder):
    bundle = Bundle.read(folder)
    return [OrtModel(bundle, model, Device()) for model in bundle.models.values()]


def test_passes_return_the_hidden_states_of_all_their_tokens(folder):
    target, draft = models(folder)
    target.forward(LONG[:20])
    expected = target.hidden.copy()
    assert expected.shape == (20, target._session.model.hidden.size)
    target.truncate(5)
    target.forward(LONG[5:9], 1)
    np.testing.assert_allclose(target.hidden, expected[5:9], atol=1e-6)
    target.prefill(LONG[9:20])
    np.testing.assert_allclose(target.hidden, expected[9:20], atol=1e-6)
    assert draft.fuse(expected).shape == (20, HIDDEN)


def test_padded_passes_return_the_states_of_their_tokens(folder):
    target, draft = models(folder)
    states = draft.fuse(np.ones((3, target._session.model.hidden.size), np.float32))
    rows = draft.forward(LONG[:3], 1, states).array().copy()
    hidden = draft.hidden.copy()
    draft.pad_single_tokens()
    for i in range(3):
        draft.truncate(i)
        logits = draft.forward(LONG[i : i + 1], 1, states[i : i + 1])
    assert draft.hidden.shape == (1, HIDDEN)
    np.testing.assert_allclose(logits.array(), rows, atol=1e-5)
    np.testing.assert_allclose(draft.hidden[0], hidden[-1], atol=1e-6)


def test_a_pass_without_states_reads_zeros(folder):
    """Self-tests, measurements and audits of single models run such passes."""
    _, draft = models(folder)
    zeros = draft.forward([5, 6], None, np.zeros((2, HIDDEN), np.float32)).array().copy()
    draft.truncate(0)
    draft.forward([5, 6], None, np.ones((2, HIDDEN), np.float32))
    draft.truncate(0)
    np.testing.assert_array_equal(draft.forward([5, 6]).array(), zeros)


def test_warm_up_runs_the_passes_of_drafts(folder, monkeypatch):
    """On a GPU, which captures them."""
    _, draft = models(folder)
    draft.warm_up(range(1, 4))
    monkeypatch.setattr(draft._session, "bind", None)
    draft.forward([5, 6, 7], 1, np.zeros((3, HIDDEN), np.float32))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_is_the_target_s_for_every_k(pair, prompt):
    expected = pair.generate(prompt, num_draft_tokens=0, **OPTIONS).tokens
    num_accepted = 0
    for k in range(1, 9):
        generation = pair.generate(prompt, num_draft_tokens=k, **OPTIONS)
        assert generation.tokens == expected
        num_accepted += generation.stats.num_accepted
        assert generation.stats.num_accepted < generation.stats.num_tested
        assert {*generation.stats.drafted_by_source} == {"model"}
    assert num_accepted


@pytest.mark.parametrize("drafter", ["model", "chain", "suffix", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_seed_repeats_its_text_in_another_order(folder, pair, drafter, temperature):
    options = OPTIONS | {"drafter": drafter, "temperature": temperature, "top_p": 0.9, "seed": 3}
    expected = [pair.generate(prompt, **options).tokens for prompt in PROMPTS]
    with specedge.load(folder) as pipeline:
        pipeline.costs.table = pair.costs.table
        for i in (1, 0, 2, 2, 1):
            assert pipeline.generate(PROMPTS[i], **options).tokens == expected[i]


def test_draft_logits_equal_those_of_a_new_head_over_the_same_text(pair):
    """After many rounds with rejections, with and without prompts read in chunks."""
    for prompt in (*PROMPTS, LONG[:100]):
        generation = pair.generate(prompt, 150, num_draft_tokens=4, ignore_eos=True)
        assert generation.stats.num_accepted < generation.stats.num_tested
        text = [*prompt, *generation.tokens]
        draft, fresh = pair.draft, pair.draft.with_new_cache()
        observed, target = draft.observed, pair.target.with_new_cache()
        assert observed.start == 0
        num_rows = observed.num_rows
        assert num_rows > len(text) - 8
        target.prefill(text)
        states = fresh.fuse(target.hidden)
        fresh.prefill(text[1 : num_rows + 1], states[:num_rows])
        for rows, expected in zip(
            draft.cache_rows(0, num_rows), fresh.cache_rows(0, num_rows), strict=True
        ):
            np.testing.assert_allclose(rows, expected, atol=1e-4)


def test_slots_with_two_requests_do_not_affect_each_other(folder, pair):
    options = OPTIONS | {"num_draft_tokens": 3}
    expected = [pair.generate(prompt, **options).tokens for prompt in PROMPTS]
    with specedge.load(folder, slots=2) as pipeline:
        results = pipeline.generate_batch([*PROMPTS, *PROMPTS], **options)
        assert [result.tokens for result in results] == expected * 2
        streams = [pipeline.stream(prompt, **options) for prompt in PROMPTS[:2]]
        for _ in zip_longest(*streams):
            pass
        assert [stream.generation.tokens for stream in streams] == expected[:2]
        assert all(stream.stats.num_accepted for stream in streams)


def test_other_drafters_run_no_pass_of_the_head(pair, monkeypatch):
    def fail(*args, **options):
        raise AssertionError

    monkeypatch.setattr(OrtModel, "fuse", fail)
    monkeypatch.setattr(DraftHead, "observe", fail)
    for options in ({"num_draft_tokens": 0}, {"drafter": "suffix"}, {"drafter": "lookup"}):
        pair.generate(PROMPTS[0], 8, **options)


def table(draft, acceptance):
    mode = ModeCosts(
        target=((1.0, 1.01, 1.02, 1.03, 1.04),), draft=(tuple(draft * k for k in range(1, 5)),),
        prefill=(draft / 4,), host=0.0, token=0.0, acceptance={"model": acceptance},
    )  # fmt: skip
    return CostTable("tune", (64,), (1, 2, 3, 4, 5), mode, mode, 0)


@pytest.mark.parametrize(("draft", "acceptance", "reads"), [(0.01, 0.7, True), (0.5, 0.2, False)])
def test_auto_reads_prompts_only_where_drafts_are_expected_to_pay(
    pair, monkeypatch, draft, acceptance, reads
):
    monkeypatch.setattr(pair.costs, "table", table(draft, acceptance))
    num_fused, fuse = [], OrtModel.fuse

    def counted(model, hidden):
        num_fused.append(len(hidden))
        return fuse(model, hidden)

    monkeypatch.setattr(OrtModel, "fuse", counted)
    generation = pair.generate(PROMPTS[0], 40, temperature=0.9, seed=1, ignore_eos=True)
    assert bool(num_fused) is reads
    names = {name for name, *_ in generation.plan}
    assert bool(names & {"model", "chain"}) is reads
    replayed = pair.generate(
        PROMPTS[0], 40, temperature=0.9, seed=1, ignore_eos=True, replay=generation.plan
    )
    assert replayed.tokens == generation.tokens


def test_costs_are_measured_with_the_head(pair):
    drafter = create_drafter(pair.draft, pair.bundle.draft)
    measured = measure(pair.target, drafter, CONTEXT, 4, lengths=(64, 200), seconds=0.01)
    assert len(measured.costs.greedy.draft) == 2
    generation = pair.generate(PROMPTS[1], 20, num_draft_tokens=2, ignore_eos=True)
    assert generation.stats.num_drafted
    assert pair.draft.observed.start == 0


def test_acceptance_rates_are_those_of_first_draft_tokens(pair):
    prompt, sampling = PROMPTS[0], Sampling(0.8)
    text = pair.generate(prompt, 20, num_draft_tokens=0, ignore_eos=True).tokens
    rates = acceptances(pair, prompt, text, sampling)
    assert len(rates) == 20
    target, head = pair.target.with_new_cache(), pair.draft.with_new_cache()
    for place in (0, 3, 19):
        read = [*prompt, *text[:place]]
        target.truncate(0)
        head.truncate(0)
        rows = [target.forward(read)[-1]]
        rows.append(head.forward(read[1:], 1, head.fuse(target.hidden[:-1]))[-1])
        history = History(prompt, text[:place])
        expected = [probabilities(row.array(), sampling, history, row.ids).row(VOCAB_SIZE)
                    for row in rows]  # fmt: skip
        assert rates[place] == pytest.approx(float(np.minimum(*expected).sum()), abs=1e-4)
    assert acceptances(pair, [7], text, sampling) == []


def test_states_of_a_chunk_and_of_the_verify_pass_after_it_are_kept():
    assert chunk_length(1) + 1 + MAX_DRAFT_TOKENS <= WINDOW


def test_memory_includes_states(folder):
    bundle = Bundle.read(folder)
    ops = dict.fromkeys(bundle.models, "onnx")
    one, two = (pair_memory(bundle, ops, slots).models[1].passes for slots in (1, 2))
    assert two - one >= 4 * WINDOW * bundle.draft.hidden.size
    assert FEATURES
