"""Job queue: generations that run in the pipeline's slots or wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

from specedge.errors import DrafterError, OptionError
from specedge.runtime.requests.async_stream import AsyncStream
from specedge.runtime.requests.stream import Generation, Stream, TextPiece

from .errors import ApiError, busy_error, logged_error

T = TypeVar("T")
JobEvent = TextPiece | Generation  # pieces of a text, then the generation


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

    async def run_blocking(self, work: Callable[[], T], cancel: Callable[[], None]) -> T:
        """Wait for a slot, run a function in a thread, and return its result.

        If this is cancelled, `cancel` is called, and the slot is free when the function returns.
        """
        async with self._slots:
            self.num_running += 1
            task = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                cancel()
                await asyncio.wait([task])
                raise
            finally:
                self.num_running -= 1

    async def run(
        self,
        begin: Callable[[Callable[[], bool]], Stream],
        on_end: Callable[[Generation, bool], None],
    ) -> AsyncGenerator[JobEvent]:
        """Wait for a slot and yield the events of a stream.

        Closing the generator frees the slot after the current round or prompt chunk. `on_end` is
        called with the generation so far, also if the stream was cancelled, and with True if it
        failed.
        """
        async with self._slots:
            stream, has_failed = AsyncStream(begin), False
            self.num_running += 1
            try:
                while (piece := await stream.next_piece()) is not None:
                    yield piece
                assert stream.generation is not None
                yield stream.generation
            except (GeneratorExit, asyncio.CancelledError):
                raise
            except BaseException as error:
                has_failed = True
                is_client_error = isinstance(error, OptionError | DrafterError)
                raise error if is_client_error else logged_error(error) from None
            finally:
                stream.cancel()
                try:
                    await stream.wait_closed()
                finally:
                    if (generation := stream.generation) is not None:
                        on_end(generation, has_failed)
                    self.num_running -= 1


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
