"""Slow grammar compilation does not block other requests."""

import json
import socket
import threading
from contextlib import ExitStack

import pytest

from served import SHORT, answers, ask, chat_pair, error_of, head, health, serving, until
from specedge.runtime.text import compilation, grammars


@pytest.fixture(scope="module")
def pair():
    return chat_pair(1)


@pytest.fixture
def held(monkeypatch):
    """No grammar is compiled before this is set."""
    event, compiled = threading.Event(), grammars.compiled
    monkeypatch.setattr(grammars, "compiled", lambda *given: event.wait(60) and compiled(*given))
    yield event
    event.set()


def test_slow_grammar_compilation_does_not_block_other_requests(pair, held):
    with serving(pair, max_waiting=60) as port, ExitStack() as stack:
        for i in range(40):
            body = json.dumps(SHORT | {"regex": f"a{{{i + 1}}}"}).encode()
            sender = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            sender.sendall(head(len(body)) + body)
        until(lambda: health(port)["waiting"] == 40)
        assert answers(port)
        stack.close()  # disconnected clients stop waiting for compilation
        until(lambda: health(port)["waiting"] == 0)


def test_overrunning_compilation_does_not_block_other_grammars(pair, monkeypatch):
    monkeypatch.setattr(compilation, "PATIENCE", 0.05)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 2.0)
    event, compiled = threading.Event(), grammars.compiled

    def slowly(tokens, name, text):
        assert not text.startswith("slow") or event.wait(60)
        return compiled(tokens, name, text)

    monkeypatch.setattr(grammars, "compiled", slowly)
    answered = []

    def overrun(letter):
        answered.append(ask(port, "POST", "/v1/completions", SHORT | {"regex": f"slow{letter}"}))

    with serving(pair, max_waiting=9) as port:
        threads = [threading.Thread(target=overrun, args=letter) for letter in "abcd"]
        for thread in threads:
            thread.start()
        until(lambda: health(port)["waiting"] == 4)
        status, _, said = ask(port, "POST", "/v1/completions", SHORT | {"regex": "quick"})
        assert (status, json.loads(said)["choices"][0]["text"]) == (200, "quick")
        assert not answered
        for thread in threads:
            thread.join(60)
        event.set()
    assert [(status, error_of(said)["param"]) for status, _, said in answered] == [
        (400, "regex")
    ] * 4
    assert "takes more than 2 seconds to compile" in error_of(answered[0][2])["message"]


@pytest.fixture
def port(pair):
    with serving(pair, max_waiting=1) as found:
        yield found


def test_full_queue_rejects_request_before_grammar_compilation(port, held):
    found = []

    def regex(letter):
        found.append(ask(port, "POST", "/v1/completions", SHORT | {"regex": letter})[0])

    threads = [threading.Thread(target=regex, args=letter) for letter in "xy"]
    for thread in threads:
        thread.start()
    until(lambda: health(port)["waiting"] == 2)
    status, _, said = ask(port, "POST", "/v1/completions", SHORT | {"regex": "z"})
    assert (status, error_of(said)["code"]) == (429, "rate_limit_exceeded")
    held.set()
    for thread in threads:
        thread.join(60)
    assert found == [200, 200]


def test_request_timeout_includes_grammar_compilation(pair, held):
    with serving(pair, timeout=0.5) as port:
        for stream in (False, True):
            body = SHORT | {"regex": "tt", "stream": stream}
            status, _, said = ask(port, "POST", "/v1/completions", body)
            assert (status, error_of(said)["code"]) == (504, "timeout")
