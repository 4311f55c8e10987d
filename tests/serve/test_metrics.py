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
REQUESTS = 'specedge_http_requests_total{handler="/v1/completions",status="%s"}'
ENDED = 'specedge_request_success_total{finished_reason="%s"}'


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


def has_counted(port, status, reason):
    """A text of two rounds at least, and its request."""
    until(lambda: health(port)["running"] == 0)
    values = counts(port)
    assert values["specedge_generation_tokens_total"] >= 2
    assert values["specedge_prompt_tokens_total"] >= 5
    assert values["specedge_spec_decode_num_drafts_total"] >= 2
    assert values["specedge_spec_decode_num_accepted_tokens_total"] > 0
    assert values["specedge_request_time_per_output_token_seconds_count"] == 0
    assert {name for name in values if "requests_total" in name and "v1" in name} == {
        REQUESTS % status
    }
    assert {name for name in values if "request_success_total" in name} == {ENDED % reason}


@pytest.mark.parametrize("stream", [False, True])
def test_timed_out_request_is_counted(pair, rounds, stream):
    rounds.append(lambda number: time.sleep(1.6 * (number == 6)))
    with serving(pair, timeout=1.5) as port:
        ask(port, "POST", "/v1/completions", LONG | {"stream": stream})
        has_counted(port, 504, "abort")


@pytest.mark.parametrize("stream", [False, True])
def test_failed_request_is_counted(port, rounds, stream):
    rounds.append(lambda number: 1 / (6 - number))
    ask(port, "POST", "/v1/completions", LONG | {"stream": stream})
    has_counted(port, 500, "error")


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_request_is_counted(port, rounds, stream):
    numbers = []
    rounds.append(lambda number: numbers.append(number) or time.sleep(0.02))
    body = json.dumps(LONG | {"stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(head(len(body)) + body)
        until(lambda: len(numbers) > 5)
    has_counted(port, "gone", "abort")


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
    values = counts(port)
    assert values["specedge_generation_tokens_total"] == 8
    assert values[REQUESTS % 200] == values[ENDED % "length"] == 1
    names = ("time_to_first_token", "request_queue_time", "request_time_per_output_token")
    assert [values[f"specedge_{name}_seconds_count"] for name in names] == [1, 1, 1]
    assert values["specedge_inter_token_latency_seconds_count"] > 0
    assert values["specedge_slots"] == 1
    assert values["specedge_num_requests_running"] == 0
    assert values["specedge_num_requests_waiting"] == 0


def test_draft_tokens_are_counted_by_outcome_and_position(port):
    _, _, body = ask(port, "POST", "/v1/completions", LONG | {"max_tokens": 40})
    usage = json.loads(body)["usage"]["speculative"]
    until(lambda: health(port)["running"] == 0)
    values = counts(port)
    spec_decode = "specedge_spec_decode_num_"
    by_position = [v for name, v in values.items() if "accepted_tokens_per_pos_total" in name]
    assert values[spec_decode + "draft_tokens_total"] == usage["num_drafted"]
    assert values[spec_decode + "accepted_tokens_total"] == usage["num_accepted"]
    assert sum(by_position) == usage["num_accepted"]
    assert by_position == sorted(by_position, reverse=True)
    assert by_position[0] <= values[spec_decode + "drafts_total"] <= usage["num_rounds"]


def test_repeated_prompt_hits_the_prefix_cache(port):
    for _ in range(2):
        ask(port, "POST", "/v1/completions", LONG | {"max_tokens": 4})
    until(lambda: health(port)["running"] == 0)
    values = counts(port)
    queries, hits = (values[f"specedge_prefix_cache_{name}_total"] for name in ("queries", "hits"))
    assert queries == values["specedge_prompt_tokens_total"]
    assert queries / 2 - 2 <= hits < queries


def test_tokens_per_pass_are_those_of_the_target(pair):
    name = "specedge_iteration_tokens_total"
    with serving(pair) as port:
        before = counts(port)
        _, _, body = ask(port, "POST", "/v1/completions", LONG | {"max_tokens": 40})
        values = counts(port) - before
    num_rounds = json.loads(body)["usage"]["speculative"]["num_rounds"]
    assert values[f"{name}_count"] == values[f'{name}_bucket{{le="+Inf"}}'] >= num_rounds
    assert 1 < values[f"{name}_sum"] / values[f"{name}_count"] <= 8
    assert values[f'{name}_bucket{{le="1.0"}}'] < values[f'{name}_bucket{{le="8.0"}}']


def test_times_of_tokens_exclude_client_delays(pair):
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
    text = sent[-1]["body"].decode()
    lines = [line for line in text.splitlines() if line[0] != "#"]
    sums = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    assert 0 < sums["specedge_time_to_first_token_seconds_sum"] < 0.9
    assert 0 < sums["specedge_inter_token_latency_seconds_sum"] < 0.9
