"""Reuse of sampled tokens for prompts with the same text."""

import json

import pytest

from served import MODEL, ask, serving
from specedge.serve import sampled_tokens
from specedge.serve.sampled_tokens import SampledTokens
from templates import CHATML
from tool_pairs import scripted_pair

MARKS = {"<|im_start|>": True, "<|im_end|>": True}
USER = {"role": "user", "content": "Count."}


@pytest.fixture(scope="module")
def pair():
    return scripted_pair(CHATML, MARKS)


def split(tokenizer, text):
    """Return the tokens of a text, each of one character."""
    return [
        t for character in text for t in tokenizer.encode(character, add_special_tokens=False).ids
    ]


def test_sampled_tokens_are_reused_up_to_first_text_difference(pair):
    tokenizer = pair.tokenizer
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    start, end = map(tokenizer.token_to_id, MARKS)
    head, drawn = [start, *encode("user\nhello")], split(tokenizer, "return value")
    assert drawn != encode("return value")
    sampled = SampledTokens(tokenizer)
    assert sampled.apply(head) == (head, 0)
    sampled.add([*head, *drawn, end])
    for rest, kept in [
        ([end, *encode("\nmore")], len(drawn)),
        ([end], len(drawn)),
        ([], len(drawn)),
    ]:
        prompt = [*head, *encode("return value"), *rest]
        assert sampled.apply(prompt) == ([*head, *drawn, *rest], kept)
    other = [*head, *encode("return values"), end]
    begin = [*head, *split(tokenizer, "return")]
    assert sampled.apply(other) == ([*begin, *encode(" values"), end], 6)
    for prompt in ([start, *encode("user\nbye")], [*head, end, *encode("return value")]):
        assert sampled.apply(prompt) == (prompt, 0)
    spelled = [*head, *encode("return value"), *encode("<")]  # text of the mark is not the mark
    found, _ = sampled.apply(spelled)
    assert found[-1] == spelled[-1]
    assert end not in found


def test_conversation_replaces_its_prefix_and_oldest_are_evicted(pair, monkeypatch):
    monkeypatch.setattr(sampled_tokens, "MAX_SEQUENCES", 2)
    monkeypatch.setattr(sampled_tokens, "MAX_TOKENS", 10)
    sampled = SampledTokens(pair.tokenizer)
    for tokens in ([1], [1, 2], [3], [1, 2, 4]):
        sampled.add(tokens)
    assert [*sampled._sequences] == [[3], [1, 2, 4]]
    sampled.add([5] * 8)
    assert [*sampled._sequences] == [[5] * 8]
    sampled.add([6] * 11)
    assert not sampled._sequences


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize("reuse", [False, True])
def test_next_turn_keeps_the_tokens_of_the_answer(pair, path, reuse):
    tokenizer = pair.tokenizer
    with serving(pair, model=MODEL, reuse_sampled_tokens=reuse) as port:
        pair.text = None
        for seed in range(1, 80):  # until the model draws otherwise than the tokenizer splits
            body = {"messages": [USER], "temperature": 2, "seed": seed, "return_token_ids": True}
            _, headers, answer = ask(
                port, "POST", "/v1/chat/completions", body | {"max_tokens": 30, "ignore_eos": True}
            )
            choice = json.loads(answer)["choices"][0]
            drawn, text = choice["token_ids"], choice["message"]["content"]
            if (
                drawn != tokenizer.encode(text, add_special_tokens=False).ids
                and "\ufffd" not in text
            ):
                break
        assert "x-specedge-sampled-tokens" not in headers
        first = pair.asked
        pair.text = "x"
        history = [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "On."}]
        body = {"messages" if path == "chat/completions" else "input": history, "temperature": 0}
        status, headers, answer = ask(port, "POST", f"/v1/{path}", body)
    assert status == 200
    kept = pair.asked[len(first) : len(first) + len(drawn)] == drawn
    assert kept is reuse
    assert ("x-specedge-sampled-tokens" in headers) is reuse
    rendered = pair.asked_text
    plain = tokenizer.encode(rendered, add_special_tokens=False).ids
    assert (pair.asked == plain) is not reuse
    usage = json.loads(answer)["usage"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    if reuse:
        assert details["cached_tokens"] >= len(first) + len(drawn) - 1
