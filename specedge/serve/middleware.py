"""ASGI middleware: allowed hosts and origins, the API key, and request counts.

A browser lets any page send requests to this machine. By DNS rebinding, a page whose own host name
resolves to this machine can also read the responses; its requests have that name as their Host.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError
from .metrics import DISCONNECTED, STATUS, ServerMetrics

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class HostMiddleware:
    """Middleware that refuses requests for other hosts or from other web pages.

    Args:
        app: The application behind it.
        hosts: Allowed `Host` names, of any port; empty allows any, which needs an API key against
            DNS rebinding.
        origins: Allowed origins besides the server's own and those of `hosts`.
        allow_any_origin: True if every origin is allowed.
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
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _rejection(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if self._hosts and host and _host_name(f"//{host}") not in self._hosts:
            return ApiError(
                f"the host {_excerpt(host)} is not allowed; start the server with --allow-host "
                "NAME (an app: ServerSettings.hosts), or with an API key",
                code="host_not_allowed",
                status=403,
            )
        if origin is None or self._allow_any_origin or origin in self._origins:
            return None
        is_same_origin = origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())
        if is_same_origin or _host_name(origin) in self._hosts - {*LOOPBACK}:
            return None
        return ApiError(
            f"web pages of {_excerpt(origin)} may not use this server; start it with --cors ORIGIN",
            code="origin_not_allowed",
            status=403,
        )


def check_host(host: str) -> None:
    """Raise ValueError for a name that no request's host equals, such as one with a port."""
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
    """Middleware that requires the API key, if there is one, except for `open_paths`."""

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
        await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        header = dict(scope["headers"]).get(b"authorization", b"")
        return self._key is None or hmac.compare_digest(header, b"Bearer " + self._key.encode())


class CountMiddleware:
    """Middleware that counts requests by path, `paths` or "other", and status."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        statuses: list[int] = []

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            if scope["type"] == "http":
                path = scope["path"] if scope["path"] in self._paths else "other"
                status = scope.get(STATUS) or (str(statuses[0]) if statuses else DISCONNECTED)
                self._metrics.requests.labels(path, status).inc()
