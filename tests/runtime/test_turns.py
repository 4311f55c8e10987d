"""A pipeline with one slot serves one request at a time, from any thread or task."""

import asyncio
import threading

import pytest

import specedge
from specedge.bundle import store
from specedge.errors import DrafterError, PromptError

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


def test_invalid_prompt_is_rejected_without_waiting(pipeline):
    stream = pipeline.stream(PROMPTS[0], 24, **OPTIONS)
    next(stream)
    assert isinstance(in_thread(pipeline.generate, [10**9]), PromptError)
    assert next(stream)
    stream.close()


def test_rejected_request_releases_turn_while_error_is_referenced(pipeline):
    expected = text_of(pipeline, PROMPTS[1])
    with pytest.raises(DrafterError) as kept:
        pipeline.generate(PROMPTS[0], drafter="ngram:/missing")
    assert in_thread(lambda: text_of(pipeline, PROMPTS[1], wait=False)) == expected
    assert kept.traceback


def test_cancel_from_another_thread_stops_stream_after_current_round(pipeline):
    stream = pipeline.stream(PROMPTS[0], 400, **OPTIONS)
    pieces = [next(stream)]
    assert in_thread(stream.cancel) is None
    pieces += stream
    found = stream.generation
    assert "".join(pieces) == found.text
    assert found.finish_reason == "unfinished"
    assert 0 < len(found.tokens) < 400
    assert in_thread(lambda: text_of(pipeline, PROMPTS[1], wait=False))


def test_async_stream_yields_same_text_without_blocking_event_loop(pipeline):
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


def test_slow_reader_of_an_async_stream_does_not_hold_its_slot(pipeline):
    expected = [text_of(pipeline, prompt) for prompt in PROMPTS[:2]]

    async def main():
        stream = pipeline.astream(PROMPTS[0], 24, **OPTIONS)
        piece = await anext(stream)
        other = await asyncio.to_thread(text_of, pipeline, PROMPTS[1])
        return ["".join([piece, *[piece async for piece in stream]]), other]

    assert asyncio.run(main()) == expected


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


def test_async_request_error_is_raised_in_the_consumer(pipeline):
    async def main():
        async for _ in pipeline.astream([10**9]):
            pass

    with pytest.raises(PromptError):
        asyncio.run(main())
