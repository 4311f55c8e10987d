"""The bodies of requests: each has a size and a time to come, and all together have a size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.requests import Request

from .errors import ApiError, busy

DRAINED = 4  # times the limit of a body
TOGETHER = 16  # times that limit: what bodies may hold until they are understood


class Bodies:
    """Reads bodies of `most` bytes that come within some seconds."""

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._held = 0

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncGenerator[bytearray]:
        """The body, if it is JSON of a size and comes in time. It counts until this is left."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                "the Content-Type must be application/json", code="invalid_content_type", status=415
            )
        body = bytearray()
        try:
            await self._read(request, body)
            yield body
        finally:
            self._drop(body)

    async def _read(self, request: Request, body: bytearray) -> None:
        size = int(request.headers.get("content-length", "0"))
        try:
            async with asyncio.timeout(self._seconds):
                if size <= DRAINED * self._most and await self._holds(request, body):
                    return
        except TimeoutError as error:
            raise ApiError(
                f"the body did not come within {self._seconds:g} seconds",
                code="timeout",
                status=408,
                headers={"Connection": "close"},
            ) from error
        raise ApiError(
            f"the body has more than {self._most} bytes, the limit",
            code="body_too_large",
            status=413,
            headers={"Connection": "close"},
        )

    async def _holds(self, request: Request, body: bytearray) -> bool:
        """Whether the whole body is of the size. Somewhat more is read, too, so that its sender is
        there to hear that it was too much.
        """
        size = 0
        async for part in request.stream():
            size += len(part)
            if size <= self._most:
                self._take(body, part)
                continue
            self._drop(body)
            if size > DRAINED * self._most:
                break
        return size <= self._most

    def _take(self, body: bytearray, part: bytes) -> None:
        if self._held + len(part) > TOGETHER * self._most:
            said = "other requests' bodies fill the memory that this server has for them"
            raise busy(said, Connection="close")
        self._held += len(part)
        body += part

    def _drop(self, body: bytearray) -> None:
        self._held -= len(body)
        body.clear()
