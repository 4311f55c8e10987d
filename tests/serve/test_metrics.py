"""Times and incomplete requests in /metrics."""

import asyncio
import json
import socket
import time

import pytest

from served import PROMPT, ask, chat_pair, counts, head, health, serving, until
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.serve.app import make_app

LONG = {
    "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True,
    "speculative": {"num_draft_tokens": 4},
}  # fmt: skip
REQUESTS = 'specedge_requests_total{path="/v1/completions",status="%s"}'


@pytest.fixture(scope="module")
def pair():
    return chat_pair(1)


@pytest.fixture
def port(pair):
    with serving(pair) as found:
        yield found


@pytest.fixture
def rounds(monkeypatch):
    """The last of these is told of the number of each round of a text before it begins."""
    fast, done, before = SpeculativeDecoder._round, [], []

    def slow(self, *arguments):
        done.append(1)
        before[-1](len(done))
        return fast(self, *arguments)

    monkeypatch.setattr(SpeculativeDecoder, "_round", slow)
    return before


def has_counted(port, status):
    """A text of two rounds at least, and its request."""
    until(lambda: health(port)["running"] == 0)
    found = counts(port)
    kinds = ("drafted", "tested", "accepted")
    assert found['specedge_tokens_total{kind="new"}'] >= 2
    assert found['specedge_tokens_total{kind="prompt"}'] >= 5
    assert all(found[f'specedge_draft_tokens_total{{kind="{kind}"}}'] for kind in kinds)
    assert found["specedge_time_per_token_seconds_count"] == 0
    assert {name for name in found if "requests_total" in name and "v1" in name} == {
        REQUESTS % status
    }


@pytest.mark.parametrize("stream", [False, True])
def test_timed_out_request_is_counted(pair, rounds, stream):
    rounds.append(lambda number: time.sleep(1.6 * (number == 6)))
    with serving(pair, timeout=1.5) as port:
        ask(port, "POST", "/v1/completions", LONG | {"stream": stream})
        has_counted(port, 504)


@pytest.mark.parametrize("stream", [False, True])
def test_failed_request_is_counted(port, rounds, stream):
    rounds.append(lambda number: 1 / (6 - number))
    ask(port, "POST", "/v1/completions", LONG | {"stream": stream})
    has_counted(port, 500)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_request_is_counted(port, rounds, stream):
    numbers = []
    rounds.append(lambda number: numbers.append(number) or time.sleep(0.02))
    body = json.dumps(LONG | {"stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(head(len(body)) + body)
        until(lambda: len(numbers) > 5)
    has_counted(port, "gone")


def test_disconnect_within_body_is_not_a_server_error(port, caplog):
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(head(100) + b'{"prompt"')
    until(lambda: counts(port)[REQUESTS % "gone"] == 1)
    assert REQUESTS % 500 not in counts(port)
    assert not caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_completed_request_is_counted_once(port, stream):
    ask(port, "POST", "/v1/completions", LONG | {"max_tokens": 8, "stream": stream})
    until(lambda: health(port)["running"] == 0)
    found = counts(port)
    assert found['specedge_tokens_total{kind="new"}'] == 8
    assert found["specedge_time_per_token_seconds_count"] == found[REQUESTS % 200] == 1
    assert found["specedge_time_to_first_token_seconds_count"] == 1
    assert (found["specedge_slots"], found["specedge_queue"]) == (1, 0)


def test_time_to_first_token_excludes_client_delays(pair):
    app, sent = make_app(pair), []

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
