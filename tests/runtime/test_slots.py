"""Concurrent requests, each in its slot, over one set of weights."""

import gc
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

import specedge
from specedge.bundle import store
from specedge.errors import SpecEdgeError
from specedge.runtime.requests import loader
from threads import in_threads

PROMPTS = ["def read_config(path):", "import json", "class Parser:", "for i in range("]
OPTIONS = {"num_draft_tokens": 4, "ignore_eos": True}
LONG = "\n".join(f"value_{i} = read({i})" for i in range(46))


@pytest.fixture(scope="module")
def alone():
    return specedge.load(store.embedded_folder())


@pytest.fixture(scope="module")
def slots():
    """A pipeline of three slots."""
    return specedge.load(store.embedded_folder(), slots=3)


def places(pipeline):
    """The slots by number: which are free, and how many tokens each target has read."""
    return [(slot.is_free, slot.target.length) for slot in pipeline.slots.all]


def slot_of(pipeline, stream):
    return pipeline.slots.all.index(stream._active.lease.slot)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_requests", [8])  # more than slots
def test_concurrent_requests_equal_single_requests(alone, slots, temperature, num_requests):
    def request(pipeline, i):
        prompt, length = PROMPTS[i % 4] + f" # {i}", 10 + 7 * i
        options = OPTIONS | {"num_draft_tokens": 1 + i % 5, "seed": i}
        return pipeline.generate(prompt, length, temperature, **options)

    wanted = [request(alone, i) for i in range(num_requests)]
    found = in_threads(*(lambda i=i: request(slots, i) for i in range(num_requests)))
    assert [(f.text, f.tokens) for f in found] == [(w.text, w.tokens) for w in wanted]
    assert all(free for free, _ in places(slots))


def test_streams_of_one_thread_interleave(alone, slots):
    wanted = [alone.generate(prompt, 24, **OPTIONS).text for prompt in PROMPTS[:3]]
    streams = [slots.stream(prompt, 24, **OPTIONS) for prompt in PROMPTS[:3]]
    found = ["", "", ""]
    for _ in range(24):
        for i, stream in enumerate(streams):
            found[i] += next(stream, "")
    assert found == wanted


def test_logits_are_not_overwritten_by_another_slots_pass(slots):
    first, second, _ = (slot.target for slot in slots.slots.all)
    slots.forget()
    logits = first.forward([1, 2, 3]).array()
    kept = logits.copy()
    second.forward([7, 8, 9])
    assert (logits == kept).all()
    slots.forget()


def test_a_short_request_ends_before_a_longer_one_that_began_earlier(slots):
    begun, ended = threading.Event(), []

    def long():
        for _ in slots.stream(PROMPTS[0], 200, num_draft_tokens=0, ignore_eos=True):
            begun.set()
        ended.append("long")

    def short():
        begun.wait(30)
        slots.generate(PROMPTS[1], 10, num_draft_tokens=0, ignore_eos=True)
        ended.append("short")

    in_threads(long, short)
    assert ended == ["short", "long"]


@pytest.mark.parametrize("num_left", [1, 20])
def test_requests_fill_the_context_beside_others(alone, slots, num_left):
    context = slots.bundle.context_length
    prompts = [(alone.prompts.tokens(prompt) * context)[: context - num_left] for prompt in PROMPTS]

    def request(pipeline, prompt):
        return pipeline.generate(prompt, context, **OPTIONS)

    expected = [request(alone, prompt) for prompt in prompts]
    generations = in_threads(*(lambda p=prompt: request(slots, p) for prompt in prompts))
    assert [g.tokens for g in generations] == [e.tokens for e in expected]
    assert {(len(g.tokens), g.finish_reason) for g in generations} == {(num_left, "context")}


def test_a_long_prompt_takes_turns_with_other_requests(slots):
    slots.forget()
    other = slots.stream(PROMPTS[0], 24, **OPTIONS)
    stream = slots.stream(LONG, 2, **OPTIONS)
    target = slots.slots.all[slot_of(slots, stream)].target
    seen = []

    def between():
        while len(seen) < 1:
            with slots.slots.engine.paused():
                if target.length > 0:
                    seen.append(target.length)

    num_tokens = len(slots.prompts.tokens(LONG))
    thread = threading.Thread(target=between)
    thread.start()
    for _ in stream:
        pass
    thread.join()
    assert seen[0] in range(64, num_tokens - 1, 64)
    other.close()


def test_prefill_chunks_are_short_if_other_requests_may_wait(alone, slots):
    loaded = alone.bundle.target
    parity = {ops: replace(one, invariant_lengths=(1, 2)) for ops, one in loaded.parity.items()}
    varying = replace(loaded, parity=parity)
    assert (alone._chunk_length, slots._chunk_length) == (256, 64)
    assert loader._shared_chunk_length(alone.target, loaded, 0) == 64
    assert loader._shared_chunk_length(alone.target, loaded, 256) == 64
    assert loader._shared_chunk_length(alone.target, loaded, 18) is None  # tested on this machine
    assert loader._shared_chunk_length(alone.target, varying, 0) is None
    self_tested = SimpleNamespace(ops=alone.target.ops, invariant_lengths=(1, 2, 3, 5))
    assert loader._shared_chunk_length(self_tested, loaded, 0) is None


def test_a_chunked_prompt_reuses_its_cached_prefix(alone):
    alone.forget()
    first = alone.generate(LONG, 4, **OPTIONS)
    again = alone.generate(LONG, 4, **OPTIONS)
    num_tokens = first.stats.num_prompt_tokens
    assert num_tokens > 256
    assert (first.stats.num_reused_tokens, again.stats.num_reused_tokens) == (0, num_tokens - 1)
    assert first.text == again.text


def test_a_request_gets_the_slot_with_the_longest_prefix(slots):
    slots.forget()
    texts = ["import json\n\ndef read(path):", "class Parser:\n    def", "for i in range(10):"]
    for text in texts:  # each an empty slot, since it shares nothing with what is cached
        slots.generate(text, 4, **OPTIONS)
    assert all(length for _, length in places(slots))
    for text in reversed(texts):
        one = slots.generate(text + " x", 4, **OPTIONS)
        assert one.stats.num_reused_tokens >= len(slots.prompts.tokens(text)) - 1
    first = slots.stream(texts[1] + " x", 4, **OPTIONS)
    other = slots.stream(texts[1] + " x", 4, **OPTIONS)  # the slot that has it is taken
    assert slot_of(slots, first) != slot_of(slots, other)
    first.close()
    other.close()


def test_without_a_common_prefix_the_least_recently_used_slot_is_taken(slots):
    slots.forget()
    taken = []
    for i in range(6):
        stream = slots.stream([100 + i, 200 + i], 2, **OPTIONS)
        taken.append(slot_of(slots, stream))
        list(stream)
    assert sorted(taken[:3]) == [0, 1, 2]
    assert taken[3:] == taken[:3]


@pytest.mark.parametrize("end", ["close", "cancel from another thread", "drop"])
def test_a_closed_stream_frees_its_slot_only(slots, end):
    streams = [slots.stream(prompt, 400, **OPTIONS) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    place = slot_of(slots, streams[1])
    del stream
    gc.disable()
    try:
        if end == "close":
            streams[1].close()
        elif end == "drop":
            del streams[1]
        else:
            in_threads(streams[1].cancel)
        assert [free for free, _ in places(slots)] == [i == place for i in range(3)]
        assert next(streams[0])
    finally:
        gc.enable()
    for stream in streams:
        stream.close()


def test_stream_can_be_cancelled_during_another_slots_round(slots):
    waiting, running = (slots.stream(prompt, 40, **OPTIONS) for prompt in PROMPTS[:2])
    next(waiting)
    with slots.slots.engine.paused():  # as in a round of `running`
        assert in_threads(waiting.cancel) == [None]
        taken = [i for i, (free, _) in enumerate(places(slots)) if not free]
        assert taken == [slot_of(slots, running)]
    assert list(waiting) == []
    assert next(running)
    running.close()


def test_request_waits_for_slot_or_is_rejected(slots):
    streams = [slots.stream(prompt, 40, **OPTIONS) for prompt in PROMPTS[:3]]
    (error,) = in_threads(lambda: slots.generate(PROMPTS[3], 4, wait=False))
    assert isinstance(error, SpecEdgeError)
    assert "all 3 slots of this pipeline are occupied" in str(error)
    found = []
    thread = threading.Thread(target=lambda: found.append(slots.generate(PROMPTS[3], 4)))
    thread.start()
    time.sleep(0.05)
    assert not found
    streams[2].close()
    thread.join(30)
    assert found[0].text
    for stream in streams:
        stream.close()


def test_error_in_one_request_does_not_affect_others(alone, slots):
    class Broken:
        name = "broken"

        def truncate(self, length):
            pass

        def propose(self, history, *rest):
            if history.length > 20:
                raise ZeroDivisionError
            return specedge.Draft([])

    def text(pipeline, i, **options):
        return pipeline.generate(PROMPTS[i], 30, **(OPTIONS | options)).text

    wanted = [text(alone, 0), text(alone, 1)]
    found = in_threads(
        lambda: text(slots, 0), lambda: text(slots, 2, drafter=Broken()), lambda: text(slots, 1)
    )
    assert isinstance(found[1], ZeroDivisionError)
    assert [found[0], found[2]] == wanted
    assert all(free for free, _ in places(slots))


def test_time_of_other_requests_is_not_counted():
    """The times of three requests that take turns add up to at most the elapsed time."""
    slots = specedge.load(store.embedded_folder(), slots=3, ops="onnx")
    begin = time.perf_counter()
    ran = in_threads(
        *(lambda prompt=prompt: slots.generate(prompt, 60, **OPTIONS) for prompt in PROMPTS[:3])
    )
    passed = time.perf_counter() - begin
    assert sum(one.stats.decode_seconds + one.stats.prefill_seconds for one in ran) < passed


def test_noise_is_measured_in_the_slots_own_cache(slots):
    """Measurement must not evict the cache rows of another slot."""
    slots.forget()
    kept, own, _ = slots.slots.all
    kept.target.prefill([1, 2, 3])
    own.target.prefill([4, 5, 6])
    bound = own.noise.bound([1, 2], 4, trusts_export=False)
    assert (kept.target.length, own.target.length) == (3, 0)
    assert kept.noise.bound([1, 2], 4, trusts_export=False) == bound
    assert kept.target.length == 3  # measured once for all
    slots.forget()


def test_a_closed_pipeline_is_reported_and_may_be_closed_again():
    with specedge.load(slots=2) as pipeline:
        stream = pipeline.stream(PROMPTS[0], 30)
        next(stream)
        pipeline.close()
    assert stream.generation.tokens
    with pytest.raises(SpecEdgeError, match="the pipeline of this stream was closed"):
        next(stream)
    with pytest.raises(SpecEdgeError, match="this pipeline is closed; load the bundle again"):
        pipeline.generate(PROMPTS[0])
