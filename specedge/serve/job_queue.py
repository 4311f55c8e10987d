"""Job queue: generations that run in the pipeline's slots, one thread each, or wait for a slot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field

from specedge.errors import DrafterError, OptionError
from specedge.runtime.requests.stats import Stats
from specedge.runtime.requests.stream import Generation, Stream
from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.runtime.text.detokenizer import FinishReason, TextSpan

from .errors import ApiError, busy_error, logged_error


@dataclass(frozen=True)
class TextPiece:
    """Text piece: its spans, and the ids and log-probabilities of its tokens."""

    spans: list[TextSpan]
    logprobs: list[TokenLogprobs]
    tokens: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the text of the piece."""
        return "".join(span.text for span in self.spans)


JobEvent = TextPiece | Generation  # pieces of a text, then the generation

StreamFactory = Callable[[Callable[[], bool]], Stream]  # its argument is `is_cancelled`


class JobQueue:
    """First-in, first-out queue: one job per slot runs, and up to `max_waiting` more wait."""

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self.num_slots, self.capacity = num_slots, num_slots + max_waiting
        self.num_admitted = self.num_running = 0
        self._slots = asyncio.Semaphore(num_slots)

    @property
    def num_waiting(self) -> int:
        """Return the number of jobs that wait for a slot."""
        return self.num_admitted - self.num_running

    def check(self, count: int) -> None:
        """Raise ApiError if `count` jobs exceed the capacity of the queue."""
        if count > self.capacity:
            raise ApiError(
                f"the request has {count} choices, but this server runs or queues at most "
                f"{self.capacity}",
                "n",
            )

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Admit `count` jobs; raise ApiError if the queue is full."""
        if self.num_admitted + count > self.capacity:
            raise busy_error(
                f"the queue is full: {self.num_admitted} requests are running or waiting"
            )
        self.num_admitted += count
        try:
            yield
        finally:
            self.num_admitted -= count

    async def run(
        self, start: StreamFactory, on_end: Callable[[Stats], None]
    ) -> AsyncGenerator[JobEvent]:
        """Wait for a slot and yield the events of a stream.

        Closing the generator frees the slot after the current round or prompt chunk. `on_end` is
        called with the statistics of the stream, also if it fails or is cancelled.
        """
        async with self._slots:
            thread = _StreamThread(asyncio.get_running_loop(), start)
            thread.start()  # before `try`: a thread that does not start must not be awaited
            self.num_running += 1
            try:
                while True:
                    event = await thread.events.get()
                    if isinstance(event, BaseException):
                        raise event
                    yield event
                    if isinstance(event, Generation):
                        return
            finally:
                thread.cancel()
                try:
                    await thread.ended.wait()  # the stream has released its slot
                finally:
                    if (stats := thread.stats) is not None:
                        on_end(stats)
                    self.num_running -= 1


class _StreamThread:
    """Thread that runs a stream and queues its events without waiting for the consumer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: StreamFactory) -> None:
        self.events: asyncio.Queue[JobEvent | BaseException] = asyncio.Queue()
        self.ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._loop, self._start_stream = loop, start
        self._stream: Stream | None = None
        self._cancelled = False

    def start(self) -> None:
        self._thread.start()

    @property
    def stats(self) -> Stats | None:
        """Return the statistics of the stream so far, or None before it starts."""
        return None if self._stream is None else self._stream.stats

    def cancel(self) -> None:
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def _run(self) -> None:
        try:
            with self._start_stream(lambda: self._cancelled) as self._stream:
                self._read(self._stream)
        except BaseException as error:
            is_client_error = isinstance(error, OptionError | DrafterError)
            self._post(self.events.put_nowait, error if is_client_error else logged_error(error))
        self._post(self.ended.set)

    def _read(self, stream: Stream) -> None:
        num_tokens, num_logprobs, pieces = 0, 0, stream.traced()
        while not self._cancelled:
            spans = next(pieces, None)
            tokens, logprobs = stream.tokens(num_tokens), _new_logprobs(stream, num_logprobs)
            num_logprobs += len(logprobs)
            if spans or logprobs:
                num_tokens += len(tokens)
                self._post(self.events.put_nowait, TextPiece(spans or [], logprobs, tokens))
            if spans is None:
                self._post(self.events.put_nowait, stream.generation)
                return

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)


def _new_logprobs(stream: Stream, start: int) -> list[TokenLogprobs]:
    """Return the log-probabilities from token `start` on, except that of an end token."""
    logprobs = stream.logprobs(start)
    return logprobs[:-1] if stream.finish_reason == FinishReason.END else logprobs


async def merge_events(
    jobs: Sequence[AsyncGenerator[JobEvent]],
) -> AsyncGenerator[tuple[int, JobEvent]]:
    """Yield the events of several jobs as they arrive, each with the index of its job."""
    events: asyncio.Queue[tuple[int, JobEvent | Exception]] = asyncio.Queue()

    async def follow(i: int, job: AsyncGenerator[JobEvent]) -> None:
        try:
            async with aclosing(job):
                async for event in job:
                    events.put_nowait((i, event))
        except Exception as error:
            events.put_nowait((i, error))

    tasks = [asyncio.create_task(follow(i, job)) for i, job in enumerate(jobs)]
    try:
        num_unfinished = len(tasks)
        while num_unfinished:
            i, event = await events.get()
            if isinstance(event, Exception):
                raise event
            yield i, event
            num_unfinished -= isinstance(event, Generation)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
