"""Prompts that run together: their texts, order, seeds and errors."""

import pytest

import specedge
from specedge.bundle import store
from specedge.errors import ContextLengthError
from specedge.runtime.requests.batch import BatchItem, run_items

PROMPTS = ["def read_config(path):", "import json", "class Parser:", "for i in range(", "# x"]


@pytest.fixture(scope="module")
def alone():
    return specedge.load(store.embedded_folder())


@pytest.fixture(scope="module", params=[1, 3])
def pipeline(request):
    return specedge.load(store.embedded_folder(), slots=request.param)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 4])
def test_batch_has_the_texts_of_its_prompts_alone_in_order(alone, pipeline, temperature, k):
    options = {"num_draft_tokens": k, "logprobs": 2}
    batch = pipeline.generate_batch(PROMPTS, 20, temperature, seed=7, **options)
    for i, (prompt, generation) in enumerate(zip(PROMPTS, batch, strict=True)):
        expected = alone.generate(prompt, 20, temperature, seed=7 + i, **options)
        assert (generation.text, generation.tokens) == (expected.text, expected.tokens)
        assert (generation.logprobs, generation.seed) == (expected.logprobs, 7 + i)
    assert all(slot.is_free for slot in pipeline.slots.all)


def test_an_empty_batch_is_empty(pipeline):
    assert pipeline.generate_batch([]) == []


def test_an_error_in_a_batch_frees_all_slots(pipeline):
    with pytest.raises(ContextLengthError):
        pipeline.generate_batch([PROMPTS[0], "x " * 2000, PROMPTS[1]], 20)
    assert all(slot.is_free for slot in pipeline.slots.all)


def test_an_item_that_fails_does_not_affect_the_others(alone, pipeline):
    request = {"max_new_tokens": 10, "num_draft_tokens": 4}
    prompts = [PROMPTS[0], "x " * 2000, PROMPTS[1]]
    items = [BatchItem(i, None, prompt, None, request) for i, prompt in enumerate(prompts)]
    results = list(run_items(pipeline, items))
    assert [result["index"] for result in results] == [0, 1, 2]
    assert "shorten it" in results[1]["error"]
    texts = [alone.generate(prompt, 10, num_draft_tokens=4).text for prompt in PROMPTS[:2]]
    assert [results[0]["text"], results[2]["text"]] == texts


def test_items_that_draft_from_earlier_outputs_run_in_their_order(pipeline):
    request = {"max_new_tokens": 12, "drafter": "suffix", "num_draft_tokens": 4, "remember": True}
    items = [BatchItem(i, None, PROMPTS[0], None, request) for i in range(3)]
    pipeline.forget()
    first, second, third = run_items(pipeline, items)
    assert first["text"] == second["text"] == third["text"]
    assert first["stats"]["num_rounds"] > second["stats"]["num_rounds"]
    assert second["stats"] == third["stats"]


def test_other_requests_run_beside_a_batch(alone, pipeline):
    stream = pipeline.stream(PROMPTS[2], 12)
    next(stream)
    if len(pipeline.slots.all) > 1:
        batch = pipeline.generate_batch(PROMPTS[:2], 12)
        assert [g.text for g in batch] == [alone.generate(p, 12).text for p in PROMPTS[:2]]
    assert stream.generation.text + "".join(stream) == alone.generate(PROMPTS[2], 12).text


def test_prompts_of_one_token_share_their_first_passes(alone, pipeline):
    """Nothing is left to prefill, so that their first operations are verify passes."""
    options = {"num_draft_tokens": 4, "exact": True}
    batch = pipeline.generate_batch([[5], [6], [7]], 8, **options)
    assert [g.tokens for g in batch] == [
        alone.generate([token], 8, **options).tokens for token in (5, 6, 7)
    ]


def test_a_custom_drafter_sees_one_text_at_a_time(pipeline):
    class Recording:
        name = "recording"

        def __init__(self):
            self.texts = []

        def propose(self, history, max_tokens, sampling, uniforms):
            if not self.texts or self.texts[-1] != history.tokens[:3]:
                self.texts.append(history.tokens[:3])
            return specedge.Draft([])

        def truncate(self, length):
            pass

    drafter = Recording()
    pipeline.generate_batch(PROMPTS[:3], 8, drafter=drafter, num_draft_tokens=2)
    assert len(drafter.texts) == 3


def test_a_text_without_visible_tokens_does_not_stop_the_others(pipeline, monkeypatch):
    """End tokens have no text; their request must not run its rounds alone."""
    if len(pipeline.slots.all) == 1:
        pytest.skip("one prompt at a time")
    end = pipeline.bundle.end_tokens[0]
    options = {"num_draft_tokens": 0, "ignore_eos": True}
    silent = {"logit_bias": {end: 100.0}}
    before = pipeline.slots.engine.num_passes
    items = [
        BatchItem(i, None, prompt, None, {"max_new_tokens": 30, **options, **extra})
        for i, (prompt, extra) in enumerate(zip(PROMPTS[:2], [silent, {}], strict=True))
    ]
    first, second = run_items(pipeline, items)
    assert first["text"] == ""
    assert second["text"]
    assert pipeline.slots.engine.num_passes - before < 45
