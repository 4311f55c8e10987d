"""Asynchronous stream: passes run in a thread, and the event loop stays free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from .stream import Generation, Stream


class AsyncStream:
    """Asynchronous iterator over the pieces of a request's text. It may be abandoned at any time.

    Its thread starts when the first piece is awaited and does not wait for pieces to be read: a
    slow reader holds the pipeline no longer than a fast one.
    """

    def __init__(self, begin: Callable[[], Stream]) -> None:
        self._begin = begin
        self._worker: _StreamWorker | None = None
        self._has_ended = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        if self._has_ended:
            raise StopAsyncIteration
        if self._worker is None:
            self._worker = _StreamWorker(asyncio.get_running_loop())
            thread = threading.Thread(target=self._worker.run, args=(self._begin,), daemon=True)
            thread.start()
        piece = await self._worker.pieces.get()
        if isinstance(piece, str):
            return piece
        self._has_ended = True
        if piece is None:
            raise StopAsyncIteration
        raise piece

    def cancel(self) -> None:
        """Stop after the running round; callable from any thread."""
        if self._worker is not None:
            self._worker.cancel()

    async def aclose(self) -> None:
        """Stop after the running round; `generation` has the result so far."""
        self.cancel()
        while self._worker is not None and not self._has_ended:
            self._has_ended = not isinstance(await self._worker.pieces.get(), str)
        self._has_ended = True

    @property
    def generation(self) -> Generation | None:
        """Result so far; None before the request has begun."""
        stream = self._worker.stream if self._worker is not None else None
        return None if stream is None else stream.generation

    def __del__(self) -> None:
        self.cancel()


class _StreamWorker:
    """State shared by the thread and the event loop, without a reference to the reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.pieces: asyncio.Queue[str | BaseException | None] = asyncio.Queue()
        self.stream: Stream | None = None
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()
        if self.stream is not None:
            self.stream.cancel()
        else:  # its thread may wait for a slot for long; there is no need to wait for it
            self._put(None)

    def run(self, begin: Callable[[], Stream]) -> None:
        """Put the pieces into the queue, then None or an exception."""
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
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
