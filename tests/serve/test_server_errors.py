"""Faults of the server are 500s in OpenAI's format, with their traceback in the log."""

import pytest

from served import SHORT, answers, ask, chat_pair, error_of, serving
from specedge.errors import BundleError
from specedge.serve import requests
from specedge.serve.chat_shapes import CompletionShaper


@pytest.fixture(scope="module")
def pair():
    return chat_pair(1)


@pytest.fixture
def port(pair):
    with serving(pair) as found:
        yield found


def fails(error):
    def fail(*arguments, **options):
        raise error

    return fail


@pytest.mark.parametrize("error", [TypeError("top_p secret"), BundleError("the tokenizer: secret")])
def test_error_before_generation_is_a_logged_500(port, pair, monkeypatch, caplog, error):
    monkeypatch.setattr(pair.prompts, "completion_tokens", fails(error))
    status, _, said = ask(port, "POST", "/v1/completions", SHORT)
    assert (status, error_of(said)["type"], error_of(said)["param"]) == (500, "server_error", None)
    assert b"secret" not in said or isinstance(error, BundleError)  # whose message is for users
    assert "Traceback" in caplog.text
    assert f"{type(error).__name__}: {error}" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_error_in_response_formatting_is_logged(port, monkeypatch, caplog, stream):
    for name in ("body", "piece"):
        monkeypatch.setattr(CompletionShaper, name, fails(KeyError("secret")))
    status, _, said = ask(port, "POST", "/v1/completions", SHORT | {"stream": stream})
    assert status == (200 if stream else 500)
    assert b"server_error" in said
    assert b"secret" not in said
    assert "KeyError: 'secret'" in caplog.text
    monkeypatch.undo()
    assert answers(port)


def test_error_in_request_parsing_is_logged_once(port, monkeypatch, caplog):
    monkeypatch.setattr(requests, "parse_options", fails(ZeroDivisionError("secret")))
    status, _, said = ask(port, "POST", "/v1/completions", SHORT)
    assert (status, error_of(said)["code"]) == (500, "failed")
    assert caplog.text.count("Traceback") == 1
