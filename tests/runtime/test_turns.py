"""A pipeline with one slot serves one request at a time, from any thread or task."""

import asyncio
import gc
import threading

import pytest

import specedge
from specedge.bundle import store
from specedge.errors import DrafterError, PromptError, SpecEdgeError

PROMPTS = ["def read_config(path):", "import json", "class Parser:", "for i in range("]
OPTIONS = {"num_draft_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def pipeline():
    return specedge.load(store.embedded_folder())


def in_thread(function, *args):
    """Return a function's result in another thread, or its exception."""
    found = []

    def run():
        try:
            found.append(function(*args))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert found, "it waits for ever"
    return found[0]


def text_of(pipeline, prompt, **options):
    return pipeline.generate(prompt, 24, **OPTIONS, **options).text


def test_requests_of_four_threads_do_not_mix(pipeline):
    expected = [text_of(pipeline, prompt) for prompt in PROMPTS]
    found = [[] for _ in PROMPTS]

    def run(i):
        for turn in range(6):
            if turn % 2:
                found[i].append(text_of(pipeline, PROMPTS[i]))
            else:
                found[i].append("".join(pipeline.stream(PROMPTS[i], 24, **OPTIONS)))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[text] * 6 for text in expected]


def test_another_threads_request_is_refused_where_it_must_not_wait(pipeline):
    stream = pipeline.stream(PROMPTS[0], 24, **OPTIONS)
    next(stream)
    error = in_thread(lambda: text_of(pipeline, PROMPTS[1], wait=False))
    assert isinstance(error, SpecEdgeError)
    assert "the slot of this pipeline is occupied by an unfinished stream" in str(error)
    assert next(stream)
    for _ in stream:
        pass
    assert in_thread(lambda: text_of(pipeline, PROMPTS[1], wait=False))


def test_a_bad_prompt_is_refused_without_waiting(pipeline):
    stream = pipeline.stream(PROMPTS[0], 24, **OPTIONS)
    next(stream)
    assert isinstance(in_thread(pipeline.generate, [10**9]), PromptError)
    assert next(stream)
    stream.close()


def test_a_refused_request_holds_no_turn_while_its_error_is_referenced(pipeline):
    expected = text_of(pipeline, PROMPTS[1])
    with pytest.raises(DrafterError) as kept:
        pipeline.generate(PROMPTS[0], drafter="ngram:/missing")
    assert in_thread(lambda: text_of(pipeline, PROMPTS[1], wait=False)) == expected
    assert kept.traceback


@pytest.mark.parametrize("end", ["close", "drop", "cancel"])
def test_a_closed_stream_releases_its_turn(pipeline, end):
    expected = text_of(pipeline, PROMPTS[1])
    stream = pipeline.stream(PROMPTS[0], 24, **OPTIONS)
    next(stream)
    gc.disable()  # what is dropped must not wait for it
    try:
        if end == "close":
            stream.close()
        elif end == "cancel":
            stream.cancel()
        else:
            del stream
        assert in_thread(lambda: text_of(pipeline, PROMPTS[1])) == expected
    finally:
        gc.enable()


def test_a_failed_request_releases_its_turn(pipeline):
    class Broken:
        name = "broken"

        def truncate(self, length):
            pass

        def propose(self, *args):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pipeline.generate(PROMPTS[0], 8, num_draft_tokens=2, drafter=Broken())
    assert in_thread(lambda: text_of(pipeline, PROMPTS[1], wait=False))


def test_cancel_from_another_thread_ends_a_stream_after_its_round(pipeline):
    stream = pipeline.stream(PROMPTS[0], 400, **OPTIONS)
    pieces = [next(stream)]
    assert in_thread(stream.cancel) is None
    pieces += stream
    found = stream.generation
    assert "".join(pieces) == found.text
    assert found.finish_reason == "unfinished"
    assert 0 < len(found.tokens) < 400
    assert in_thread(lambda: text_of(pipeline, PROMPTS[1], wait=False))


def test_async_for_gives_the_same_text_and_leaves_the_loop_free(pipeline):
    expected = [text_of(pipeline, prompt) for prompt in PROMPTS[:2]]
    ticks = []

    async def tick():
        while True:
            ticks.append(1)
            await asyncio.sleep(0.001)

    async def read(prompt):
        stream = pipeline.astream(prompt, 24, **OPTIONS)
        text = "".join([piece async for piece in stream])
        assert stream.generation.text == text
        return text

    async def main():
        ticking = asyncio.create_task(tick())
        found = await asyncio.gather(*(read(prompt) for prompt in PROMPTS[:2]))
        ticking.cancel()
        return found

    assert asyncio.run(main()) == expected
    assert len(ticks) > 3


@pytest.mark.parametrize("close", [True, False])
def test_an_abandoned_async_stream_releases_its_turn(pipeline, close):
    async def main():
        stream = pipeline.astream(PROMPTS[0], 400, **OPTIONS)
        async for piece in stream:
            assert piece
            break
        if close:
            await stream.aclose()
            assert len(stream.generation.tokens) < 400
            assert [piece async for piece in stream] == []
        del stream
        return await asyncio.to_thread(text_of, pipeline, PROMPTS[1])

    assert asyncio.run(main()) == text_of(pipeline, PROMPTS[1])


def test_an_error_of_an_async_request_is_raised_where_it_is_read(pipeline):
    async def main():
        async for _ in pipeline.astream([10**9]):
            pass

    with pytest.raises(PromptError):
        asyncio.run(main())
