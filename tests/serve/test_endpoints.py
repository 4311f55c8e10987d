"""Endpoints about the server itself, request ids, logs, shutdown and long prompts."""

import asyncio
import json
import logging
import socket

import pytest

from served import MODEL, PROMPT, SHORT, ask, chat_pair, head, health, serving, until
from specedge.serve.app import ServerSettings, make_app
from specedge.version import __version__

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def pair():
    return chat_pair(2)


@pytest.fixture(scope="module")
def port(pair):
    with serving(pair, aliases=("default",)) as found:
        yield found


def get(port, path):
    status, _, body = ask(port, "GET", path)
    assert status == 200
    return json.loads(body)


def post(port, path, **body):
    status, _, text = ask(port, "POST", path, body)
    return status, json.loads(text)


def test_models_list_max_length_and_capabilities(port):
    first, alias = get(port, "/v1/models")["data"]
    assert (first["id"], alias["id"], alias["root"]) == (MODEL, "default", MODEL)
    assert first["max_model_len"] == 512
    assert {"chat", "tools", "completion"} <= {*first["capabilities"]}
    assert get(port, "/v1/models/default") == alias


def test_version_and_properties(port, pair):
    assert get(port, "/version") == {"version": __version__}
    props = get(port, "/props")
    assert props["chat_template"] == pair.bundle.chat_template
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 512


def test_tokenize_and_detokenize_are_inverse(port, pair):
    tokens = pair.prompts.tokens(PROMPT)
    status, found = post(port, "/tokenize", prompt=PROMPT)
    assert (status, found["tokens"], found["count"]) == (200, tokens, len(tokens))
    pieces = post(port, "/tokenize", content=PROMPT, with_pieces=True)[1]["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == PROMPT
    assert post(port, "/detokenize", tokens=tokens)[1] == {"prompt": PROMPT, "content": PROMPT}
    chat = post(port, "/tokenize", messages=MESSAGES)[1]["tokens"]
    assert chat == pair.prompts.chat_tokens(MESSAGES)
    assert post(port, "/tokenize", prompt=3)[1]["error"]["param"] == "prompt"
    assert post(port, "/detokenize", tokens=[10**9])[1]["error"]["param"] == "tokens"


def test_each_response_has_a_request_id(port):
    given = ask(port, "GET", "/health", X_Request_Id="abc-1")[1]["x-request-id"]
    assert given == "abc-1"
    for bad in ("a b", "x" * 100):
        assert ask(port, "GET", "/health", X_Request_Id=bad)[1]["x-request-id"].startswith("req-")
    assert ask(port, "POST", "/v1/completions", b"{")[1]["x-request-id"]


def test_rejected_request_is_logged_in_one_line_with_its_field(port, caplog):
    with caplog.at_level(logging.WARNING, "specedge"):
        ask(port, "POST", "/v1/completions", SHORT | {"temperature": -1}, X_Request_Id="id-1")
        until(lambda: caplog.records)
    (record,) = caplog.records
    assert "rejected POST /v1/completions 400 id-1" in record.message
    assert "['temperature']" in record.message
    assert "\n" not in record.message


def test_access_log_has_tokens_and_speed(port, caplog):
    with caplog.at_level(logging.INFO, "specedge.access"):
        ask(port, "POST", "/v1/completions", SHORT)
        until(lambda: caplog.records)
    line = caplog.records[-1].message
    assert line.startswith("POST /v1/completions 200 req-")
    assert "8 new" in line
    assert "tokens/s" in line


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_ends_requests_with_openai_error(pair, stream):
    app, sent = make_app(pair, ServerSettings()), []
    body = SHORT | {"max_tokens": 400, "ignore_eos": True, "stream": stream}

    async def main():
        bodies = [json.dumps(body).encode()]

        async def receive():
            if not bodies:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        begun = asyncio.Event()

        async def send(message):
            sent.append(message)
            begun.set()

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
        task = asyncio.ensure_future(app(scope | {"headers": headers}, receive, send))
        if stream:
            await begun.wait()
        else:
            await asyncio.sleep(0.05)
        task.cancel()
        await task

    asyncio.run(main())
    text = b"".join(message.get("body", b"") for message in sent).decode()
    error = json.loads(text.split("data: ")[-1] if stream else text)["error"]
    assert (error["code"], error["type"]) == ("server_shutdown", "server_error")
    assert sent[0]["status"] == (200 if stream else 503)
    assert sent[-1]["more_body"] is False if stream else True


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_during_long_prefill_frees_the_slot(port, pair, stream):
    tokens = (pair.prompts.tokens(PROMPT) * 100)[:480]
    body = json.dumps(SHORT | {"prompt": tokens, "echo": True, "logprobs": 1, "stream": stream})
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(head(len(body)) + body.encode())
            until(lambda: health(port)["running"] > 0)
    until(lambda: health(port)["running"] == 0)
