"""Clients that do not read their responses."""

import asyncio
import json
import socket

import pytest

from served import SHORT, chat_pair
from specedge.serve import server
from specedge.serve.app import ServerSettings, make_app


def test_timed_out_stream_does_not_wait_for_unresponsive_client(monkeypatch):
    """Regression test: the server waited for the stream until the connection closed."""
    monkeypatch.setattr("specedge.serve.request_handler.ERROR_TIMEOUT", 0.1)
    given = [json.dumps(SHORT | {"stream": True}).encode()]

    async def main():
        async def receive():
            if not given:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": given.pop(), "more_body": False}

        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
        scope |= {"headers": [(b"content-type", b"application/json")], "root_path": ""}
        app = make_app(chat_pair(1), ServerSettings(timeout=0.5))
        await asyncio.wait_for(app(scope, receive, send), 10)

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_connection_of_unresponsive_client_is_dropped(monkeypatch):
    """Regression test: the connection and its buffers lived as long as the client."""
    monkeypatch.setattr(server, "UNREAD_TIMEOUT", 1)
    with server.listen("127.0.0.1", 0) as listening, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(listening.getsockname())
        accepted, _ = listening.accept()
        accepted.settimeout(20)
        with accepted, pytest.raises(TimeoutError, match="Connection timed out"):
            accepted.sendall(bytes(50 * 10**6))
