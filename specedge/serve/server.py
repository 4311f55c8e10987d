"""HTTP server: listening socket, uvicorn, and graceful shutdown."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from specedge.errors import SpecEdgeError

MAX_HEADERS = 2**16  # maximum size of a request's headers in bytes
UNREAD_TIMEOUT = 120  # seconds until the connection of a client that does not read is closed


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 selects a free port.

    Raises:
        SpecEdgeError: The address cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecEdgeError(
            f"cannot listen on {host}, port {port}: {reason}; choose another --host or --port"
        ) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; inherited by accepted connections
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_TIMEOUT)
    return listening


def base_url(listening: socket.socket) -> str:
    """Return the base URL for OpenAI clients."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def serve(
    app: ASGIApp, listening: socket.socket, grace: int, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGINT or SIGTERM, then wait up to `grace` seconds for running requests."""
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
    GracefulServer(config, on_ready).run(sockets=[listening])


class GracefulServer(uvicorn.Server):
    """uvicorn server that reports when it is ready and does not re-raise stop signals."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

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
