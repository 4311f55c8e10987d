"""The ASGI application: paths, who may ask, and what reads requests."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specedge.runtime.requests.pipeline import Pipeline
from specedge.sampling_options import SamplingFilters
from specedge.strict_json import JsonError, parse

from . import asking
from .answer import Answer
from .asking import Asked
from .bodies import Bodies
from .errors import ApiError, shown_to_client
from .fields import DEFAULTS
from .guards import LOOPBACK, Keyed, Named, check_host
from .jobs import Jobs
from .metrics import GONE, STATUS, Metrics
from .response_shape import Response as ResponseShape
from .shapes import Chat, Completion, Shape
from .tokens import Tokens

T = TypeVar("T")

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
THREADS = 2  # that read requests
GENERATION_CONFIGS = ("auto", "none")
Reads = Callable[[object, int, Mapping[str, Any]], Asked]
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
    generation_config: "auto" applies the sampling that the model's authors recommend where a
        request leaves its fields out, "none" the defaults of OpenAI's API
    hosts: allowed `Host` names, of any port; by default any with a key, else those of loopback
    """

    model: str | None = None
    max_waiting: int = 32
    timeout: float = 600.0
    body_timeout: float = 30.0
    max_body: int = 2 * 2**20
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    generation_config: str = "auto"

    def __post_init__(self) -> None:
        if self.generation_config not in GENERATION_CONFIGS:
            raise ValueError(
                f"generation_config must be {' or '.join(GENERATION_CONFIGS)}, "
                f"got {self.generation_config!r}"
            )
        for host in self.hosts:
            check_host(host)


def model_defaults(sampling: SamplingFilters) -> dict[str, float]:
    """Return the options that a model's recommended sampling sets, none where it is greedy."""
    if sampling.greedy:  # as of checkpoints without a recommendation
        return {}
    neutral = SamplingFilters()
    options: dict[str, float] = dataclasses.asdict(sampling)
    return {name: value for name, value in options.items() if value != getattr(neutral, name)}


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
        self._defaults: dict[str, float] = dict(DEFAULTS)
        if settings.generation_config == "auto":
            self._defaults |= model_defaults(pipeline.bundle.default_sampling)
        self._bodies = Bodies(self._settings.max_body, self._settings.body_timeout)
        # Who waits for a grammar keeps no thread from another.
        self._readers, self._compilers = map(ThreadPoolExecutor, (THREADS, self._jobs.most))

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
        settings = self._settings
        key, origins = settings.api_key, settings.origins
        hosts = settings.hosts or (() if key else LOOPBACK)
        middleware = [
            Middleware(_Counted, metrics=self._metrics, known=known),
            Middleware(Named, hosts=hosts, origins=origins, any_origin=key is not None),
        ]
        if origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                )
            )
        middleware.append(Middleware(Keyed, key=key, open_paths=OPEN))
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
            async with self._bodies.of(request) as body:
                asked = await _in(self._readers, partial(self._asked, body, reads))
            pool = self._compilers if asked.has_grammar else self._readers
            return Answer(
                self._pipeline,
                self._jobs,
                self._metrics,
                shape(self._model, asked, self._tokens),
                asked,
                partial(_in, pool, partial(asking.ready, self._pipeline, asked)),
                self._settings.timeout,
            )

        return generate

    def _asked(self, body: bytearray, reads: Reads) -> Asked:
        """What a body asks for."""
        facts = _parsed(body)
        named = facts.get("model") if isinstance(facts, dict) else None
        asked = reads(facts, self._pipeline.bundle.context_length, self._defaults)
        if named not in (None, self._model):
            raise self._unknown(named)
        self._jobs.check(asked.num_choices)  # before so many prompts are read
        return asked

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
            "default_sampling": self._defaults,
            "target": bundle.target.source.id,
            "draft": bundle.draft and bundle.draft.source.id,
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


def _parsed(body: bytearray) -> Any:
    """The JSON of a body, which can be written as JSON again: some of it is repeated."""
    try:
        facts = parse(body.decode())
        said = _unrepeatable(facts)
    except (JsonError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if said is not None:
        raise ApiError(f"the body is not valid JSON: {said}", code="invalid_json")
    return facts


def _unrepeatable(facts: Any) -> str | None:
    """Why values cannot be written as JSON that anyone reads."""
    try:
        json.dumps(facts, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "it has half of a surrogate pair, which is no character"
    except ValueError:  # 1e999 is read as infinite
        return "it has a number that is too large"
    except RecursionError:
        return "it is nested too deeply"
    return None


async def _in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _file(path: str) -> Callable[[Request], Any]:
    """What serves one of the page's files."""
    name = FILES[path]

    async def serve(request: Request) -> Response:
        text = files(__package__).joinpath(name).read_text("utf-8")
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
        return Response(text, headers=PAGE_HEADERS, media_type=kind[name.rpartition(".")[2]])

    return serve


async def _said(request: Request, error: Exception) -> Response:
    """Return any error in OpenAI's format."""
    if isinstance(error, ClientDisconnect):
        request.scope[STATUS] = GONE
    if isinstance(error, HTTPException):
        known = {404: "there is no such path", 405: "this path takes another method"}
        said = known.get(error.status_code, error.detail)
        error = ApiError(said, code="not_found", status=error.status_code)
    found = shown_to_client(error)  # the ASGI server logs what is not expected
    return JSONResponse(found.body, found.status, found.headers)


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
                status = scope.get(STATUS) or (str(statuses[0]) if statuses else GONE)
                self._metrics.requests.labels(path, status).inc()
