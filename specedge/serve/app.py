"""ASGI application: routes, settings and middleware."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from tokenizers import Tokenizer

from specedge.runtime.audio.transcriber import Transcriber
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.text.tokenizer import decode
from specedge.sampling_options import RecommendedSampling
from specedge.strict_json import JsonError, parse
from specedge.version import __version__

from . import anthropic, requests
from .body_reader import BodyReader
from .chat_shapes import ChatShaper, CompletionShaper
from .choices import ResponseShaper
from .errors import ApiError, client_error
from .fields import DEFAULTS
from .job_queue import JobQueue
from .logprobs import token_pieces
from .metrics import DISCONNECTED, STATUS, ServerMetrics
from .middleware import (
    ERROR,
    LOOPBACK,
    ORIGIN_PATTERN,
    ApiKeyMiddleware,
    HostMiddleware,
    RequestLogMiddleware,
    check_host,
)
from .reasoning import thinking_format_of
from .request_handler import IGNORED_HEADER, SAMPLED_HEADER, RequestHandler
from .requests import ParsedRequest, ParserSettings
from .response_store import ResponseStore
from .responses_shape import ResponsesShaper
from .sampled_tokens import SampledTokens
from .tools.harmony import is_harmony
from .transcriptions import MAX_AUDIO, MULTIPART, TranscriptionHandler, parse_transcription

T = TypeVar("T")

# The chat page. Its content security policy forbids resources of other hosts.
PAGE_SCRIPTS = ("page.js", "page-client.js", "page-markdown.js")
PAGE_FILES = {"/": "page.html"} | {f"/{name}": name for name in ("page.css", *PAGE_SCRIPTS)}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
OPEN_PATHS = ("/health", *PAGE_FILES)  # need no API key
PARSER_THREADS = 2
GENERATION_CONFIGS = ("auto", "none")
RequestParser = Callable[[object, ParserSettings], ParsedRequest]
ShaperFactory = Callable[[str, ParsedRequest, Tokenizer], ResponseShaper]


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the server.

    Attributes:
        model: Model name reported by the API; by default the target's id.
        max_waiting: Number of texts that may wait for a slot.
        timeout: Seconds from a request's arrival to the last byte of its response.
        body_timeout: Seconds for a request's body to arrive.
        max_body: Maximum size of a request's body in bytes.
        api_key: API key that clients must send, if any.
        origins: Origins of web pages that may send requests from a browser.
        generation_config: Sampling defaults: "auto" uses the model's generation config, "none"
            the defaults of OpenAI's API.
        hosts: Allowed names in the `Host` header, with any port; by default all if there is a key,
            else the loopback names.
        strict: True to reject unknown fields and unknown model names.
        aliases: Further model names.
        template_variables: Variables of the chat template for all requests.
        reuse_sampled_tokens: True to reuse the sampled tokens of earlier answers in prompts that
            contain their text, for longer prefix matches.
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
    strict: bool = False
    aliases: tuple[str, ...] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    reuse_sampled_tokens: bool = False

    def __post_init__(self) -> None:
        if self.generation_config not in GENERATION_CONFIGS:
            raise ValueError(
                f"generation_config must be {' or '.join(GENERATION_CONFIGS)}, "
                f"got {self.generation_config!r}"
            )
        for host in self.hosts:
            check_host(host)


Settings = ServerSettings  # its name in 0.1


def model_defaults(sampling: RecommendedSampling) -> dict[str, float]:
    """Return the options set by a model's generation config; none if it is greedy."""
    if sampling.greedy:  # checkpoints without a generation config
        return {}
    neutral = RecommendedSampling()
    options: dict[str, float] = dataclasses.asdict(sampling)
    return {name: value for name, value in options.items() if value != getattr(neutral, name)}


def make_app(pipeline: Pipeline, settings: ServerSettings | None = None) -> Starlette:
    """Return the ASGI application that serves a pipeline."""
    return _Server(pipeline, settings or ServerSettings()).app()


class _Server:
    """State shared by the routes."""

    def __init__(self, pipeline: Pipeline, settings: ServerSettings) -> None:
        self._pipeline, self._settings = pipeline, settings
        self._model = settings.model or pipeline.bundle.target.source.id
        self._jobs = JobQueue(len(pipeline.slots.all), settings.max_waiting)
        self._metrics = ServerMetrics(self._jobs, pipeline.slots.engine)
        self._defaults: dict[str, float] = dict(DEFAULTS)
        if settings.generation_config == "auto":
            self._defaults |= model_defaults(pipeline.bundle.default_sampling)
        self._store = ResponseStore()
        self._parser_settings = ParserSettings(
            pipeline.bundle.context_length,
            self._defaults,
            settings.strict,
            settings.template_variables,
            self._store,
            SampledTokens(pipeline.tokenizer) if settings.reuse_sampled_tokens else None,
            pipeline.bundle.max_prompt_length,
        )
        self._bodies = BodyReader(settings.max_body, settings.body_timeout)
        self._recordings = BodyReader(MAX_AUDIO, settings.body_timeout, MULTIPART)
        self._transcriber = Transcriber(pipeline) if pipeline.bundle.reads_speech else None
        self._parser_pool = ThreadPoolExecutor(PARSER_THREADS)
        # Compiling a grammar may take seconds and must not block the parser threads.
        self._compiler_pool = ThreadPoolExecutor(self._jobs.capacity)

    def app(self) -> Starlette:
        generation: tuple[tuple[str, RequestParser, ShaperFactory], ...] = (
            ("/v1/chat/completions", requests.parse_chat, ChatShaper),
            ("/v1/completions", requests.parse_completion, CompletionShaper),
            ("/v1/responses", requests.parse_response, ResponsesShaper),
            (anthropic.PATH, anthropic.parse_message_request, anthropic.MessagesShaper),
        )
        routes = [
            Route(path, self._generation_route(parser, shaper), methods=["POST"])
            for path, parser, shaper in generation
        ]
        routes += [
            Route("/v1/audio/transcriptions", self._speech_route("transcribe"), methods=["POST"]),
            Route("/v1/audio/translations", self._speech_route("translate"), methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._get_model),
        ]
        # Some clients are configured with a base URL without "/v1".
        routes += [
            Route(route.path.removeprefix("/v1"), route.endpoint, methods=route.methods)
            for route in routes
            if route.path != anthropic.PATH
        ]
        routes += [
            Route("/health", self._health),
            Route(f"{anthropic.PATH}/count_tokens", self._count_tokens, methods=["POST"]),
            Route("/v1/responses/{id}", self._stored_response, methods=["GET", "DELETE"]),
            Route("/version", self._version),
            Route("/props", self._props),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            *(Route(path, _page_route(path)) for path in PAGE_FILES),
            Route("/metrics", self._metrics_text),
        ]
        return Starlette(
            routes=routes,
            middleware=self._middleware([route.path for route in routes]),
            exception_handlers={
                ApiError: _error_response,
                HTTPException: _error_response,
                ClientDisconnect: _error_response,
                Exception: _error_response,
            },
        )

    def _middleware(self, paths: list[str]) -> list[Middleware]:
        key, origins = self._settings.api_key, self._settings.origins
        hosts = self._settings.hosts or (() if key else LOOPBACK)
        middleware = [
            Middleware(RequestLogMiddleware, metrics=self._metrics, paths=frozenset(paths)),
            Middleware(
                HostMiddleware, hosts=hosts, origins=origins, allow_any_origin=key is not None
            ),
        ]
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(origins),
                allow_origin_regex=ORIGIN_PATTERN,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", IGNORED_HEADER, SAMPLED_HEADER],
            )
        )
        return [*middleware, Middleware(ApiKeyMiddleware, key=key, open_paths=OPEN_PATHS)]

    def _generation_route(
        self, parser: RequestParser, shaper: ShaperFactory
    ) -> Callable[[Request], Any]:
        async def generate(http_request: Request) -> RequestHandler:
            async with self._bodies.read(http_request) as body:
                request = await _run_in(self._parser_pool, partial(self._parse, body, parser))
            pool = self._compiler_pool if request.has_grammar else self._parser_pool
            return RequestHandler(
                self._pipeline,
                self._jobs,
                self._metrics,
                shaper(self._model, request, self._pipeline.tokenizer),
                request,
                partial(_run_in, pool, partial(requests.prepare, self._pipeline, request)),
                self._settings.timeout,
            )

        return generate

    def _speech_route(self, task: str) -> Callable[[Request], Any]:
        async def transcribe(http_request: Request) -> TranscriptionHandler:
            if self._transcriber is None:
                message = f"{self._model} does not read speech"
                raise ApiError(message, "model", "unsupported_model")
            async with self._recordings.read(http_request) as body:
                content_type = http_request.headers["content-type"]
                request = await parse_transcription(body, content_type, task, self._settings.strict)
            if request.model and not self._has_model(request.model):
                if self._settings.strict:
                    raise self._unknown_model(request.model)
                request = dataclasses.replace(request, ignored=("model", *request.ignored))
            self._metrics.add_ignored(request.ignored)
            return TranscriptionHandler(
                self._transcriber, self._jobs, request, self._settings.timeout
            )

        return transcribe

    def _parse(self, body: bytearray, parser: RequestParser) -> ParsedRequest:
        value = _parse_json(body)
        model = value.get("model") if isinstance(value, dict) else None
        request = parser(value, self._parser_settings)
        if model and not self._has_model(model):
            if self._settings.strict:
                raise self._unknown_model(model)
            request = dataclasses.replace(request, ignored=("model", *request.ignored))
        self._metrics.add_ignored(request.ignored)
        self._jobs.check(request.num_choices)  # before the prompts are tokenized
        return request

    async def _list_models(self, http_request: Request) -> Response:
        names = (self._model, *self._settings.aliases)
        cards = [self._model_card() | {"id": name, "root": self._model} for name in names]
        return JSONResponse({"object": "list", "data": cards})

    async def _get_model(self, http_request: Request) -> Response:
        if not self._has_model(name := http_request.path_params["name"]):
            raise self._unknown_model(name)
        return JSONResponse(self._model_card() | {"id": name, "root": self._model})

    def _model_card(self) -> dict[str, Any]:
        bundle = self._pipeline.bundle
        return {
            "chat": bundle.supports_chat,
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "specedge",
            "context_length": bundle.context_length,
            "max_model_len": bundle.context_length,
            "capabilities": self._capabilities(),
            "default_sampling": self._defaults,
            "target": bundle.target.source.id,
            "draft": bundle.draft and bundle.draft.source.id,
        }

    def _capabilities(self) -> list[str]:
        """Return the model's capabilities: those of Ollama's API and further ones."""
        if self._transcriber is not None:
            return ["transcription"]
        bundle = self._pipeline.bundle
        template = bundle.chat_template
        if template is None or not bundle.supports_chat:
            return ["completion", "logprobs", "structured_outputs"]
        capabilities = ["completion", "chat", "tools", "logprobs", "structured_outputs"]
        thinking = thinking_format_of(template, self._pipeline.tokenizer)
        return [*capabilities, *(["thinking"] if thinking or is_harmony(template) else [])]

    def _has_model(self, name: object) -> bool:
        return name == self._model or name in self._settings.aliases

    def _unknown_model(self, name: object) -> ApiError:
        message = f"the model {str(name)[:100]!r} does not exist; this server runs {self._model!r}"
        return ApiError(message, "model", "model_not_found", 404)

    async def _health(self, http_request: Request) -> Response:
        jobs = self._jobs
        return JSONResponse(
            {
                "status": "ok",
                "slots": jobs.num_slots,
                "running": jobs.num_running,
                "waiting": jobs.num_waiting,
            }
        )

    async def _version(self, http_request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _props(self, http_request: Request) -> Response:
        """Return chat template and defaults in the format of llama.cpp's /props."""
        bundle = self._pipeline.bundle
        return JSONResponse(
            {
                "model": self._model_card(),
                "chat_template": bundle.chat_template,
                "special_tokens": {**bundle.special_tokens},
                "total_slots": self._jobs.num_slots,
                "default_generation_settings": {
                    "n_ctx": bundle.context_length,
                    "params": self._defaults,
                },
                "build_info": f"specedge {__version__}",
            }
        )

    async def _stored_response(self, http_request: Request) -> Response:
        """Return or delete a stored response."""
        id_ = http_request.path_params["id"]
        response = self._store.get(id_)
        if response is None:
            message = f"the response {id_[:100]!r} is not stored"
            raise ApiError(message, code="response_not_found", status=404)
        if http_request.method == "DELETE":
            self._store.remove(id_)
            return JSONResponse({"id": id_, "object": "response", "deleted": True})
        return JSONResponse(response.body)

    async def _count_tokens(self, http_request: Request) -> Response:
        """Return the number of prompt tokens of an Anthropic request."""
        async with self._bodies.read(http_request) as body:
            work = partial(self._parse, body, anthropic.parse_message_request)
            request = await _run_in(self._parser_pool, work)
        prepare = partial(requests.prepare, self._pipeline, request)
        (tokens,) = (await _run_in(self._parser_pool, prepare)).prompts
        return JSONResponse({"input_tokens": len(tokens)})

    async def _tokenize(self, http_request: Request) -> Response:
        """Return the tokens of a text or of messages, in the format of vLLM and llama.cpp."""
        async with self._bodies.read(http_request) as body:
            parse = partial(requests.parse_tokenize, _parse_json(body), self._parser_settings)
            request, with_pieces = await _run_in(self._parser_pool, parse)
        work = partial(requests.prepare, self._pipeline, request)
        (tokens,) = (await _run_in(self._parser_pool, work)).prompts
        fields = {"count": len(tokens), "max_model_len": self._pipeline.bundle.context_length}
        entries = [*token_pieces(self._pipeline.tokenizer, tokens)] if with_pieces else tokens
        return JSONResponse({"tokens": entries, **fields})

    async def _detokenize(self, http_request: Request) -> Response:
        async with self._bodies.read(http_request) as body:
            parse = partial(requests.parse_detokenize, _parse_json(body), self._parser_settings)
            tokens = await _run_in(self._parser_pool, parse)
        vocab_size = self._pipeline.bundle.target.vocab_size
        if any(token >= vocab_size for token in tokens):
            message = f"tokens must be between 0 and {vocab_size - 1}"
            raise ApiError(message, "tokens", "invalid_value")
        work = partial(decode, self._pipeline.tokenizer, tokens, skip_special_tokens=False)
        text = await _run_in(self._parser_pool, work)
        return JSONResponse({"prompt": text, "content": text})

    async def _metrics_text(self, http_request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")


def _parse_json(body: bytearray) -> Any:
    """Return the JSON value of a body; it must be serializable, since responses repeat parts."""
    try:
        value = parse(body.decode())
        reason = _serialization_error(value)
    except (JsonError, UnicodeDecodeError) as error:
        raise ApiError(f"invalid body: {error}", code="invalid_json") from error
    if reason is not None:
        raise ApiError(f"invalid body: {reason}", code="invalid_json")
    return value


def _serialization_error(value: Any) -> str | None:
    """Return the reason why a value cannot be serialized as JSON, or None if it can."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "it contains an unpaired surrogate"
    except ValueError:  # 1e999 is parsed as infinity
        return "it contains a number that is too large"
    except RecursionError:
        return "it is nested too deeply"
    return None


async def _run_in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def _page_route(path: str) -> Callable[[Request], Any]:
    """Return the handler of a file of the chat page."""
    name = PAGE_FILES[path]
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]

    async def serve_file(http_request: Request) -> Response:
        text = files(__package__).joinpath(name).read_text("utf-8")
        return Response(text, headers=PAGE_HEADERS, media_type=media_type)

    return serve_file


async def _error_response(http_request: Request, error: Exception) -> Response:
    """Return any error in OpenAI's format."""
    if isinstance(error, ClientDisconnect):
        http_request.scope[STATUS] = DISCONNECTED
    if isinstance(error, HTTPException):
        messages = {404: "the path does not exist", 405: "this path does not support the method"}
        message = messages.get(error.status_code, error.detail)
        error = ApiError(message, code="not_found", status=error.status_code)
    api_error = client_error(error)  # the ASGI server logs unexpected errors
    http_request.scope[ERROR] = api_error
    is_anthropic = http_request.url.path.startswith(anthropic.PATH)
    body = anthropic.error_body(api_error) if is_anthropic else api_error.body
    return JSONResponse(body, api_error.status, api_error.headers)
