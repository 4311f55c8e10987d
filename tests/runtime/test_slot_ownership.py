"""A stream owns its slot until it ends, is cancelled, closed or collected, in any threads."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from urllib.parse import quote

import pytest

import specedge
from specedge.bundle import store
from specedge.errors import SpecEdgeError
from specedge.runtime.requests import slots as slots_module
from specedge.runtime.requests.slots import Slot, Slots
from threads import in_threads

PROMPTS = ["def read_config(path):", "import json", "class Parser:", "for i in range("]
OPTIONS = {"num_draft_tokens": 4, "ignore_eos": True}
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def pipeline():
    return specedge.load(store.embedded_folder())


@pytest.fixture(scope="module")
def texts(pipeline):
    """The continuation of each prompt, when it has the pipeline to itself."""
    return {p: pipeline.generate(p, NEW_TOKENS, **OPTIONS).text for p in PROMPTS}


def begin(pipeline, prompt, num_tokens=NEW_TOKENS, **options):
    return pipeline.stream(prompt, num_tokens, **OPTIONS, **options)


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def has_reader_in_line(pipeline):
    return len(pipeline.slots.engine._waiters) > 1


def in_worker(function):
    """Run a function in a thread that ends with it; return its value."""
    (value,) = in_threads(function)
    assert not isinstance(value, Exception), value
    return value


def test_stream_cancelled_while_waiting_for_turn_ends_without_error(pipeline):
    for _ in range(2):
        stream = begin(pipeline, PROMPTS[0])
        pieces = [next(stream)]
        ended = []
        reader = threading.Thread(
            target=lambda s=stream, e=ended: e.extend(in_threads(lambda: list(s)))
        )
        with pipeline.slots.engine.paused():
            reader.start()
            wait_until(lambda: has_reader_in_line(pipeline))
            stream.cancel()
        reader.join(30)
        assert ended == [[]]
        assert "".join(pieces) == stream.generation.text
        assert in_worker(lambda: pipeline.generate(PROMPTS[1], 4, wait=False)).text


def test_async_stream_cancelled_while_waiting_ends_without_error(pipeline):
    async def main():
        stream = pipeline.astream(PROMPTS[0], NEW_TOKENS, **OPTIONS)
        pieces = []
        with pipeline.slots.engine.paused():
            reader = asyncio.create_task(anext(stream, None))
            while not has_reader_in_line(pipeline):
                await asyncio.sleep(0.001)
            stream.cancel()
        async with asyncio.timeout(30):
            assert await reader is None
            assert [piece async for piece in stream] == pieces

    asyncio.run(main())


def test_disconnect_while_waiting_for_turn_logs_no_traceback(pipeline, caplog):
    pytest.importorskip("starlette")
    from specedge.serve.job_queue import JobQueue

    async def main():
        jobs = JobQueue(num_slots=1, max_waiting=0)
        events = jobs.run(lambda is_cancelled: begin(pipeline, PROMPTS[0]), lambda *_: None)
        with pipeline.slots.engine.paused():
            reader = asyncio.create_task(anext(events))
            while not has_reader_in_line(pipeline):
                await asyncio.sleep(0.001)
            reader.cancel()
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await asyncio.gather(reader, return_exceptions=True)
            await events.aclose()

    with caplog.at_level(logging.ERROR, "specedge"):
        asyncio.run(main())
    assert not caplog.records


def test_stream_of_finished_thread_keeps_its_slot(pipeline, texts):
    stream = in_worker(lambda: begin(pipeline, PROMPTS[0]))
    piece = in_worker(lambda: next(stream))
    with pytest.raises(SpecEdgeError, match="occupied"):
        pipeline.generate(PROMPTS[1], 4, wait=False)
    assert piece + "".join(stream) == texts[PROMPTS[0]]


def test_request_waits_for_a_stream_that_its_own_worker_thread_began(pipeline, texts):
    """One worker begins both; the first stream is read elsewhere meanwhile, as in any pool."""
    first, second, begun = [], [], threading.Event()

    def worker():
        first.append(begin(pipeline, PROMPTS[0]))
        next(first[0])
        begun.set()
        second.append("".join(begin(pipeline, PROMPTS[1])))

    thread = threading.Thread(target=worker)
    thread.start()
    begun.wait(30)
    rest = [in_worker(lambda: next(first[0])) for _ in range(2)]
    assert not second
    rest += first[0]
    thread.join(30)
    assert first[0].generation.text == texts[PROMPTS[0]]
    assert first[0].generation.text.endswith("".join(rest))
    assert second == [texts[PROMPTS[1]]]


def test_sync_streaming_endpoints_do_not_share_slots(pipeline, texts):
    """Run the endpoint and each `next` in any thread of a pool, as FastAPI does."""
    pytest.importorskip("starlette")
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    begun = []

    def endpoint(request):
        begun.append(request)
        return StreamingResponse(begin(pipeline, request.query_params["prompt"]))

    app = Starlette(routes=[Route("/", endpoint)])

    async def ask(prompt, on_first_piece=lambda: asyncio.sleep(0)):
        pieces = []

        async def receive():
            await asyncio.Event().wait()

        async def send(message):
            if message.get("body"):
                pieces.append(message["body"])
                if len(pieces) == 1:
                    await on_first_piece()

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "headers": [],
            "query_string": f"prompt={quote(prompt)}".encode(),
        }
        await app(scope, receive, send)
        return b"".join(pieces).decode()

    async def main():
        others = []

        async def begin_others():
            """The worker that began the first stream is idle now, so it begins the second."""
            others.extend(asyncio.create_task(ask(prompt)) for prompt in PROMPTS[1:])
            while len(begun) < len(PROMPTS):
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)

        async with asyncio.timeout(60):
            return [await ask(PROMPTS[0], begin_others), *await asyncio.gather(*others)]

    assert asyncio.run(main()) == [texts[prompt] for prompt in PROMPTS]
    assert all(slot.is_free for slot in pipeline.slots.all)


def test_interleaved_async_streams_on_one_event_loop_do_not_collide(pipeline, texts):
    async def main():
        streams = [pipeline.astream(prompt, NEW_TOKENS, **OPTIONS) for prompt in PROMPTS[:2]]
        pieces = [[], []]
        for _ in range(NEW_TOKENS):
            for stream, read in zip(streams, pieces, strict=True):
                read.append(await anext(stream, ""))
        return ["".join(read) for read in pieces]

    assert asyncio.run(main()) == [texts[prompt] for prompt in PROMPTS[:2]]


def test_request_blocking_the_event_loop_is_rejected(pipeline, texts):
    async def main():
        stream = begin(pipeline, PROMPTS[0])
        pieces = [next(stream)]
        with pytest.raises(SpecEdgeError, match="event loop"):
            await asyncio.create_task(another())
        return "".join([*pieces, *stream])

    async def another():
        return begin(pipeline, PROMPTS[1])

    assert asyncio.run(main()) == texts[PROMPTS[0]]


def test_async_stream_waiting_for_slot_closes_immediately(pipeline):
    async def main():
        holder = begin(pipeline, PROMPTS[0])
        stream = pipeline.astream(PROMPTS[1], 4, **OPTIONS)
        reader = asyncio.create_task(anext(stream, None))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(30):
            stream.cancel()
            assert await reader is None
            await stream.aclose()
        assert next(holder)
        holder.close()

    asyncio.run(main())
    assert in_worker(lambda: pipeline.generate(PROMPTS[1], 4)).text


@pytest.mark.usefixtures("shared_costs")
def test_request_in_a_process_of_one_thread_does_not_wait_for_its_own_stream():
    code = """if True:
        import specedge
        pipeline = specedge.load()
        stream = pipeline.stream("import ", 24)
        next(stream)
        try:
            pipeline.generate("import ")
        except specedge.SpecEdgeError as error:
            print(error)
        assert "".join(stream)
        cycle = [pipeline.stream("import ", 24)]
        cycle.append(cycle)
        del cycle
        assert pipeline.generate("import ").text
    """
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "close" in child.stdout


def test_request_stops_waiting_for_idle_streams(pipeline, monkeypatch):
    monkeypatch.setattr(slots_module, "COLLECTION_DELAY", 0.01)
    monkeypatch.setattr(slots_module, "IDLE_TIMEOUT", 0.01)
    stream = begin(pipeline, PROMPTS[0])
    (error,) = in_threads(lambda: pipeline.generate(PROMPTS[1], 4))
    assert isinstance(error, SpecEdgeError)
    assert next(stream)
    stream.close()


def test_request_keeps_waiting_while_another_stream_is_read(pipeline, monkeypatch):
    monkeypatch.setattr(slots_module, "COLLECTION_DELAY", 0.01)
    monkeypatch.setattr(slots_module, "IDLE_TIMEOUT", 0.01)
    stream = begin(pipeline, PROMPTS[0])
    with pipeline.slots.engine.paused():  # as in a long round
        results = []
        waiting = threading.Thread(target=lambda: results.append(pipeline.generate(PROMPTS[1], 4)))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        stream.cancel()
    waiting.join(30)
    assert results[0].text


def test_garbage_collected_stream_wakes_waiting_request(pipeline):
    stream = begin(pipeline, PROMPTS[0])
    results = []
    waiting = threading.Thread(target=lambda: results.append(pipeline.generate(PROMPTS[1], 4)))
    waiting.start()
    time.sleep(0.05)
    assert not results
    del stream
    waiting.join(30)
    assert results[0].text


def test_each_freed_slot_wakes_a_waiting_request(monkeypatch):
    monkeypatch.setattr(slots_module, "COLLECTION_DELAY", slots_module.IDLE_TIMEOUT)

    class FirstTime:
        def shared(self, prompt, source):
            return 0

    slots = Slots([Slot(FirstTime(), None, None) for _ in range(2)])
    leases = [slots.lease([], wait=True) for _ in range(2)]
    later = []
    waiting = [
        threading.Thread(target=lambda: later.append(slots.lease([], True))) for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    for lease in leases:
        lease.release()
    for thread in waiting:
        thread.join(slots_module.IDLE_TIMEOUT / 3)  # after that, waiting requests look anyway
    assert {lease.slot for lease in later} == {*slots.all}


def test_stream_in_a_reference_cycle_releases_its_slot(pipeline, monkeypatch):
    monkeypatch.setattr(slots_module, "COLLECTION_DELAY", 0.01)
    cycle = [begin(pipeline, PROMPTS[0])]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert in_worker(lambda: pipeline.generate(PROMPTS[1], 4)).text
    finally:
        gc.enable()
