"""Asynchronous stream: passes run in a thread, and the event loop stays free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from .stream import Generation, Stream, TextPiece


class AsyncStream:
    """Asynchronous iterator over the pieces of a request's text. It may be abandoned at any time.

    Its thread starts when the first piece is awaited and does not wait for pieces to be read: a
    slow reader holds the pipeline no longer than a fast one.

    Args:
        begin: Function that begins the stream, in the thread. Its argument returns True if the
            stream is cancelled.
    """

    def __init__(self, begin: Callable[[Callable[[], bool]], Stream]) -> None:
        self._begin = begin
        self._worker: _StreamWorker | None = None
        self._has_ended = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        while (piece := await self.next_piece()) is not None:
            if piece.spans:
                return piece.text
        raise StopAsyncIteration

    async def next_piece(self) -> TextPiece | None:
        """Return the next of `Stream.pieces`; None at the end."""
        if self._has_ended:
            return None
        if self._worker is None:
            worker = _StreamWorker(asyncio.get_running_loop())
            threading.Thread(target=worker.run, args=(self._begin,), daemon=True).start()
            self._worker = worker
        piece = await self._worker.pieces.get()
        self._has_ended = not isinstance(piece, TextPiece)
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def cancel(self) -> None:
        """Stop after the running round; callable from any thread."""
        if self._worker is not None:
            self._worker.cancel()

    async def aclose(self) -> None:
        """Stop after the running round; `generation` has the result so far."""
        self.cancel()
        while self._worker is not None and not self._has_ended:
            self._has_ended = not isinstance(await self._worker.pieces.get(), TextPiece)
        self._has_ended = True

    async def wait_closed(self) -> None:
        """Wait until the stream has ended or stopped, and its slot is free."""
        if self._worker is not None:
            await self._worker.ended.wait()

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
        self.pieces: asyncio.Queue[TextPiece | BaseException | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.stream: Stream | None = None
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()
        if self.stream is not None:
            self.stream.cancel()
        else:  # its thread may wait for a slot for long; there is no need to wait for it
            self._post(self.pieces.put_nowait, None)

    def run(self, begin: Callable[[Callable[[], bool]], Stream]) -> None:
        """Put the pieces into the queue, then None or an exception."""
        last: BaseException | None = None
        try:
            with begin(self.cancelled.is_set) as self.stream:
                pieces = self.stream.pieces()
                while not self.cancelled.is_set() and (piece := next(pieces, None)) is not None:
                    self._post(self.pieces.put_nowait, piece)
        except BaseException as error:
            last = error
        self._post(self.pieces.put_nowait, last)
        self._post(self.ended.set)

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function, *arguments)
