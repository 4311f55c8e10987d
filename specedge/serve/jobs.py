"""Requests that run in the pipeline's slots, each in a thread, and those that wait for a slot."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass

from specedge.errors import DrafterError, OptionError
from specedge.runtime.requests.stats import Stats
from specedge.runtime.requests.stream import Generation, Stream
from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.runtime.text.assembler import FinishReason
from specedge.runtime.text.spans import Span

from .errors import ApiError, busy, failed


@dataclass(frozen=True)
class Piece:
    """Text that has become certain, by token, and the log-probabilities of the tokens that came
    with it.
    """

    spans: list[Span]
    logprobs: list[TokenLogprobs]

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


Event = Piece | Generation  # pieces of a text, and then what became of it


class Jobs:
    """At most one job a slot runs, in the order of their arrival; `max_waiting` more may wait."""

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self.num_slots, self.most = num_slots, num_slots + max_waiting
        self.num_admitted = self.num_running = 0
        self._slots = asyncio.Semaphore(num_slots)

    @property
    def num_waiting(self) -> int:
        return self.num_admitted - self.num_running

    def check(self, count: int) -> None:
        """ApiError where there never can be room for so many jobs."""
        if count > self.most:
            raise ApiError(
                f"the request asks for {count} texts, this server takes {self.most} at a time", "n"
            )

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Room for so many jobs; ApiError where there is none now."""
        if self.num_admitted + count > self.most:
            raise busy(
                f"{self.num_admitted} texts are running or waiting, the most that this server takes"
            )
        self.num_admitted += count
        try:
            yield
        finally:
            self.num_admitted -= count

    async def run(
        self, begin: Callable[[], Stream], ended: Callable[[Stats], None]
    ) -> AsyncGenerator[Event]:
        """Wait for a slot, and give what a stream gives. Closed, it frees the slot after the round
        that runs. However it ends, `ended` is told what the stream did.
        """
        async with self._slots:
            work = _Work(asyncio.get_running_loop(), begin)
            work.thread.start()  # where there is no thread to be had, there is none to wait for
            self.num_running += 1
            try:
                while True:
                    event = await work.events.get()
                    if isinstance(event, BaseException):
                        raise event
                    yield event
                    if isinstance(event, Generation):
                        return
            finally:
                work.cancel()
                try:
                    await work.ended.wait()  # now the slot is free
                finally:
                    if (stats := work.stats) is not None:
                        ended(stats)
                    self.num_running -= 1


class _Work:
    """A thread that runs a stream and does not wait for its pieces to be taken."""

    def __init__(self, loop: asyncio.AbstractEventLoop, begin: Callable[[], Stream]) -> None:
        self.events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self._loop, self._begin = loop, begin
        self._stream: Stream | None = None
        self._cancelled = False

    @property
    def stats(self) -> Stats | None:
        """What the stream did so far, if it began."""
        return None if self._stream is None else self._stream.stats

    def cancel(self) -> None:
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def _run(self) -> None:
        try:
            with self._begin() as self._stream:
                self._read(self._stream)
        except BaseException as error:
            is_clients = isinstance(error, OptionError | DrafterError)
            self._tell(self.events.put_nowait, error if is_clients else failed(error))
        self._tell(self.ended.set)

    def _read(self, stream: Stream) -> None:
        num_told, pieces = 0, stream.traced()
        while not self._cancelled:
            spans = next(pieces, None)
            found = _logprobs(stream, num_told)
            num_told += len(found)
            if spans or found:
                self._tell(self.events.put_nowait, Piece(spans or [], found))
            if spans is None:
                self._tell(self.events.put_nowait, stream.generation)
                return

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody listens
            self._loop.call_soon_threadsafe(function, *arguments)


def _logprobs(stream: Stream, start: int) -> list[TokenLogprobs]:
    """Those from a token on, but an end token's, which has no text."""
    found = stream.logprobs(start)
    return found[:-1] if stream.finish_reason == FinishReason.END else found


async def merged(runs: Sequence[AsyncGenerator[Event]]) -> AsyncGenerator[tuple[int, Event]]:
    """The events of several jobs as they come, each with its job's number."""
    events: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()

    async def follow(i: int, run: AsyncGenerator[Event]) -> None:
        try:
            async with aclosing(run):
                async for event in run:
                    events.put_nowait((i, event))
        except Exception as error:
            events.put_nowait((i, error))

    tasks = [asyncio.create_task(follow(i, run)) for i, run in enumerate(runs)]
    try:
        left = len(tasks)
        while left:
            i, event = await events.get()
            if isinstance(event, Exception):
                raise event
            yield i, event
            left -= isinstance(event, Generation)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
