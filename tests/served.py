"""A server of the embedded pair on a loopback port, and a pair that chats."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections import Counter
from contextlib import contextmanager

import specedge
from specedge.bundle import store
from specedge.runtime.requests.pipeline import Pipeline
from specedge.serve.app import ServerSettings, make_app
from specedge.serve.server import GracefulServer, listen
from templates import CHATML

MODEL = "python-9m"
PROMPT = "def read_config(path):"
SHORT = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def error_of(said):
    """The error in an answer's body."""
    return json.loads(said)["error"]


def chat_pair(slots, folder=None, template=CHATML):
    """The pair of a folder, or the embedded one, with a chat template: that answers with Python."""
    pipeline = specedge.load(folder or store.embedded_folder(), slots=slots)
    bundle = dataclasses.replace(pipeline.bundle, chat_template=template).at(pipeline.bundle.folder)
    first, *more = pipeline.slots.all
    more = [(slot.target, slot.draft) for slot in more]
    return Pipeline(bundle, pipeline.tokenizer, first.target, first.draft, more=more)


@contextmanager
def serving(pipeline, **settings):
    """The port of a server that runs meanwhile."""
    import uvicorn

    listening, ready = listen("127.0.0.1", 0), threading.Event()
    config = uvicorn.Config(
        make_app(pipeline, ServerSettings(**settings)), http="h11", lifespan="off", log_config=None
    )
    server = GracefulServer(config, ready.set)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        assert ready.wait(20)
        yield listening.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        listening.close()
    assert not thread.is_alive()


def client(port, key="none", **options):
    import openai

    url = f"http://127.0.0.1:{port}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60, **options)


def ask(port, method, path, body=b"", **headers):
    """A bare request: its status, its headers in lower case, and its body."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Connection: close"]
    given = {"Content_Type": "application/json", "Content_Length": len(body), "Host": "localhost"}
    given |= headers
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return answer(connection)


def answer(connection):
    """Return a server's bytes until it closes the connection."""
    said = b""
    while part := connection.recv(2**16):
        said += part
    head, _, body = said.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


def head(length, kind="application/json"):
    """Return the head of an HTTP request with the given content length."""
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def answers(port):
    """Return True if a server answers a short request."""
    status, _, said = ask(port, "POST", "/v1/completions", SHORT)
    return status == 200 and bool(json.loads(said)["choices"][0]["text"])


def health(port):
    return json.loads(ask(port, "GET", "/health")[2])


def counts(port):
    """Return the values of /metrics by name and labels; missing ones are 0."""
    lines = ask(port, "GET", "/metrics")[2].decode().splitlines()
    given = (line.rpartition(" ") for line in lines if line[0] != "#")
    return Counter({name: float(value) for name, _, value in given})


def until(condition, seconds=20):
    """Wait for a condition, as long as it may take on a slow machine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)
