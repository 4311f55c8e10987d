"""The ASGI application: paths, who may ask, and how much at a time."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specedge.runtime.pipeline import Pipeline
from specedge.strict_json import JsonError, parse

from . import asking
from .answer import Answer
from .asking import Asked, Ready
from .errors import ApiError, failed
from .jobs import Jobs
from .metrics import Metrics
from .response_shape import Response as ResponseShape
from .shapes import Chat, Completion, Shape
from .tokens import Tokens

# The page to try it in a browser: it can load and ask nothing but what this server has.
FILES = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
OPEN = ("/health", *FILES)  # what needs no key
DRAINED = 4  # times the limit of a body
Reads = Callable[[object, int], Asked]
Shapes = Callable[[str, Asked, Tokens], Shape]


@dataclass(frozen=True)
class Settings:
    """How a server treats its clients.

    model: the name of the pair, by default its target's
    max_waiting: texts that may wait for a slot
    timeout: seconds for a request, from its arrival to its last byte
    body_timeout: seconds for a request's body to come
    max_body: bytes of it
    api_key: what a client must send, if anything
    origins: of web pages that may ask from a browser
    """

    model: str | None = None
    max_waiting: int = 32
    timeout: float = 600.0
    body_timeout: float = 30.0
    max_body: int = 8 * 2**20
    api_key: str | None = None
    origins: tuple[str, ...] = ()


def make_app(pipeline: Pipeline, settings: Settings | None = None) -> Starlette:
    """The application of a pipeline, whose slots are how many requests run at a time."""
    return _Server(pipeline, settings or Settings()).app()


class _Server:
    def __init__(self, pipeline: Pipeline, settings: Settings) -> None:
        self._pipeline, self._settings = pipeline, settings
        self._model = settings.model or pipeline.bundle.target.source.id
        self._jobs = Jobs(len(pipeline.slots.all), settings.max_waiting)
        self._metrics = Metrics(self._jobs)
        self._tokens = Tokens(pipeline.tokenizer)

    def app(self) -> Starlette:
        paths: tuple[tuple[str, Reads, Shapes], ...] = (
            ("/v1/chat/completions", asking.chat, Chat),
            ("/v1/completions", asking.completions, Completion),
            ("/v1/responses", asking.responses, ResponseShape),
        )
        routes = [
            Route(path, self._generating(reads, shape), methods=["POST"])
            for path, reads, shape in paths
        ]
        routes += [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/health", self._health),
            *(Route(path, _file(path)) for path in FILES),
            Route("/metrics", self._measured),
        ]
        known = frozenset(route.path for route in routes)
        middleware = [Middleware(_Counted, metrics=self._metrics, known=known)]
        if self._settings.origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(self._settings.origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                )
            )
        middleware.append(Middleware(_Keyed, key=self._settings.api_key))
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={
                ApiError: _said,
                HTTPException: _said,
                ClientDisconnect: _said,
                Exception: _said,
            },
        )

    def _generating(self, reads: Reads, shape: Shapes) -> Callable[[Request], Any]:
        async def generate(request: Request) -> Answer:
            body = await self._body(request)
            asked, ready = await asyncio.to_thread(self._asked, body, reads)
            return Answer(
                self._pipeline,
                self._jobs,
                self._metrics,
                shape(self._model, asked, self._tokens),
                asked,
                ready,
                self._settings.timeout,
            )

        return generate

    def _asked(self, body: bytes, reads: Reads) -> tuple[Asked, Ready]:
        """What a body asks for, and what the pipeline is asked."""
        try:
            facts = parse(body.decode())
        except (JsonError, UnicodeDecodeError) as error:
            raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error
        named = facts.get("model") if isinstance(facts, dict) else None
        asked = reads(facts, self._pipeline.bundle.context_length)
        if named not in (None, self._model):
            raise self._unknown(named)
        self._jobs.check(asked.num_choices)  # before so many prompts are read
        return asked, asking.ready(self._pipeline, asked)

    async def _body(self, request: Request) -> bytes:
        """The body, if it is JSON of a size and comes in time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                "the Content-Type must be application/json", code="invalid_content_type", status=415
            )
        size, most = int(request.headers.get("content-length", "0")), self._settings.max_body
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                if size <= DRAINED * most and (found := await _read(request, most)) is not None:
                    return found
        except TimeoutError as error:
            raise ApiError(
                f"the body did not come within {self._settings.body_timeout:g} seconds",
                code="timeout",
                status=408,
                headers={"Connection": "close"},
            ) from error
        raise ApiError(
            f"the body has more than {most} bytes, the limit",
            code="body_too_large",
            status=413,
            headers={"Connection": "close"},
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self._model:
            raise self._unknown(name)
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        bundle = self._pipeline.bundle
        return {
            "chat": bundle.chat_template is not None,
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "specedge",
            "context_length": bundle.context_length,
            "target": bundle.target.source.id,
            "draft": bundle.draft.source.id,
        }

    def _unknown(self, name: object) -> ApiError:
        said = f"there is no model {str(name)[:100]!r} here, only {self._model!r}"
        return ApiError(said, "model", "model_not_found", 404)

    async def _health(self, request: Request) -> Response:
        jobs = self._jobs
        return JSONResponse(
            {
                "status": "ok",
                "slots": jobs.num_slots,
                "running": jobs.num_running,
                "waiting": jobs.num_waiting,
            }
        )

    async def _measured(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")


def _file(path: str) -> Callable[[Request], Any]:
    """What serves one of the page's files."""
    name = FILES[path]

    async def serve(request: Request) -> Response:
        text = files(__package__).joinpath(name).read_text("utf-8")
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
        return Response(text, headers=PAGE_HEADERS, media_type=kind[name.rpartition(".")[2]])

    return serve


async def _read(request: Request, most: int) -> bytes | None:
    """A body of at most so many bytes. Somewhat more is read, too, so that its sender is there to
    hear that it was too much.
    """
    found, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            found += part
        elif size > DRAINED * most:
            break
    return bytes(found) if size <= most else None


async def _said(request: Request, error: Exception) -> Response:
    """Any error in OpenAI's shape."""
    if isinstance(error, HTTPException):
        known = {404: "there is no such path", 405: "this path takes another method"}
        said = known.get(error.status_code, error.detail)
        error = ApiError(said, code="not_found", status=error.status_code)
    found = failed(error)
    return JSONResponse(found.body, found.status, found.headers)


class _Keyed:
    """Lets nobody in without the key, if there is one."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._knows(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            status=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return self._key is None or hmac.compare_digest(given, b"Bearer " + self._key.encode())


class _Counted:
    """Counts requests by their path, if it is a known one, and their status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, known: Collection[str]) -> None:
        self._app, self._metrics, self._known = app, metrics, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        statuses: list[int] = []

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            if scope["type"] == "http":
                path = scope["path"] if scope["path"] in self._known else "other"
                status = str(statuses[0]) if statuses else "gone"
                self._metrics.requests.labels(path, status).inc()
