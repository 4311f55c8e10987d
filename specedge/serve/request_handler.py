"""Execution of a request, from admission to the last byte or the client's disconnect."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

from async_timeout import timeout, timeout_at
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from specedge.errors import DrafterError, OptionError
from specedge.request import Coupling
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.requests.stream import Generation, Stream, TextPiece
from specedge.runtime.text.detokenizer import FinishReason

from . import errors
from .choices import ReasoningCounter, ResponseChoice, ResponseShaper
from .errors import ApiError
from .job_queue import JobEvent, JobQueue, merge_events
from .metrics import DISCONNECTED, STATUS, ServerMetrics
from .middleware import REPORT, shutdown_error
from .output_parser import AnswerPart
from .requests import ParsedRequest, PreparedRequest, option_error

T = TypeVar("T")

ERROR_TIMEOUT = 5.0  # seconds to send an error within a stream
SAMPLED_HEADER = "x-specedge-sampled-tokens"  # number of reused sampled tokens in the prompt
IGNORED_HEADER = "x-specedge-ignored"  # names of unknown fields of the request
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class RequestHandler:
    """ASGI application for a single request.

    Args:
        pipeline: Pipeline that generates the text.
        jobs: Job queue of the server.
        metrics: Metrics of the server.
        shaper: Response shaper of the endpoint.
        request: Parsed request.
        prepare: Function that tokenizes the prompts and compiles grammars. It is called after
            admission, because compilation is slow.
        timeout: Maximum number of seconds until the last byte.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        jobs: JobQueue,
        metrics: ServerMetrics,
        shaper: ResponseShaper,
        request: ParsedRequest,
        prepare: Callable[[], Awaitable[PreparedRequest]],
        timeout: float,
    ) -> None:
        self._pipeline, self._jobs, self._metrics = pipeline, jobs, metrics
        self._shaper, self._request, self._prepare = shaper, request, prepare
        self._arrival, self._timeout = time.perf_counter(), timeout
        self._deadline = asyncio.get_running_loop().time() + timeout
        self._prepared = PreparedRequest([], {})
        self._choices: list[ResponseChoice] = []
        self._has_begun = False  # response headers of a stream have been sent
        names = ", ".join(request.ignored)
        self._headers = {IGNORED_HEADER: names} if names else {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._jobs.admitted(self._request.num_choices):
            work = self._stream(scope, send) if self._request.stream else self._respond()
            try:
                body = await while_connected(receive, work)
            except asyncio.CancelledError:
                if not self._has_begun:
                    raise
                await self._send_error(scope, send, shutdown_error())
                return
            finally:
                scope[REPORT] = _report(self._choices)
                self._keep_tokens()
            if body:
                await JSONResponse(body, headers=self._headers)(scope, receive, send)

    async def _respond(self) -> dict[str, Any]:
        await self._prepare_prompts()
        try:
            async with timeout_at(self._deadline), aclosing(self._events()) as events:
                async for index, event in events:
                    choice = self._choices[index]
                    self._add(choice, event, _parse(choice, event))
            return self._shaper.body(self._choices)
        except Exception as error:
            raise self._api_error(error) from error

    async def _stream(self, scope: Scope, send: Send) -> None:
        await self._prepare_prompts()
        scope[STATUS] = DISCONNECTED
        extra = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        headers = [*_STREAM_HEADERS, *extra]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._has_begun = True
        try:
            async with timeout_at(self._deadline), aclosing(self._lines()) as lines:
                async for line in lines:
                    await _write(send, line)
                await _end(send)
            scope[STATUS] = "200"
        except Exception as error:
            await self._send_error(scope, send, self._api_error(error))

    async def _send_error(self, scope: Scope, send: Send, error: ApiError) -> None:
        """End a stream with an error; give up if the client does not read it."""
        scope[STATUS] = str(error.status)
        with suppress(asyncio.TimeoutError):
            async with timeout(ERROR_TIMEOUT):
                for line in self._shaper.fail(error):
                    await _write(send, line)
                await _end(send)

    async def _prepare_prompts(self) -> None:
        try:
            async with timeout_at(self._deadline):
                self._prepared = await self._prepare()
        except Exception as error:
            raise self._api_error(error) from error
        if self._prepared.num_sampled:
            self._headers[SAMPLED_HEADER] = str(self._prepared.num_sampled)
        visible, tokenizer = self._prepared.visible_tokens, self._pipeline.tokenizer
        self._choices = [
            ResponseChoice(
                self._prepared.parser,
                prompt_tokens=prompt,
                visible_tokens=visible,
                decoder_tokens=self._prepared.decoder_tokens,
            )
            for prompt in self._prepared.prompts
            for _ in range(self._request.num_choices_each)
        ]
        for choice in self._choices if self._prepared.has_reasoning else ():
            detokenizer, parser = choice.detokenizer(tokenizer), choice.new_parser()
            choice.reasoning_counter = ReasoningCounter(detokenizer, parser)

    def _keep_tokens(self) -> None:
        """Store the sampled tokens, including those of cancelled texts."""
        for choice in self._choices if self._request.sampled is not None else ():
            tokens = choice.tokens if choice.finished is None else choice.finished.tokens
            self._request.sampled.add([*choice.prompt_tokens, *tokens])  # type: ignore[union-attr]

    async def _lines(self) -> AsyncGenerator[str]:
        for line in self._shaper.begin(self._choices):
            yield line
        async with aclosing(self._events()) as events:
            async for index, event in events:
                choice = self._choices[index]
                parts = _parse(choice, event)
                piece = TextPiece([], []) if isinstance(event, Generation) else event
                lines: list[str] = []
                if any(parts) or piece is event:
                    lines += self._shaper.piece(index, piece, parts, choice)
                self._add(choice, event, parts)  # before yielding, since clients may be slow
                if isinstance(event, Generation):
                    lines += self._shaper.end(index, choice)
                for line in lines:
                    yield line
        for line in self._shaper.finish(self._choices):
            yield line

    async def _events(self) -> AsyncGenerator[tuple[int, JobEvent]]:
        """Run each choice as a job; yield no text if the request only scores the prompt.

        The choices of a prompt have consecutive seeds, or with Gumbel coupling the same seed and
        consecutive values of `choice`.
        """
        options = dict(self._prepared.options)
        if options.get("coupling") == Coupling.GUMBEL:
            options.setdefault("seed", secrets.randbits(32))
        queued = time.perf_counter()
        starts = (partial(self._start, i, options, queued) for i in range(len(self._choices)))
        jobs = [self._jobs.run(start, self._metrics.add_ended) for start in starts]
        async with aclosing(merge_events(jobs)) as events:
            async for index, event in events:
                if not self._request.score_only:
                    yield index, event
                elif isinstance(event, Generation):
                    yield index, _without_text(event)

    def _start(
        self, index: int, options: dict[str, Any], queued: float, is_cancelled: Callable[[], bool]
    ) -> Stream:
        """Score the prompt if requested, and start the stream; runs in the thread of the job."""
        self._metrics.queue_time.observe(time.perf_counter() - queued)
        choice, rules = self._choices[index], self._request.rules
        if (num_logprobs := self._request.prompt_logprobs) is not None:
            prompt = choice.prompt_tokens
            choice.prompt_logprobs = self._pipeline.score(prompt, num_logprobs, is_cancelled)
        choice_index = index % self._request.num_choices_each
        choice_options: dict[str, Any] = {}
        if options.get("coupling") == Coupling.GUMBEL:
            choice_options["choice"] = choice_index
        elif (seed := options.get("seed")) is not None:
            choice_options["seed"] = (seed + choice_index) % 2**64
        return self._pipeline.stream(
            choice.prompt_tokens,
            shown=self._prepared.visible_tokens,
            stop_tokens=rules.stop_tokens,
            include_stop=rules.include_stop,
            **options | choice_options,
        )

    def _add(self, choice: ResponseChoice, event: JobEvent, parts: list[AnswerPart]) -> None:
        if isinstance(event, Generation):
            choice.add(parts)
            choice.finished = event
            choice.count_reasoning(event.tokens[choice.num_tokens :])
            self._metrics.add_completed(event, choice)
            return
        self._metrics.add_piece(event, choice, self._arrival)
        choice.add(parts, event.logprobs)
        choice.count_reasoning(event.tokens)
        choice.tokens += event.tokens

    def _api_error(self, error: Exception) -> ApiError:
        if isinstance(error, asyncio.TimeoutError):
            return errors.timeout_error(self._timeout)
        if isinstance(error, OptionError):
            return option_error(error, self._request)
        if isinstance(error, DrafterError):
            return ApiError(str(error), "speculative.drafter", "invalid_value")
        return errors.logged_error(error)


def _report(choices: list[ResponseChoice]) -> str:
    """Return token counts and throughput of a request, for the access log."""
    stats = [choice.finished.stats for choice in choices if choice.finished is not None]
    if not stats:
        return ""
    prompt, new = sum(s.num_prompt_tokens for s in stats), sum(s.num_new_tokens for s in stats)
    reused, seconds = sum(s.num_reused_tokens for s in stats), sum(s.decode_seconds for s in stats)
    tested, accepted = sum(s.num_tested for s in stats), sum(s.num_accepted for s in stats)
    speed = f", {new / seconds:.1f} tokens/s" if seconds else ""
    rate = f", acceptance rate {accepted / tested:.2f}" if tested else ""
    return f", {prompt} prompt tokens ({reused} cached), {new} new{speed}{rate}"


def _without_text(generation: Generation) -> Generation:
    stats = dataclasses.replace(generation.stats, num_new_tokens=0)
    reason = FinishReason.LENGTH
    return dataclasses.replace(generation, text="", tokens=[], finish_reason=reason, stats=stats)


def _parse(choice: ResponseChoice, event: JobEvent) -> list[AnswerPart]:
    """Return the parts completed by an event."""
    parser = choice.parser
    return parser.end() if isinstance(event, Generation) else parser.feed(event.text)


async def _write(send: Send, line: str) -> None:
    await send({"type": "http.response.body", "body": line.encode(), "more_body": True})


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or cancel it and return None if the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
