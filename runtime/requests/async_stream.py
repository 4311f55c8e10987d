"""A stream for `async for`: the passes run in a thread, and the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from .stream import Generation, Stream


class AsyncStream:
    """The pieces of a request's text, as they become certain. Close it or leave it at any time.

    Its thread starts with the first piece that is asked for, and does not wait for pieces to be
    taken: a slow reader keeps the pipeline no longer than a fast one.
    """

    def __init__(self, begin: Callable[[], Stream]) -> None:
        self._begin = begin
        self._work: _Work | None = None
        self._ended = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        if self._ended:
            raise StopAsyncIteration
        if self._work is None:
            self._work = _Work(asyncio.get_running_loop())
            run = threading.Thread(target=self._work.run, args=(self._begin,), daemon=True)
            run.start()
        piece = await self._work.pieces.get()
        if isinstance(piece, str):
            return piece
        self._ended = True
        if piece is None:
            raise StopAsyncIteration
        raise piece

    def cancel(self) -> None:
        """End it after the round that is running, from any thread."""
        if self._work is not None:
            self._work.cancel()

    async def aclose(self) -> None:
        """End it after the round that is running; `generation` holds what there is."""
        self.cancel()
        while self._work is not None and not self._ended:
            self._ended = not isinstance(await self._work.pieces.get(), str)
        self._ended = True

    @property
    def generation(self) -> Generation | None:
        """What there is so far; None before the request has begun."""
        stream = self._work.stream if self._work is not None else None
        return None if stream is None else stream.generation

    def __del__(self) -> None:
        self.cancel()


class _Work:
    """What the thread and the event loop share; it knows nothing of who reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.pieces: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
        self.stream: Stream | None = None
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()
        if self.stream is not None:
            self.stream.cancel()
        else:  # its thread may wait for a slot for long; nobody needs to wait for the thread
            self._put(None)

    def run(self, begin: Callable[[], Stream]) -> None:
        """Put the pieces into the queue; None, or what went wrong, is the last."""
        last: BaseException | None = None
        try:
            self.stream = begin()
            while not self.cancelled.is_set() and (piece := next(self.stream, None)) is not None:
                self._put(piece)
            self.stream.close()
        except BaseException as error:
            last = error
        self._put(last)

    def _put(self, piece: str | BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody reads
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
