"""What /metrics says of times."""

import asyncio
import json

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")

from served import PROMPT, chat_pair
from specedge.serve.app import make_app


def test_the_time_to_the_first_token_is_not_the_clients():
    app, sent = make_app(chat_pair(1)), []

    async def ask(method, path, body):
        begun = []

        async def receive():
            if begun:
                await asyncio.sleep(60)
            begun.append(1)
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            if b"data" in message.get("body", b"") and len(sent) < 3:
                await asyncio.sleep(1)
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await app(scope | {"query_string": b"", "root_path": ""}, receive, send)

    async def main():
        body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "stream": True}).encode()
        await ask("POST", "/v1/completions", body)
        await ask("GET", "/metrics", b"")

    asyncio.run(main())
    lines = sent[-1]["body"].decode().splitlines()
    sums = [line for line in lines if line.startswith("specedge_time_to_first_token_seconds_sum")]
    assert 0 < float(sums[0].split()[1]) < 0.9
