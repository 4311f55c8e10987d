"""Passes through fixed-shape graphs equal those of the decoder, with any padding."""

import numpy as np
import pytest

from cases import slow
from specedge.runtime.backend.cuda.fixed_shapes import FixedShapeModel
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.self_test import exact_device
from specedge.runtime.backend.sessions import Device
from specedge.runtime.requests.pipeline import Pipeline

PROMPT = "def read_config(path):"


@pytest.fixture(scope="module", params=["gqa", slow("onnx")])
def pair(request, pipeline):
    """The embedded pair on decoders, and on graphs of fixed lengths."""
    bundle = pipeline.bundle
    device = exact_device(bundle.models.values(), Device())
    made = []
    for kind in (OrtModel, FixedShapeModel):
        target, draft = (kind(bundle, m, device, request.param) for m in bundle.models.values())
        made.append(Pipeline(bundle, pipeline.tokenizer, target, draft, pipeline.costs))
    return made


@pytest.fixture
def models(pair):
    """The targets, with empty caches."""
    for one in pair:
        one.forget()
    return [one.target for one in pair]


def tokens(pipeline, count):
    return [(7 * i) % pipeline.target.vocab_size for i in range(count)]


@pytest.mark.parametrize("length", [1, 2, 5, 6, 11])
def test_a_pass_of_any_length_equals_the_decoder_bitwise(pipeline, models, length):
    whole = tokens(pipeline, 20 + length)
    for model in models:
        model.prefill(whole[:20])
    wanted, found = (model.forward(whole[20:]).array() for model in models)
    assert found.shape == wanted.shape == (length, pipeline.target.vocab_size)
    assert np.array_equal(found, wanted)
    assert models[1].length == 20 + length
    rows = [model.cache_rows(0, 20 + length) for model in models]
    assert all(map(np.array_equal, *rows))


@pytest.mark.parametrize("length", [3, 11])
def test_last_row_logits_equal_decoder_logits(pipeline, models, length):
    wanted, found = (model.forward(tokens(pipeline, length), 2).array() for model in models)
    assert found.shape == wanted.shape == (2, pipeline.target.vocab_size)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("count", [1, 6, 64, 65, 130])
def test_padded_prefill_chunks_leave_the_same_caches_as_decoder(pipeline, models, count):
    for model in models:
        model.prefill(tokens(pipeline, count))
    assert models[1].length == count
    rows = [model.cache_rows(0, count) for model in models]
    assert all(map(np.array_equal, *rows))


def test_padding_stays_within_the_cache(pipeline, models):
    context = pipeline.bundle.context_length
    text = tokens(pipeline, context)
    for model in models:
        model.prefill(text[:10])
        model.prefill(text[10:-1])  # whose last chunk, padded, would end behind the cache
    wanted, found = (model.forward(text[-1:]).array() for model in models)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(("k", "options"), [(0, {}), (1, {"temperature": 0.9, "seed": 3}), (6, {})])
def test_texts_equal_those_of_the_decoder(pair, options, k):
    wanted, found = (
        one.generate(PROMPT, 40, num_draft_tokens=k, ignore_eos=True, **options) for one in pair
    )
    assert found.tokens == wanted.tokens
    assert [r.num_accepted for r in found.rounds] == [r.num_accepted for r in wanted.rounds]


@pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 5}])
def test_the_context_fills_to_its_last_position(pipeline, pair, options):
    context = pipeline.bundle.context_length
    long = (pipeline.tokenizer.encode(PROMPT).ids * context)[: context - 30]
    wanted, found = (
        one.generate(long, 99, num_draft_tokens=4, ignore_eos=True, **options) for one in pair
    )
    assert (len(found.tokens), found.finish_reason) == (30, "context")
    assert found.tokens == wanted.tokens


def test_padded_rows_are_never_read(pipeline, models):
    target = models[1]
    text = tokens(pipeline, 40)
    target.prefill(text[:20])
    target.forward(text[20:23])
    for array in target.cache.arrays.values():
        array[:, :, 23:] = 1e4
    padded = target.forward(text[23:26]).array().copy()
    models[0].prefill(text[:23])
    assert np.array_equal(padded, models[0].forward(text[23:26]).array())


def test_model_with_new_cache_has_separate_cache(pipeline, models):
    target = models[1]
    target.prefill(tokens(pipeline, 7))
    twin = target.with_new_cache()
    assert (twin.length, target.length) == (0, 7)
    assert isinstance(twin, OrtModel)
    twin.forward([1, 2, 3])
    assert (twin.length, target.length) == (3, 7)
