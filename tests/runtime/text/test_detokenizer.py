import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from corpus import END, train_tokenizer
from specedge.runtime.text.detokenizer import Detokenizer, StopStrings


def metaspace_tokenizer():
    """Tokenizer like Llama 2's: strips the first space; unknown characters are bytes."""
    words = ["▁", "▁def", "▁x", "x", "▁=", "1"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTE_LEVEL = train_tokenizer(["def read_config(path): return naïve café"] * 3, 300)
METASPACE = metaspace_tokenizer()


def pieces(tokenizer, prompt, tokens):
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@given(st.text(max_size=40), st.text(max_size=40))
def test_pieces_join_to_the_text(prompt, text):
    tokens = BYTE_LEVEL.encode(text).ids
    assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode(prompt).ids, tokens)) == text


@given(st.lists(st.integers(1, 299), max_size=30))
def test_pieces_never_end_inside_a_character(tokens):
    *fed, _ = pieces(BYTE_LEVEL, [], tokens)
    assert not any(piece.endswith("\ufffd") for piece in fed)


def test_a_character_of_several_tokens_is_one_piece():
    tokens = BYTE_LEVEL.encode("é😀").ids
    assert len(tokens) > 2
    assert [p for p in pieces(BYTE_LEVEL, [], tokens) if p] in (["é", "😀"], ["é😀"])


def test_an_incomplete_character_at_the_end_is_shown_as_such():
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


def fed(stops, texts):
    strings = StopStrings(stops)
    return [strings.feed(text) for text in texts], strings


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_text_ends_before_the_stop_string_for_any_split(size):
    text = "one\ntwo\n\nthree"
    out, strings = fed(["\n\n"], [text[i : i + size] for i in range(0, len(text), size)])
    assert "".join(out) == "one\ntwo"
    assert strings.has_matched


def test_a_possible_stop_string_is_held_back():
    out, strings = fed(["###"], ["a#", "#", "b#"])
    assert out == ["a", "", "##b"]
    assert (strings.flush(), strings.has_matched) == ("#", False)


def test_the_earliest_of_several_stop_strings_counts():
    out, _ = fed(["cd", "b"], ["abcd"])
    assert out == ["a"]


@given(st.text("ab#", max_size=20), st.lists(st.text("ab#", min_size=1, max_size=3), max_size=3))
def test_text_without_a_match_is_complete(text, stops):
    out, strings = fed(stops, list(text))
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    joined = "".join(out) + strings.flush()
    assert joined == text if not found else text.startswith(joined)
    assert strings.has_matched == bool(found)


def test_special_tokens_that_are_shown_have_their_names_between_whole_characters(pipeline):
    tokenizer = pipeline.tokenizer
    ids, end = tokenizer.encode("aé b").ids, tokenizer.token_to_id("<|endoftext|>")
    shown, hidden = (Detokenizer(tokenizer, [], shown) for shown in ([end], []))
    tokens = [end, *ids, end, end, *ids]
    text = "".join(map(shown.feed, tokens)) + shown.flush()
    assert text == "<|endoftext|>aé b<|endoftext|><|endoftext|>aé b"
    assert "".join(map(hidden.feed, tokens)) == "aé baé b"
