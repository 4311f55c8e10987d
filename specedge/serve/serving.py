"""The application on a socket, from its first request to the last after SIGTERM."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from specedge.errors import SpecEdgeError

MAX_HEADERS = 2**16  # bytes of a request's head
UNREAD = 120  # seconds for which a connection may hold what its client does not take


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free. Raises SpecEdgeError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecEdgeError(
            f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port"
        ) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; accepted connections have it, too
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD)
    return listening


def url_of(listening: socket.socket) -> str:
    """The address that clients take as OpenAI's base URL."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def serve(
    app: ASGIApp, listening: socket.socket, grace: int, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGINT or SIGTERM; then take no more, and give what runs `grace` seconds."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=grace,
        h11_max_incomplete_event_size=MAX_HEADERS,
    )
    Server(config, ready).run(sockets=[listening])


class Server(uvicorn.Server):
    """Says when it is ready, and ends as asked without raising the signal again."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
