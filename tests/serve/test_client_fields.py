"""Fields of other servers' clients, sent by the official OpenAI client or by hand."""

import itertools
import json
import logging

import pytest

from served import MODEL, PROMPT, ask, chat_pair, client, counts, serving

GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 12}
MESSAGES = [{"role": "user", "content": "A class."}]


@pytest.fixture(scope="module")
def alone():
    return chat_pair(1)


@pytest.fixture(scope="module")
def port():
    with serving(chat_pair(2), aliases=("default",)) as found:
        yield found


@pytest.fixture(scope="module")
def ai(port):
    with client(port) as found:
        yield found


def post(port, path, **body):
    status, headers, text = ask(port, "POST", path, body)
    return status, headers, json.loads(text)


def test_unknown_fields_are_reported_once_by_log_header_and_metric(port, caplog):
    body = {"messages": [*MESSAGES, {"role": "user", "content": "b", "opts": {}}], "chat_id": "a"}
    with caplog.at_level(logging.WARNING, "specedge"):
        for stream in (False, True, False):
            status, headers, _ = ask(
                port, "POST", "/v1/chat/completions", GREEDY | body | {"stream": stream}
            )
            assert (status, headers["x-specedge-ignored"]) == (200, "messages[].opts, chat_id")
    assert caplog.text.count("chat_id") == 1
    found = counts(port)
    assert found['specedge_ignored_fields_total{field="messages[].opts"}'] == 3
    assert "x-specedge-ignored" not in post(port, "/v1/completions", prompt="a", **GREEDY)[1]


def test_any_model_name_is_accepted_with_ignored_header(port):
    for name, note in (("gpt-4o", "model"), ("default", None), (MODEL, None), ("", None)):
        body = GREEDY | {"model": name, "messages": MESSAGES}
        status, headers, found = post(port, "/v1/chat/completions", **body)
        assert (status, headers.get("x-specedge-ignored")) == (200, note)
        assert found["model"] == MODEL


def test_strict_server_refuses_unknown_fields_and_models(alone):
    with serving(alone, strict=True) as port:
        refused = {"chat_id": 1}, {"model": "gpt-4o"}
        codes = [
            post(port, "/v1/completions", **GREEDY | {"prompt": "a"} | change)[2]["error"]["code"]
            for change in refused
        ]
    assert codes == ["unknown_field", "model_not_found"]


def prompt_scores(pair, tokens):
    """Return the log-probability of each token but the first, one pass each."""
    found = []
    for i in range(1, len(tokens)):
        entry = pair.generate(tokens[:i], 1, logit_bias={tokens[i]: 100}, logprobs=0).logprobs[0]
        assert entry.token == tokens[i]
        found.append(entry.logprob)
    return found


@pytest.mark.parametrize(("as_ids", "max_tokens"), [(False, 0), (True, 1)])
def test_echo_with_logprobs_scores_the_prompt(ai, alone, as_ids, max_tokens):
    tokens = alone.prompts.tokens(PROMPT)
    whole = ai.completions.create(
        prompt=tokens if as_ids else PROMPT, echo=True, logprobs=1,
        **GREEDY | {"max_tokens": max_tokens},
    )  # fmt: skip
    (choice,) = whole.choices
    assert choice.text.startswith(PROMPT)
    assert whole.usage.completion_tokens == max_tokens
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(tokens) + max_tokens
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(
        prompt_scores(alone, tokens), abs=1e-4
    )
    assert "".join(logprobs.tokens[: len(tokens)]) == PROMPT
    offsets = logprobs.text_offset
    texts = [PROMPT[a:b] for a, b in itertools.pairwise(offsets[: len(tokens)])]
    assert texts == logprobs.tokens[: len(tokens) - 1]


def test_streamed_echo_joins_to_the_same_text(ai):
    asked = GREEDY | {"prompt": PROMPT, "echo": True, "logprobs": 1}
    whole = ai.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in ai.completions.create(stream=True, **asked)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset"):
        parts = [getattr(chunk.logprobs, name) for chunk in chunks if chunk.logprobs]
        assert [*itertools.chain(*parts)] == getattr(whole.logprobs, name)


def test_long_prompt_is_scored_in_chunks(alone):
    tokens = (alone.prompts.tokens(PROMPT) * 40)[:150]
    found = alone.score(tokens, 1)
    assert [entry.token for entry in found] == tokens[1:]
    expected = prompt_scores(alone, tokens[:68])[60:]
    assert [entry.logprob for entry in found[60:67]] == pytest.approx(expected, abs=1e-4)
    assert alone.score(tokens, 1, lambda: True) == []


def test_prompt_logprobs_and_token_ids_have_vllm_format(port, ai, alone):
    tokens = alone.prompts.tokens(PROMPT)
    body = GREEDY | {"prompt": PROMPT, "prompt_logprobs": 1, "return_token_ids": True}
    (choice,) = post(port, "/v1/completions", **body)[2]["choices"]
    assert choice["prompt_token_ids"] == tokens
    assert choice["token_ids"] == alone.generate(PROMPT, 12).tokens
    first, second = choice["prompt_logprobs"][:2]
    assert first is None
    assert second[str(tokens[1])]["decoded_token"] == alone.tokenizer.decode([tokens[1]])
    chunks = ai.chat.completions.create(
        messages=MESSAGES, stream=True, extra_body={"return_token_ids": True}, **GREEDY
    )
    parts = [getattr(chunk.choices[0], "token_ids", None) or [] for chunk in chunks]
    assert [*itertools.chain(*parts)] == alone.chat(MESSAGES, 12).tokens


def test_special_tokens_in_completion_prompt_are_parsed(port, alone):
    template = "<|endoftext|>def"
    body = GREEDY | {"prompt": template, "return_token_ids": True}
    (choice,) = post(port, "/v1/completions", **body)[2]["choices"]
    assert choice["prompt_token_ids"][0] == alone.tokenizer.token_to_id("<|endoftext|>")


def test_stop_tokens_and_stop_strings_in_the_text(port, alone):
    generation = alone.generate(PROMPT, 12)
    third = generation.tokens[2]
    body = GREEDY | {"prompt": PROMPT, "stop_token_ids": [third], "ignore_eos": True}
    (choice,) = post(port, "/v1/completions", **body)[2]["choices"]
    assert choice["finish_reason"] == "stop"
    assert generation.text.startswith(choice["text"])
    assert len(choice["text"]) < len(generation.text)
    stop = generation.text[3:6]
    for include in (False, True):
        body = GREEDY | {"prompt": PROMPT, "stop": stop, "include_stop_str_in_output": include}
        (choice,) = post(port, "/v1/completions", **body)[2]["choices"]
        end = generation.text.index(stop) + (len(stop) if include else 0)
        assert choice["text"] == generation.text[:end]


def test_continuous_usage_counts_the_tokens_of_each_chunk(ai):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = ai.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options=options, **GREEDY
    )
    new = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert new == sorted(new)
    assert new[-1] == 12


def test_text_logit_bias_and_prompt_truncation(port, alone):
    text = alone.tokenizer.decode([alone.generate(PROMPT, 1).tokens[0]])
    body = GREEDY | {"prompt": PROMPT, "logit_bias": {text: -100}, "return_token_ids": True}
    (choice,) = post(port, "/v1/completions", **body)[2]["choices"]
    assert alone.generate(PROMPT, 1).tokens[0] not in choice["token_ids"]
    body = GREEDY | {"prompt": PROMPT, "truncate_prompt_tokens": 2, "return_token_ids": True}
    (choice,) = post(port, "/v1/completions", **body)[2]["choices"]
    assert choice["prompt_token_ids"] == alone.prompts.tokens(PROMPT)[-2:]
