"""Reader of request bodies with limits on size, time, and total memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from async_timeout import timeout
from starlette.requests import Request

from .errors import ApiError, busy_error
from .fields import excerpt

DRAIN_FACTOR = 4  # up to this multiple of the size limit, bodies are drained before the error
TOTAL_FACTOR = 16  # maximum of all buffered bodies, as a multiple of the size limit


class BodyReader:
    """Reader of bodies of one type, of at most `max_size` bytes within `timeout` seconds."""

    def __init__(self, max_size: int, timeout: float, media_type: str = "application/json") -> None:
        self._max_size, self._timeout, self._media_type = max_size, timeout, media_type
        self._num_buffered = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncGenerator[bytearray]:
        """Read the body, which counts towards the total until the context exits.

        Raises:
            ApiError: The media type is another one, the body is compressed, or a limit is exceeded.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != self._media_type:
            raise ApiError(
                f"the Content-Type must be {self._media_type}",
                code="invalid_content_type",
                status=415,
            )
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise ApiError(
                f"the Content-Encoding {excerpt(coding)} is not supported; send the body "
                "uncompressed",
                code="unsupported_content_encoding",
                status=415,
                headers={"Accept-Encoding": "identity"},  # RFC 9110, section 12.5.3
            )
        body = bytearray()
        try:
            await self._read(request, body)
            yield body
        finally:
            self._discard(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        size = int(request.headers.get("content-length", "0"))
        try:
            async with timeout(self._timeout):
                if size <= DRAIN_FACTOR * self._max_size and await self._fits(request, body):
                    return
        except asyncio.TimeoutError as error:
            raise ApiError(
                f"the body did not arrive within {self._timeout:g} seconds",
                code="timeout",
                status=408,
                headers={"Connection": "close"},
            ) from error
        raise ApiError(
            f"the body exceeds the limit of {self._max_size} bytes",
            code="body_too_large",
            status=413,
            headers={"Connection": "close"},
        )

    async def _fits(self, request: Request, body: bytearray) -> bool:
        """Read the body; return False if it is too large, after draining part of the rest."""
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= self._max_size:
                self._append(body, part)
                continue
            self._discard(body)
            if size > DRAIN_FACTOR * self._max_size:
                break
        return size <= self._max_size

    def _append(self, body: bytearray, part: bytes) -> None:
        if self._num_buffered + len(part) > TOTAL_FACTOR * self._max_size:
            message = "the bodies of concurrent requests exceed the server's limit"
            raise busy_error(message, Connection="close")
        self._num_buffered += len(part)
        body += part

    def _discard(self, body: bytearray) -> None:
        self._num_buffered -= len(body)
        body.clear()
