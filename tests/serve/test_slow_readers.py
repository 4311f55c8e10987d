"""Clients that do not read what they asked for."""

import asyncio
import json
import socket

import pytest

from served import SHORT, chat_pair
from specedge.serve import server
from specedge.serve.app import ServerSettings, make_app


def test_who_never_reads_its_stream_is_not_waited_for_when_its_time_is_over(monkeypatch):
    """The end of the stream was waited for as long as the connection was open."""
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
def test_a_connection_whose_client_takes_nothing_is_dropped(monkeypatch):
    """It stayed, with all that was written, for as long as the client did."""
    monkeypatch.setattr(server, "UNREAD_TIMEOUT", 1)
    with server.listen("127.0.0.1", 0) as listening, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.connect(listening.getsockname())
        accepted, _ = listening.accept()
        accepted.settimeout(20)
        with accepted, pytest.raises(TimeoutError, match="Connection timed out"):
            accepted.sendall(bytes(50 * 10**6))
