"""Log-probabilities of a response: texts, bytes, offsets and keys of tokens."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specedge.runtime.requests.stream import TextPiece
from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.runtime.text.detokenizer import Detokenizer
from specedge.serve import requests
from specedge.serve.chat_shapes import CompletionShaper
from specedge.serve.choices import ResponseChoice
from specedge.serve.logprobs import (
    MIN_LOGPROB,
    LogprobFormatter,
    MessageLogprobs,
    token_pieces,
)
from specedge.serve.output_parser import OutputParser
from specedge.serve.reasoning import ReasoningParser, ThinkingFormat
from specedge.serve.requests import ParserSettings
from tokenizer_kinds import KINDS, METASPACE, units_of, visible

FEW = settings(max_examples=40, deadline=None, derandomize=True)


def formatter(tokenizer, prompt=()):
    return LogprobFormatter(Detokenizer(tokenizer, prompt))


def decoded(tokenizer, prompt, tokens):
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(map(detokenizer.feed, tokens)) + detokenizer.flush()


def ids(*names):
    return [METASPACE.token_to_id(name) for name in names]


@st.composite
def samples(draw, name):
    """A prompt of whole characters and tokens after it, with alternatives of any text."""
    units = st.lists(st.sampled_from(units_of(name)), max_size=6)
    prompt = [token for unit in draw(units) for token in unit]
    any_token = st.integers(0, KINDS[name].get_vocab_size() - 1)
    tokens = draw(st.lists(any_token, max_size=6))
    tokens += [token for unit in draw(units) for token in unit]
    entries = []
    for i, token in enumerate(tokens):
        others = draw(st.lists(any_token, max_size=6, unique=True))
        top = [(other, -1.0 - k) for k, other in enumerate(others) if other != token]
        if draw(st.booleans()):
            top.insert(0, (token, -0.5 - i))
        entries.append(TokenLogprobs(token, -0.5 - i, top))
    return prompt, tokens, entries


@pytest.mark.parametrize("name", KINDS)
@FEW
@given(data=st.data())
def test_bytes_of_tokens_join_to_the_text(name, data):
    prompt, tokens, entries = data.draw(samples(name))
    content = formatter(KINDS[name], prompt).for_chat(entries)
    joined = b"".join(bytes(entry["bytes"] or ()) for entry in content)
    text = decoded(KINDS[name], prompt, tokens)
    assert joined.decode("utf-8", "replace") == text
    for entry in content:
        assert entry["bytes"] is None or "\\" in entry["token"] or (
            bytes(entry["bytes"]).decode() == entry["token"]
        )  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@FEW
@given(data=st.data())
def test_texts_and_offsets_of_tokens_are_those_of_the_text(name, data):
    prompt, tokens, entries = data.draw(samples(name))
    text = decoded(KINDS[name], prompt, tokens)
    fields = formatter(KINDS[name], prompt).for_completion(entries)
    content = formatter(KINDS[name], prompt).for_chat(entries)
    for label, entry, start in zip(fields["tokens"], content, fields["text_offset"], strict=True):
        if entry["bytes"] is not None and not label.startswith("bytes:"):
            assert text[start:].startswith(label)
    if not any(label.startswith("bytes:") for label in fields["tokens"]):
        shown = [e["token"] for e in content if e["bytes"] is not None]
        assert "".join(shown) == text


@pytest.mark.parametrize("name", KINDS)
@FEW
@given(data=st.data())
def test_each_token_has_its_own_key_and_value(name, data):
    prompt, _, entries = data.draw(samples(name))
    fields = formatter(KINDS[name], prompt).for_completion(entries)
    rows = zip(fields["tokens"], fields["token_logprobs"], fields["top_logprobs"], strict=True)
    for (label, value, top), entry in zip(rows, entries, strict=True):
        assert top[label] == value
        assert len(top) == len({entry.token, *(token for token, _ in entry.top)})


@FEW
@given(data=st.data())
def test_streamed_log_probabilities_are_those_of_the_whole(data):
    prompt, _, entries = data.draw(samples("Llama 2"))
    whole, parts = (formatter(METASPACE, prompt) for _ in range(2))
    cut = data.draw(st.integers(0, len(entries)))
    streamed = parts.for_chat(entries[:cut]) + parts.for_chat(entries[cut:])
    assert streamed == whole.for_chat(entries)


def test_parts_of_a_character_have_their_bytes():
    tokens = ids(*(f"<0x{byte:02X}>" for byte in "😀".encode()))
    entries = [TokenLogprobs(token, -1.0, []) for token in tokens]
    content = formatter(METASPACE, ids("x")).for_chat(entries)
    assert [entry["bytes"] for entry in content] == [[240], [159], [152], [128]]
    fields = formatter(METASPACE, ids("x")).for_completion(entries)
    assert fields["tokens"][:2] == [r"bytes:\xf0", r"bytes:\x9f"]
    assert fields["text_offset"] == [0, 0, 0, 0]


def test_tokens_of_sentencepiece_keep_their_space():
    entries = [TokenLogprobs(token, -1.0, [(token, -1.0)]) for token in ids("▁x", "▁=", "x")]
    fields = formatter(METASPACE, ids("x")).for_completion(entries)
    assert fields["tokens"] == [" x", " =", "x"]
    assert fields["text_offset"] == [0, 2, 4]
    assert formatter(METASPACE).for_completion(entries)["tokens"] == ["x", " =", "x"]


def test_tokens_of_equal_text_do_not_replace_each_other():
    text, byte = ids("x", "<0x78>")
    entry = TokenLogprobs(byte, -2.0, [(text, -0.5), (byte, -2.0)])
    (top,) = formatter(METASPACE).for_completion([entry])["top_logprobs"]
    assert top == {f"token_id:{text}": -0.5, "x": -2.0}


@pytest.mark.parametrize("size", [1, 2, 9])
def test_messages_have_the_log_probabilities_of_their_tokens(size):
    tokenizer = KINDS["byte-level"]
    text = "<think>def</think>x = 1 é 한"
    tokens = tokenizer.encode(text).ids
    messages = MessageLogprobs(
        LogprobFormatter(Detokenizer(tokenizer, [], {visible("byte-level")})),
        Detokenizer(tokenizer, [], {visible("byte-level")}),
        OutputParser(ReasoningParser(ThinkingFormat("<think>", "</think>"), False)),
    )
    for start in range(0, len(tokens), size):
        entries = [TokenLogprobs(token, -1.0, []) for token in tokens[start : start + size]]
        messages.add(entries)
    messages.end()
    (message,) = messages.messages
    assert bytes(b for entry in message for b in entry["bytes"]).decode() == "x = 1 é 한"


def test_pieces_of_tokens_are_texts_or_bytes():
    tokens = ids("▁x", "▁=", "<0xC3>", "<0xA9>", "<s>", "x")
    pieces = [entry["piece"] for entry in token_pieces(METASPACE, tokens)]
    assert pieces == ["x", " =", [0xC3], [0xA9], "<s>", "x"]


def test_text_offsets_continue_by_choice():
    body = {"prompt": "a", "n": 2, "logprobs": 0, "stream": True}
    choices, offsets = [ResponseChoice(prompt_tokens=ids("x")) for _ in range(2)], ([], [])
    request = requests.parse_completion(body, ParserSettings(10))
    shaper = CompletionShaper("pair", request, METASPACE)
    for index, names in [(0, ["▁def", "x"]), (1, ["▁x"]), (0, []), (0, ["1"]), (1, ["x", "x"])]:
        piece = TextPiece([], [TokenLogprobs(token, -1.0, []) for token in ids(*names)])
        (line,) = shaper.piece(index, piece, [], choices[index])
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        offsets[index].extend(choice["logprobs"]["text_offset"])
    assert offsets == ([0, 4, 5], [0, 2, 3])


def test_zero_probability_is_a_finite_logprob():
    token, *others = ids("x", "1", "▁=")
    entry = TokenLogprobs(token, -math.inf, [(others[0], -0.5), (others[1], -math.inf)])
    fields = formatter(METASPACE, [token]).for_completion([entry])
    assert fields["token_logprobs"] == [MIN_LOGPROB]
    assert fields["top_logprobs"] == [{"1": -0.5, " =": MIN_LOGPROB, "x": MIN_LOGPROB}]
    (chat,) = formatter(METASPACE).for_chat([entry])
    assert [one["logprob"] for one in (chat, *chat["top_logprobs"])] == [
        MIN_LOGPROB, -0.5, MIN_LOGPROB,
    ]  # fmt: skip
