"""Who may ask: from which web pages, under which name of the server, and with which key.

A browser lets any page send requests to this machine. A page whose own name begins to point here
(DNS rebinding) could read the answers, too: its requests say that name as their Host.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Named:
    """Middleware that refuses requests of other hosts or of other web pages.

    Args:
        app: The application behind it.
        hosts: Allowed `Host` names, of any port; empty allows any, which needs an API key against
            DNS rebinding.
        origins: Allowed origins besides the server's own and those of `hosts`.
        any_origin: Whether every origin is allowed.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str], origins: Collection[str], any_origin: bool
    ) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}
        self._origins, self._any_origin = origins, any_origin or "*" in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refused(scope)):
            await JSONResponse(error.body, error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> ApiError | None:
        given = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = given.get(b"host", ""), given.get(b"origin")
        if self._hosts and host and _name(f"//{host}") not in self._hosts:
            return ApiError(
                f"the host {_short(host)} is not allowed; start the server with --allow-host NAME "
                "(an app: Settings.hosts), or with an API key",
                code="host_not_allowed",
                status=403,
            )
        if origin is None or self._any_origin or origin in self._origins:
            return None
        own = origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())
        if own or _name(origin) in self._hosts - {*LOOPBACK}:
            return None
        return ApiError(
            f"no web page of {_short(origin)} may ask this server; start it with --cors ORIGIN",
            code="origin_not_allowed",
            status=403,
        )


def check_host(host: str) -> None:
    """Raise ValueError for what no request's host can equal, such as one with a port."""
    if host == "*" or host.lower() not in (_name(f"//{host}"), _name(f"//[{host}]")):
        raise ValueError(
            "an allowed host is a name or an address without scheme, port or wildcard, such as "
            f"pair.example, got {_short(host)}"
        )


def _name(address: str) -> str | None:
    """The host of an address, without its port."""
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _short(text: str) -> str:
    return ascii(text[:100])


class Keyed:
    """Lets nobody in without the key, if there is one, but to paths that are open."""

    def __init__(self, app: ASGIApp, key: str | None, open_paths: Collection[str]) -> None:
        self._app, self._key, self._open = app, key, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open or self._knows(scope):
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
