"""Passes of models with wide heads are bitwise equal across the lengths where kernels change."""

from functools import partial

import numpy as np
import pytest

import specedge
from draft_head_bundles import make_draft_head
from encoder_decoder_bundles import HIDDEN
from specedge.bundle import Bundle
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.self_test import verify_cpu_lengths
from specedge.runtime.backend.sessions import Device
from threads import in_threads
from wide_heads import make_wide_pair

TEXT = [7 * i % 500 for i in range(330)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_wide_pair(tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def widest_folder(tmp_path_factory):
    return make_wide_pair(tmp_path_factory.mktemp("widest"), 512, has_draft=False)


@pytest.fixture(scope="module", params=["folder", "widest_folder", "folder, padded"])
def model(request):
    name, _, padding = request.param.partition(", ")
    bundle = Bundle.read(request.getfixturevalue(name))
    model = OrtModel(bundle, bundle.target, Device())
    if padding:
        model.pad_single_tokens()
    return model


@pytest.fixture(scope="module")
def single_steps(model):
    """Return logits [T, V] and cache rows of the text, by passes of one token."""
    model.truncate(0)
    logits = np.concatenate([model.forward([token]).array().copy() for token in TEXT])
    return logits, model.cache_rows(0, len(TEXT))


def check_rows(model, rows):
    for actual, expected in zip(model.cache_rows(0, model.length), rows, strict=True):
        assert np.array_equal(actual, expected[:, : model.length])


@pytest.mark.parametrize("length", [2, 3, 9])
def test_passes_equal_single_steps_at_each_cache_length(model, single_steps, length):
    (logits, rows), differing = single_steps, []
    model.truncate(0)
    for start in range(len(TEXT) - length + 1):
        model.truncate(start)
        actual = model.forward(TEXT[start : start + length]).array()
        if not np.array_equal(actual, logits[start : start + length]):
            differing.append(start)
    assert not differing
    check_rows(model, rows)


@pytest.mark.parametrize("is_padded", [False, True])
def test_passes_of_two_slots_equal_single_steps_at_each_cache_length(folder, is_padded):
    with specedge.load(folder, slots=2) as pipeline:
        models = [slot.target for slot in pipeline.slots.all]
        if is_padded:
            models[0].pad_single_tokens()
        models[0].truncate(0)
        steps = [models[0].forward([token]).array().copy() for token in TEXT[:70]]
        models[1].prefill(TEXT[:70])
        for start in range(58, 66):
            for length in (1, 2, 4):
                for model in models:
                    model.truncate(start)
                feeds = [(model, TEXT[start : start + length], length) for model in models]
                for logits in models[0].batch.forward(feeds):
                    assert np.array_equal(logits.array(), np.concatenate(steps[start:][:length]))


@pytest.mark.parametrize("num_rows", [None, 1, 3, 20])
def test_a_pass_over_several_boundaries_returns_the_last_rows(model, single_steps, num_rows):
    logits, rows = single_steps
    model.truncate(0)
    actual = model.forward(TEXT[:70], num_rows).array()
    assert np.array_equal(actual, logits[70 - (num_rows or 70) : 70])
    check_rows(model, rows)


@pytest.mark.parametrize("lengths", [[330], [64, 266], [7] * 47, [62, 1, 1, 9, 200]])
def test_cache_rows_do_not_depend_on_the_chunks_of_a_prompt(model, single_steps, lengths):
    _, rows = single_steps
    model.truncate(0)
    for length in lengths:
        model.prefill(TEXT[model.length : model.length + length])
    check_rows(model, rows)
    for reused in (60, 64, 320):
        assert model.reuse([*TEXT[:reused], -1]) == reused
        model.prefill(TEXT[reused:])
        check_rows(model, rows)


def test_self_test_crosses_the_boundaries(folder):
    bundle = Bundle.read(folder)
    model = OrtModel(bundle, bundle.target, Device())
    assert model.invariant_lengths[0] == 1
    assert verify_cpu_lengths(model, bundle.target) is None
    model._boundaries = ()
    assert "are not bitwise equal" in verify_cpu_lengths(model, bundle.target)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_hidden_states_are_those_of_both_parts(role, tmp_path, monkeypatch):
    bundle = make_draft_head(tmp_path)
    model = OrtModel(bundle, bundle.models[role], Device())
    tokens = [5, 8, 13, 21, 34, 7, 9, 11, 30]
    states = np.random.default_rng(0).standard_normal((9, HIDDEN), np.float32)
    hidden = states if role == "draft" else None
    results = []
    for boundaries in ((), (2, 5)):
        monkeypatch.setattr(model, "_boundaries", boundaries)
        model.truncate(0)
        logits = model.forward(tokens, 4, hidden).array().copy()
        results.append([logits, model.hidden.copy()])
        model.truncate(0)
        model.prefill(tokens, hidden)
        results[-1].append(model.hidden.copy())
        assert model.length == 9
    for whole, split in zip(*results, strict=True):
        np.testing.assert_allclose(split, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompt_length", [20, 61, 64, 310])
def test_greedy_text_is_equal_at_each_k(folder, prompt_length):
    with specedge.load(folder) as pipeline:
        options = {"max_new_tokens": 20, "ignore_eos": True, "logprobs": 0}
        for start in (1, 2, 3):
            prompt = TEXT[start : start + prompt_length]
            pipeline.forget()
            plain = pipeline.generate(prompt, num_draft_tokens=0, **options)
            for k in range(1, 9):
                generation = pipeline.generate(prompt, num_draft_tokens=k, **options)
                assert generation.tokens == plain.tokens
                assert generation.logprobs == plain.logprobs


def test_requests_that_share_passes_equal_single_requests(folder):
    prompts = [TEXT[start : start + length] for start, length in [(0, 50), (9, 57), (4, 62)]]
    options = {"max_new_tokens": 30, "ignore_eos": True, "logprobs": 0}
    with specedge.load(folder) as pipeline:
        expected = [pipeline.generate(prompt, **options) for prompt in prompts]
    with specedge.load(folder, slots=3) as shared:
        assert shared.target.batch is not None
        actual = in_threads(*(partial(shared.generate, prompt, **options) for prompt in prompts))
    for generation, alone in zip(actual, expected, strict=True):
        assert generation.tokens == alone.tokens
        assert generation.logprobs == alone.logprobs
