from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import END, train_tokenizer
from specedge.runtime.text.detokenizer import (
    Detokenizer,
    FinishReason,
    TextAssembler,
    TextBuffer,
    TokenOutcome,
)
from tokenizer_kinds import KINDS, METASPACE, SHOWN, units_of, visible

BYTE_LEVEL = train_tokenizer(["def read_config(path): return naïve café"] * 3, 300)
FEW = settings(max_examples=60, deadline=None, derandomize=True)


def pieces(tokenizer, prompt, tokens, shown=()):
    detokenizer = Detokenizer(tokenizer, prompt, shown)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@given(*2 * [st.text(max_size=40).filter(lambda text: "<|" not in text)])
def test_pieces_join_to_the_text(prompt, text):
    tokens = BYTE_LEVEL.encode(text).ids
    assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode(prompt).ids, tokens)) == text


@pytest.mark.parametrize("name", KINDS)
@FEW
@given(data=st.data())
def test_pieces_continue_the_decoding_of_any_prompt(name, data):
    tokenizer = KINDS[name]
    units = data.draw(st.lists(st.sampled_from(units_of(name)), max_size=12))
    cut = data.draw(st.integers(0, len(units)))
    before, after = [*chain(*units[:cut])], [*chain(*units[cut:])]
    part = data.draw(st.integers(0, max(0, len(units[cut]) - 1) if units[cut:] else 0))
    text = "".join(pieces(tokenizer, before + after[:part], after[part:]))
    assert tokenizer.decode(before) + text == tokenizer.decode(before + after)


@FEW
@given(st.lists(st.integers(0, 299), max_size=30), st.integers(0, 30))
def test_invalid_bytes_are_decoded_as_the_tokenizer_does(tokens, cut):
    text = "".join(pieces(BYTE_LEVEL, [], tokens))
    assert text == BYTE_LEVEL.decode(tokens)
    *fed, _ = pieces(BYTE_LEVEL, [], tokens)
    whole = BYTE_LEVEL.decode(tokens[: len(fed)]).removeprefix("".join(fed))
    # At most one incomplete character is held back, or the two bytes of a truncated surrogate.
    assert whole in ("", "\ufffd", "\ufffd\ufffd")


@FEW
@given(st.lists(st.integers(0, 255), max_size=30))
def test_invalid_runs_of_byte_tokens_keep_their_characters(tokens):
    spelled = [METASPACE.token_to_id(f"<0x{byte:02X}>") for byte in tokens]
    text = "".join(pieces(METASPACE, [METASPACE.token_to_id("x")], spelled))
    assert text == bytes(tokens).decode("utf-8", "replace")


def test_invalid_bytes_are_emitted_after_the_longest_character():
    tokens = [METASPACE.token_to_id("<0x80>")] * 4000
    fed = "".join(pieces(METASPACE, [], tokens)[:-1])
    assert fed == "\ufffd" * 4000


@pytest.mark.parametrize("name", KINDS)
@FEW
@given(data=st.data())
def test_words_after_a_shown_special_token_keep_their_space(name, data):
    tokenizer, shown = KINDS[name], visible(name)
    word, *units = units_of(name)[2:]
    before, after = (
        [*word, *chain(*data.draw(st.lists(st.sampled_from(units), max_size=4)))] for _ in range(2)
    )
    text = "".join(pieces(tokenizer, [], [*before, shown, *after], [shown]))
    assert text.replace(SHOWN, "") == tokenizer.decode(before + after)


@pytest.mark.parametrize("prompt", ["한국어", "a한국어", "❤❤❤"])
def test_a_run_of_byte_tokens_continues_across_the_end_of_the_prompt(prompt):
    tokens = METASPACE.encode("한국어").ids
    assert len(tokens) > 8
    prompt = METASPACE.encode(prompt).ids
    assert "".join(pieces(METASPACE, prompt, tokens[-9:])) == "한국어"


def test_a_stop_string_of_byte_tokens_ends_the_text():
    prompt, tokens = METASPACE.encode("❤❤❤").ids, METASPACE.encode("❤❤❤x1").ids[-11:]
    assembler = TextAssembler(
        METASPACE, prompt, stops=["❤x"], ends=frozenset(), limit=99, at_limit=FinishReason.LENGTH
    )
    text = assembler.feed([(token, TokenOutcome.PLAIN) for token in tokens])
    assert (text, assembler.finish_reason) == ("❤❤", FinishReason.STOP)


def test_a_character_of_several_tokens_is_one_piece():
    tokens = BYTE_LEVEL.encode("é😀").ids
    assert len(tokens) > 2
    assert [p for p in pieces(BYTE_LEVEL, [], tokens) if p] in (["é", "😀"], ["é😀"])


def test_incomplete_final_character_is_replacement_character():
    tokens = BYTE_LEVEL.encode("a😀").ids[:-1]
    assert "".join(pieces(BYTE_LEVEL, [], tokens)) == "a\ufffd"


def test_a_prompt_that_ends_inside_a_character_is_completed():
    tokens = BYTE_LEVEL.encode("😀").ids
    assert "".join(pieces(BYTE_LEVEL, tokens[:2], tokens[2:])) == "😀"


def test_a_replacement_character_in_the_prompt_is_not_repeated():
    prompt, tokens = BYTE_LEVEL.encode("ab\ufffd").ids, BYTE_LEVEL.encode("cd").ids
    assert "".join(pieces(BYTE_LEVEL, prompt, tokens)) == "cd"


def test_the_first_space_after_the_prompt_is_kept():
    prompt, tokens = METASPACE.token_to_id("▁def"), METASPACE.token_to_id("▁x")
    assert "".join(pieces(METASPACE, [prompt], [tokens])) == " x"


def test_special_tokens_are_not_shown():
    end = BYTE_LEVEL.token_to_id(END)
    tokens = [*BYTE_LEVEL.encode("a").ids, end, *BYTE_LEVEL.encode("b").ids]
    assert "".join(pieces(BYTE_LEVEL, [], tokens)) == "ab"


def taken(buffer):
    return "".join(span.text for span in buffer.take())


def fed(stops, texts):
    buffer = TextBuffer(stops)
    out = []
    for text in texts:
        buffer.add(text)
        out.append(taken(buffer))
    return out, buffer


def rest(buffer):
    buffer.flush()
    return taken(buffer)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_text_ends_before_the_stop_string_for_any_split(size):
    text = "one\ntwo\n\nthree"
    out, buffer = fed(["\n\n"], [text[i : i + size] for i in range(0, len(text), size)])
    assert "".join(out) == "one\ntwo"
    assert buffer.has_matched


def test_a_possible_stop_string_is_held_back():
    out, buffer = fed(["###"], ["a#", "#", "b#"])
    assert out == ["a", "", "##b"]
    assert (rest(buffer), buffer.has_matched) == ("#", False)


def test_earliest_stop_string_wins():
    out, _ = fed(["cd", "b"], ["abcd"])
    assert out == ["a"]


@given(st.text("ab#", max_size=20), st.lists(st.text("ab#", min_size=1, max_size=3), max_size=3))
def test_text_without_a_match_is_complete(text, stops):
    out, buffer = fed(stops, list(text))
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    joined = "".join(out) + rest(buffer)
    assert joined == text if not found else text.startswith(joined)
    assert buffer.has_matched == bool(found)


def test_shown_special_tokens_do_not_split_characters(pipeline):
    tokenizer = pipeline.tokenizer
    ids, end = tokenizer.encode("aé b").ids, tokenizer.token_to_id("<|endoftext|>")
    shown, hidden = (Detokenizer(tokenizer, [], shown) for shown in ([end], []))
    tokens = [end, *ids, end, end, *ids]
    text = "".join(map(shown.feed, tokens)) + shown.flush()
    assert text == "<|endoftext|>aé b<|endoftext|><|endoftext|>aé b"
    assert "".join(map(hidden.feed, tokens)) == "aé baé b"
