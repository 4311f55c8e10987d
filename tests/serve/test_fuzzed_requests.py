"""Fuzzed requests over the wire: each path answers or refuses, in time and in bounded memory."""

import json
import os
import random
from http.client import HTTPConnection

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_fuzzed_bodies import PATHS, VALUES, mutated, nodes
from test_tool_families import FAMILIES

from served import MODEL, health, serving, until
from specedge.serve.fields import OPTIONS
from tool_pairs import scripted_pair

URLS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
MARKS = {"<tool_call>": True, "</tool_call>": True, "<think>": True, "</think>": True}
EXPECTED = {200, 400, 404, 413, 415}
# Fields of the bodies that exclude each other, or refer to what the server does not keep.
EXCLUSIVE = {
    "chat": ("response_format", "structured_outputs", "tools", "documents"),
    "completions": ("grammar", "guided_choice", "response_format", "regex"),
    "responses": ("previous_response_id", "text", "tools"),
    "messages": ("tools", "thinking"),
    "tokenize": ("prompt", "messages"),
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["<tool_call>", "</think>", "{{ x }}", "\ud800", "a" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def port():
    pipeline = scripted_pair(FAMILIES["Qwen3-Coder"][0] + "{# <think></think> #}", MARKS, slots=2)
    with serving(pipeline, model=MODEL, timeout=60, max_body=20_000, max_waiting=64) as port:
        yield port


@st.composite
def bodies(draw, name):
    """Return a body with values of any type at some places, or bytes of any kind."""
    base = json.loads(json.dumps(PATHS[name][1]))
    kept = draw(st.sampled_from([(), *((field,) for field in EXCLUSIVE.get(name, ()))]))
    for field in EXCLUSIVE.get(name, ()):
        if field not in kept:
            base.pop(field, None)
            base.pop("tool_choice" if field == "tools" else field, None)
    if name == "messages":  # results after their calls
        base["messages"] = [{"role": "user", "content": "a"}, *reversed(base["messages"])]
    if name == "responses":
        base["input"] = [item for item in base["input"] if item.get("type") != "item_reference"]
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=40) | st.sampled_from([b"{", b"[" * 5000, b"\xff", b"null"]))
    body = base
    if draw(st.integers(0, 3)):
        body = mutated(base, random.Random(draw(st.integers(0, 2**32))))
    for _ in range(draw(st.sampled_from([0, 0, 1]))):
        path = draw(st.sampled_from([path for path in nodes(body) if path] or [("zzz",)]))
        parent = body
        for key in path[:-1]:
            parent = parent[key]
        if isinstance(parent, dict):
            key = draw(st.sampled_from([path[-1], *OPTIONS]))
            parent[key] = draw(JSON_VALUES | st.sampled_from(VALUES))
        else:
            parent.append(draw(JSON_VALUES))
    for name in ("max_tokens", "max_output_tokens"):  # not to wait for long texts
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = min(body[name], 8)
    if draw(st.booleans()):
        body["max_tokens"] = 3
    return json.dumps(body).encode()


def answer_of(port, url, body):
    """Return the status of a request and the text of its response."""
    connection = HTTPConnection("127.0.0.1", port, timeout=90)
    connection.request("POST", url, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def check(port, name, body):
    status, text = answer_of(port, URLS[name], body)
    assert status in EXPECTED, text
    if status != 200:  # a model's text may be anything
        assert json.loads(text)["error"]["message"]
        assert len(text) < 2000
        assert "server_error" not in text
        assert "Traceback" not in text


def fuzz(port, name, count):
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[*HealthCheck],
        database=None,
    )
    @given(body=bodies(name))
    def run(body):
        check(port, name, body)

    run()


@pytest.mark.parametrize("name", URLS)
def test_fuzzed_request_is_answered_or_refused(port, name):
    fuzz(port, name, 15)
    until(lambda: not health(port)["running"])


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_memory_stays_flat_over_fuzzed_requests(port):
    for name in URLS:
        fuzz(port, name, 20)
    before = resident_bytes()
    for name in URLS:
        fuzz(port, name, 60)
    assert resident_bytes() - before < 48 * 2**20
