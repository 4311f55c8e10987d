"""Grammars that take long to compile: who waits for one keeps nobody else."""

import json
import socket
import threading
from contextlib import ExitStack

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")
pytest.importorskip("llguidance", reason="needs the grammar extra")

from served import SHORT, answers, ask, chat_pair, error_of, head, health, serving, until
from specedge.runtime.text import grammars


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


def test_grammars_that_compile_slowly_keep_others_from_nothing(pair, held):
    with serving(pair, max_waiting=60) as port, ExitStack() as stack:
        for i in range(40):
            body = json.dumps(SHORT | {"regex": f"a{{{i + 1}}}"}).encode()
            sender = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            sender.sendall(head(len(body)) + body)
        until(lambda: health(port)["waiting"] == 40)
        assert answers(port)
        stack.close()  # who goes away waits for no grammar
        until(lambda: health(port)["waiting"] == 0)


@pytest.fixture
def port(pair):
    with serving(pair, max_waiting=1) as found:
        yield found


def test_who_cannot_wait_hears_so_before_its_grammar_is_compiled(port, held):
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


def test_the_time_of_a_request_is_its_grammars_too(pair, held):
    with serving(pair, timeout=0.5) as port:
        for stream in (False, True):
            body = SHORT | {"regex": "tt", "stream": stream}
            status, _, said = ask(port, "POST", "/v1/completions", body)
            assert (status, error_of(said)["code"]) == (504, "timeout")
