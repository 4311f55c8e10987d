"""ASGI middleware: allowed hosts and origins, API keys, and request logging.

Browsers let any web page send requests to localhost (CSRF). With DNS rebinding, a page whose host
name resolves to localhost can also read the responses; its requests have that name as their Host.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .metrics import DISCONNECTED, STATUS, ServerMetrics

LOOPBACK = ("localhost", "127.0.0.1", "::1")
# Origin schemes of desktop apps that embed a browser; web pages cannot have them.
APP_SCHEMES = ("app", "tauri", "vscode-webview", "file")
ORIGIN_PATTERN = (
    r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?|(app|tauri|vscode-webview|file)://.*"
)
ERROR = "specedge.error"  # scope key: error of the response
REPORT = "specedge.report"  # scope key: token counts and throughput, for the access log
_LOG = logging.getLogger("specedge")
_ACCESS_LOG = logging.getLogger("specedge.access")
_REQUEST_ID = re.compile(rb"[\w.:-]{1,64}")


class HostMiddleware:
    """Middleware that rejects requests with a `Host` or `Origin` that is not allowed.

    Args:
        app: Wrapped application.
        hosts: Allowed host names, with any port; empty to allow all, which is safe against DNS
            rebinding only with an API key.
        origins: Allowed origins in addition to the server's own and those of `hosts`.
        allow_any_origin: True to allow all origins.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str],
        origins: Collection[str],
        allow_any_origin: bool,
    ) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}
        self._origins, self._allow_any_origin = origins, allow_any_origin or "*" in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._rejection(scope)):
            scope[ERROR] = error
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _rejection(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if self._hosts and host and _host_name(f"//{host}") not in self._hosts:
            return ApiError(
                f"the host {_excerpt(host)} is not allowed; start the server with --allowed-host "
                "NAME (in Python: ServerSettings.hosts), or with an API key",
                code="host_not_allowed",
                status=403,
            )
        if origin is None or self._allow_any_origin or origin in self._origins:
            return None
        is_same_origin = origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())
        if is_same_origin or _host_name(origin) in {*LOOPBACK, *self._hosts}:
            return None
        if origin.partition("://")[0] in APP_SCHEMES:
            return None
        return ApiError(
            f"web pages of {_excerpt(origin)} may not use this server; start it with "
            "--allowed-origin ORIGIN",
            code="origin_not_allowed",
            status=403,
        )


def check_host(host: str) -> None:
    """Raise ValueError unless the argument is a host name or address without a port."""
    if host == "*" or host.lower() not in (_host_name(f"//{host}"), _host_name(f"//[{host}]")):
        raise ValueError(
            "an allowed host is a name or an address without scheme, port or wildcard, such as "
            f"pair.example, got {_excerpt(host)}"
        )


def _host_name(address: str) -> str | None:
    """Return the host of an address without its port."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _excerpt(text: str) -> str:
    return ascii(text[:100])


class ApiKeyMiddleware:
    """Middleware that requires the API key, if one is set, except for `open_paths`."""

    def __init__(self, app: ASGIApp, key: str | None, open_paths: Collection[str]) -> None:
        self._app, self._key, self._open_paths = app, key, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            status=401,
            headers={"WWW-Authenticate": "Bearer"},
        )
        scope[ERROR] = error
        await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        headers = dict(scope["headers"])
        bearer, key = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"")
        expected = self._key.encode()
        return hmac.compare_digest(bearer, b"Bearer " + expected) or (
            hmac.compare_digest(key, expected)
        )


class RequestLogMiddleware:
    """Middleware that counts and logs requests, and assigns request ids.

    Rejected requests are logged with the invalid field. The logger "specedge.access" receives one
    line per request, with token counts and throughput. Requests that a shutdown cancels before
    their response begins get an error response.

    Args:
        app: Wrapped application.
        metrics: Metrics of the server.
        paths: Paths with a metric label of their own; all others are labeled "other".
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        statuses: list[int] = []
        id_ = dict(scope["headers"]).get(b"x-request-id", b"")
        id_ = id_ if _REQUEST_ID.fullmatch(id_) else f"req-{secrets.token_hex(12)}".encode()
        start = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                headers = [*message.get("headers", []), (b"x-request-id", id_)]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if statuses:
                raise
            error = shutdown_error()
            await JSONResponse(error.body, error.status)(scope, receive, send_with_id)
        finally:
            status = scope.get(STATUS) or (str(statuses[0]) if statuses else DISCONNECTED)
            self._metrics.http_requests.labels(self._path(scope), status).inc()
            self._log(scope, id_.decode(), status, time.perf_counter() - start)

    def _path(self, scope: Scope) -> str:
        path = scope["path"]
        return path if path in self._paths else "other"

    def _log(self, scope: Scope, id_: str, status: str, seconds: float) -> None:
        line = f"{scope['method']} {self._path(scope)} {status} {id_} {seconds:.3f} s"
        if (error := scope.get(ERROR)) is not None and status.startswith("4"):
            field = "" if error.param is None else f" [{_excerpt(error.param)}]"
            _LOG.warning("rejected %s%s: %s", line, field, _one_line(error.message))
        _ACCESS_LOG.info("%s%s", line, scope.get(REPORT, ""))


def shutdown_error() -> ApiError:
    """Return the error for requests that are cancelled by a shutdown."""
    return ApiError("the server is shutting down", code="server_shutdown", status=503)


def _one_line(text: str) -> str:
    return ascii(" ".join(text.split())[:300])[1:-1]
