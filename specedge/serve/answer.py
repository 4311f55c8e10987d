"""One request from its admission to its last byte; a client that goes away ends it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from specedge.errors import DrafterError, OptionError
from specedge.request import Coupling
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.requests.stream import Generation, Stream

from . import errors
from .asking import Asked, Ready, option_error
from .errors import ApiError
from .jobs import Event, Jobs, Piece, merged
from .metrics import GONE, STATUS, Metrics
from .shapes import Choice, Shape
from .tools.parsing import Part

T = TypeVar("T")

LAST_WORDS = 5.0  # seconds that an error may take to be sent behind a part of a stream
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Answer:
    """An ASGI application for one request. `timeout` seconds may pass until its last byte.

    `prepare` gives the prompts' tokens, or says why the pipeline would not take them; it is asked
    when there is room for the request, as it takes long where there is a grammar to compile.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        jobs: Jobs,
        metrics: Metrics,
        shape: Shape,
        asked: Asked,
        prepare: Callable[[], Awaitable[Ready]],
        timeout: float,
    ) -> None:
        self._pipeline, self._jobs, self._metrics = pipeline, jobs, metrics
        self._shape, self._asked, self._prepare = shape, asked, prepare
        self._arrived, self._timeout = time.perf_counter(), timeout
        self._end = asyncio.get_running_loop().time() + timeout
        self._ready = Ready([], {})
        self._choices: list[Choice] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._jobs.admitted(self._asked.num_choices):
            work = self._stream(scope, send) if self._asked.stream else self._whole()
            if found := await _while_connected(receive, work):
                await JSONResponse(found)(scope, receive, send)

    async def _whole(self) -> dict[str, Any]:
        await self._prepared()
        try:
            async with asyncio.timeout_at(self._end), aclosing(self._events()) as events:
                async for index, event in events:
                    choice = self._choices[index]
                    self._add(choice, event, _parts(choice, event))
            return self._shape.whole(self._choices)
        except Exception as error:
            raise self._failed(error) from error

    async def _stream(self, scope: Scope, send: Send) -> None:
        await self._prepared()
        scope[STATUS] = GONE
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async with asyncio.timeout_at(self._end), aclosing(self._lines()) as lines:
                async for line in lines:
                    await _write(send, line)
                await _end(send)
            scope[STATUS] = "200"
        except Exception as error:
            failed = self._failed(error)
            scope[STATUS] = str(failed.status)
            with suppress(TimeoutError):  # who does not read is not waited for
                async with asyncio.timeout(LAST_WORDS):
                    for line in self._shape.failed(failed):
                        await _write(send, line)
                    await _end(send)

    async def _prepared(self) -> None:
        try:
            async with asyncio.timeout_at(self._end):
                self._ready = await self._prepare()
        except Exception as error:
            raise self._failed(error) from error
        calling = self._ready.calling
        self._choices = [
            Choice(None if calling is None else calling.parser())
            for _ in range(self._asked.num_choices)
        ]

    async def _lines(self) -> AsyncGenerator[str]:
        for line in self._shape.begin():
            yield line
        async with aclosing(self._events()) as events:
            async for index, event in events:
                choice = self._choices[index]
                parts = _parts(choice, event)
                piece = _NO_PIECE if isinstance(event, Generation) else event
                lines: list[str] = []
                if parts or piece is not _NO_PIECE:
                    lines += self._shape.piece(index, piece, parts, choice)
                self._add(choice, event, parts)  # before a client takes them, perhaps slowly
                if isinstance(event, Generation):
                    lines += self._shape.end(index, choice)
                for line in lines:
                    yield line
        for line in self._shape.finish(self._choices):
            yield line

    def _events(self) -> AsyncGenerator[tuple[int, Event]]:
        """Run all choices, each as a job. Those of a prompt have seeds in a row, or with Gumbel
        coupling one seed and numbers in a row.
        """
        options = dict(self._ready.options)
        if options.get("coupling") == Coupling.GUMBEL:
            options.setdefault("seed", secrets.randbits(32))
        prompts = [prompt for prompt in self._ready.prompts for _ in range(self._asked.n)]
        jobs = (
            partial(self._begin, i % self._asked.n, prompt, options)
            for i, prompt in enumerate(prompts)
        )
        return merged([self._jobs.run(begin, self._metrics.ended) for begin in jobs])

    def _begin(self, place: int, prompt: list[int], options: dict[str, Any]) -> Stream:
        own: dict[str, Any] = {}
        if options.get("coupling") == Coupling.GUMBEL:
            own["choice"] = place
        elif (seed := options.get("seed")) is not None:
            own["seed"] = (seed + place) % 2**64
        return self._pipeline.stream(prompt, shown=self._ready.shown, **options | own)

    def _add(self, choice: Choice, event: Event, parts: list[Part]) -> None:
        if isinstance(event, Generation):
            choice.add(parts)
            choice.done = event
            self._metrics.whole(event.stats, choice.first)
            return
        if choice.first is None:
            choice.first = time.perf_counter()
            self._metrics.first.observe(choice.first - self._arrived)
        choice.add(parts, event.logprobs)

    def _failed(self, error: Exception) -> ApiError:
        if isinstance(error, TimeoutError):
            return ApiError(
                f"the request took longer than the {self._timeout:g} seconds that this server "
                "allows, waiting included",
                code="timeout",
                status=504,
                headers={"x-should-retry": "false"},  # OpenAI's clients ask again after a 504
            )
        if isinstance(error, OptionError):
            return option_error(error, self._asked)
        if isinstance(error, DrafterError):
            return ApiError(str(error), "speculative.drafter", "invalid_value")
        return errors.failed(error)


_NO_PIECE = Piece([], [])  # what comes at the end of a text


def _parts(choice: Choice, event: Event) -> list[Part]:
    """What an event makes certain."""
    return choice.last_parts() if isinstance(event, Generation) else choice.parts(event)


async def _write(send: Send, line: str) -> None:
    await send({"type": "http.response.body", "body": line.encode(), "more_body": True})


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work gives; None, and an end to it, if the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
