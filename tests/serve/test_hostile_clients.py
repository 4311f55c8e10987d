"""Clients that are slow, broken or too many: each is answered or dropped, and others go on."""

import gzip
import json
import select
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from served import (
    SHORT,
    answer,
    answers,
    ask,
    chat_pair,
    error_of,
    head,
    health,
    serving,
    until,
)
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.requests.async_stream import AsyncStream

LONG = SHORT | {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair():
    return chat_pair(1)


@pytest.fixture(scope="module")
def port(pair):
    with serving(pair, max_waiting=1, max_body=20_000, body_timeout=1.0) as found:
        yield found


@pytest.fixture
def slowly(monkeypatch):
    """Rounds take 20 ms at least."""
    fast = SpeculativeDecoder._round

    def slow(self, *arguments):
        time.sleep(0.02)
        return fast(self, *arguments)

    monkeypatch.setattr(SpeculativeDecoder, "_round", slow)


@pytest.fixture
def connection(port):
    with socket.create_connection(("127.0.0.1", port), 30) as found:
        yield found


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": NaN}',
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"prompt": "\\ud800"}',
        b'{"model": {"a": [1]}, "prompt": "a"}',
    ],
)
def test_invalid_body_is_rejected_with_short_one_line_error(port, body):
    status, headers, said = ask(port, "POST", "/v1/completions", body)
    assert status in (400, 404)
    assert headers["content-type"] == "application/json"
    assert len(said) < 1000
    assert "\n" not in error_of(said)["message"]


@pytest.mark.parametrize("body", [{"model": "x" * 9000}, {"y" * 9000: 1}])
def test_long_unknown_field_names_are_truncated(port, caplog, body):
    status, headers, _ = ask(port, "POST", "/v1/completions", SHORT | body)
    assert status == 200
    assert 0 < len(headers["x-specedge-ignored"]) < 1000
    assert all(len(record.getMessage()) < 1000 for record in caplog.records)


@pytest.mark.parametrize("value", ['"\\ud800"', "1e999"])
def test_unserializable_metadata_is_rejected_before_generation(port, value):
    """Regression test: such metadata caused a 500 error after generation or invalid JSON."""
    body = f'{{"input": "a", "metadata": {{"a": {value}}}}}'.encode()
    status, _, said = ask(port, "POST", "/v1/responses", body)
    assert (status, error_of(said)["code"]) == (400, "invalid_json")


def test_oversized_body_is_rejected_before_reading(port, connection):
    connection.sendall(head(10**12))
    status, headers, said = answer(connection)
    assert (status, error_of(said)["code"]) == (413, "body_too_large")
    assert headers["connection"] == "close"


def test_oversized_chunked_body_is_rejected_at_the_limit(port, connection):
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    for _ in range(20):  # as many as are read, so that nothing is left to reset the connection
        connection.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
    assert answer(connection)[0] == 413


def test_slightly_oversized_body_is_rejected_after_reading(port):
    body = json.dumps(SHORT | {"prompt": "a" * 60_000}).encode()
    status, _, said = ask(port, "POST", "/v1/completions", body)
    assert (status, error_of(said)["code"]) == (413, "body_too_large")


def test_incomplete_body_times_out(port, connection):
    connection.sendall(head(100) + b'{"prompt":')
    begin = time.monotonic()
    status, _, said = answer(connection)
    assert (status, error_of(said)["code"]) == (408, "timeout")
    assert time.monotonic() - begin < 10


def test_non_json_content_type_is_rejected_without_cors(port):
    kinds = ("text/plain", "application/x-www-form-urlencoded", "")
    for kind in kinds:
        status, headers, said = ask(port, "POST", "/v1/completions", SHORT, Content_Type=kind)
        assert (status, error_of(said)["code"]) == (415, "invalid_content_type")
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, deflate"])
def test_compressed_bodies_are_refused_by_the_name_of_their_coding(port, coding):
    body = gzip.compress(json.dumps(SHORT).encode())
    status, headers, said = ask(port, "POST", "/v1/completions", body, Content_Encoding=coding)
    assert (status, error_of(said)["code"]) == (415, "unsupported_content_encoding")
    assert coding in error_of(said)["message"]
    assert headers["accept-encoding"] == "identity"
    assert ask(port, "POST", "/v1/completions", SHORT, Content_Encoding="identity")[0] == 200


def test_unknown_paths_and_methods_are_json_errors(port):
    assert error_of(ask(port, "GET", "/v1/nothing")[2])["message"] == "the path does not exist"
    status, _, said = ask(port, "GET", "/v1/completions")
    assert (status, error_of(said)["type"]) == (405, "invalid_request_error")
    assert ask(port, "POST", "/../../etc/passwd", {})[0] == 404


@pytest.mark.parametrize(
    "sent",
    [b"GET /v1/mod", b"\x16\x03\x01" * 50, b"POST / HTTP/1.1\r\nA: " + b"b" * 70_000, head(50)],
)
def test_incomplete_request_does_not_block_others(port, connection, sent):
    connection.sendall(sent)
    assert answers(port)


def test_idle_connections_do_not_block_requests(port):
    idle = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(300)]
    try:
        assert answers(port)
    finally:
        for one in idle:
            one.close()


def test_unread_stream_does_not_block_other_requests(port, connection):
    body = json.dumps(LONG | {"stream": True, "logprobs": 20}).encode()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.sendall(head(len(body)) + body)
    until(lambda: health(port)["running"] == 0, 60)  # completed although the client did not read
    assert answers(port)


def test_full_queue_returns_429_with_retry_after(port, slowly):
    def long():
        assert ask(port, "POST", "/v1/completions", LONG | {"max_tokens": 60})[0] == 200

    threads = [threading.Thread(target=long) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: (health(port)["running"], health(port)["waiting"]) == (1, 1))
    status, headers, said = ask(port, "POST", "/v1/completions", SHORT)
    assert (status, headers["retry-after"]) == (429, "1")
    assert error_of(said)["type"] == "rate_limit_error"
    for thread in threads:
        thread.join(60)
    assert answers(port)


def test_total_size_of_concurrent_bodies_is_limited(pair):
    with serving(pair, max_body=1000, body_timeout=60) as port, ExitStack() as stack:
        sent = head(1000) + b"x" * 990
        senders = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(17)]
        for one in senders:
            stack.enter_context(one).sendall(sent)
        (told,) = select.select(senders, [], [], 20)[0]
        status, headers, said = answer(told)
        assert (status, headers["retry-after"], headers["connection"]) == (429, "1", "close")
        assert "the bodies of concurrent requests exceed" in error_of(said)["message"]
        senders.remove(told)
        for one in senders[1:]:
            one.close()
        until(lambda: answers(port))


@pytest.mark.parametrize("fields", [{"n": 3}, {"prompt": ["a"] * 3}])
def test_too_many_choices_are_rejected_before_tokenization(port, pair, monkeypatch, fields):
    monkeypatch.setattr(pair.prompts, "tokens_of", lambda _: 1 / 0)
    status, _, said = ask(port, "POST", "/v1/completions", SHORT | fields)
    assert (status, error_of(said)["param"]) == (400, "n")
    assert "has 3 choices, but this server runs or queues at most 2" in error_of(said)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_options_that_ban_every_token_are_a_client_error(port, caplog, stream):
    body = SHORT | {"regex": "[0-9]", "min_new_tokens": 5, "stream": stream}
    status, _, said = ask(port, "POST", "/v1/completions", body)
    found = error_of(said.rpartition(b"data: ")[2].splitlines()[0])
    assert status == (200 if stream else 400)
    assert (found["type"], found["code"]) == ("invalid_request_error", "invalid_value")
    assert "leave no token to continue with" in found["message"]
    assert all(record.levelname == "WARNING" for record in caplog.records)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_slot_and_queue_position(port, slowly, stream):
    plain = {"speculative": {"off": True}, "stream": stream}  # some 8 seconds
    body = json.dumps(LONG | plain).encode()
    gone = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(2)]
    for one in gone:
        one.sendall(head(len(body)) + body)
    until(lambda: (health(port)["running"], health(port)["waiting"]) == (1, 1))
    gone[1].close()  # the one that waits
    until(lambda: (health(port)["running"], health(port)["waiting"]) == (1, 0), 2)
    gone[0].close()
    until(lambda: health(port)["running"] == 0, 2)
    assert answers(port)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_its_prompt_is_read_frees_the_slot(
    pair, port, monkeypatch, stream
):
    cancel, prefill = AsyncStream.cancel, pair.target.prefill
    chunks, has_left = [], threading.Event()

    def notice(self):
        cancel(self)
        has_left.set()

    def wait(tokens):
        chunks.append(len(tokens))
        has_left.wait(30)
        prefill(tokens)

    monkeypatch.setattr(AsyncStream, "cancel", notice)
    monkeypatch.setattr(pair, "_chunk_length", 64)
    monkeypatch.setattr(pair.target, "prefill", wait)
    pair.forget()
    body = json.dumps(LONG | {"prompt": [5] * 300, "max_tokens": 8, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", port), 30) as client:
        client.sendall(head(len(body)) + body)
        until(lambda: chunks)
    until(lambda: health(port)["running"] == 0)
    assert chunks == [64]
    assert pair.target.length == 64
    assert answers(port)


@pytest.mark.parametrize("num_left", [1, 20])
def test_request_of_maximum_length_is_answered(pair, port, num_left):
    context = pair.bundle.context_length
    body = LONG | {"prompt": [5] * (context - num_left), "max_tokens": context}
    status, _, said = ask(port, "POST", "/v1/completions", body)
    assert (status, json.loads(said)["choices"][0]["finish_reason"]) == (200, "length")
    assert json.loads(said)["usage"]["total_tokens"] == context


def test_request_timeout_ends_with_an_error(pair, slowly):
    with serving(pair, timeout=0.5) as port:
        status, headers, said = ask(port, "POST", "/v1/completions", LONG)
        assert (status, error_of(said)["code"]) == (504, "timeout")
        assert headers["x-should-retry"] == "false"
        status, _, said = ask(port, "POST", "/v1/completions", LONG | {"stream": True})
        assert status == 200
        assert b'"code": "timeout"' in said
        assert b"[DONE]" not in said
        until(lambda: health(port)["running"] == 0)


def test_error_within_a_round_is_reported_and_server_survives(port, monkeypatch, caplog):
    def fails(self, *arguments):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(SpeculativeDecoder, "_round", fails)
    status, _, said = ask(port, "POST", "/v1/completions", SHORT)
    assert (status, error_of(said)["type"]) == (500, "server_error")
    assert b"secret" not in said
    assert "ZeroDivisionError: secret" in caplog.text
    streamed = ask(port, "POST", "/v1/completions", SHORT | {"stream": True})[2]
    assert b"server_error" in streamed
    monkeypatch.undo()
    assert answers(port)
