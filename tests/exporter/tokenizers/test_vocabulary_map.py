"""Tokens of two tokenizers are mapped by the bytes that they add to a text."""

import random
from itertools import product

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from corpus import train_tokenizer
from specedge.errors import PairError
from specedge.exporter.tokenizers.vocabulary_map import map_vocabularies
from specedge.runtime.text.token_bytes import TokenBytes
from tokenizer_kinds import HIDDEN, KINDS, SHOWN, units_of

PAIRS = [pair for pair in product(KINDS, KINDS) if pair[0] != pair[1]]
EVERY_PAIR = pytest.mark.parametrize(("target", "draft"), PAIRS)
COMPLETE = ("byte-level", "Llama 2", "Gemma", "T5")  # every byte has a token


def size(tokenizer):
    return tokenizer.get_vocab_size()


def mapped(target, draft, equal=None):
    return map_vocabularies(target, draft, (size(target), size(draft)), equal or {})


def added_bytes(tokenizer, tokens):
    """The bytes that tokens add within a text."""
    text = TokenBytes(tokenizer, tokens[:1] * 9)
    return b"".join(map(text.add, tokens))


@EVERY_PAIR
def test_shared_tokens_add_the_same_bytes(target, draft):
    first, second = KINDS[target], KINDS[draft]
    shared = mapped(first, second)
    assert list(shared.target_ids) == sorted({*shared.target_ids})
    assert len({*shared.draft_ids}) == len(shared.draft_ids)
    special = {first.token_to_id(name) for name in (HIDDEN, SHOWN)}
    for token, draft_token in zip(shared.target_ids, shared.draft_ids, strict=True):
        if token in special:
            assert first.id_to_token(token) == second.id_to_token(draft_token)
        else:
            raw = added_bytes(first, [token])
            assert raw == added_bytes(second, [draft_token])
            assert raw
    assert special <= {*shared.target_ids}


@pytest.mark.parametrize(("target", "draft"), [pair for pair in PAIRS if pair[1] in COMPLETE])
def test_readings_add_the_bytes_of_the_text(target, draft):
    """Characters of several tokens, and bytes that are no character, among others."""
    first, second = KINDS[target], KINDS[draft]
    readings = mapped(first, second).readings
    hidden = [first.token_to_id(name) for name in (HIDDEN, SHOWN, "<unk>", "[UNK]")]
    units, generator = units_of(target), random.Random(0)
    for _ in range(30):
        text = [token for unit in generator.choices(units, k=6) for token in unit]
        text = [token for token in text if token not in hidden and added_bytes(first, [token])]
        read = readings.read(text, start=1)
        assert added_bytes(second, read) == added_bytes(first, text)
        assert len(read) >= len(text)


def byte_fallback(*words):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def byte_level():
    return train_tokenizer(["the cat, naïve 🎉"] * 3, 300)


def test_tokens_of_text_precede_those_of_the_byte_fallback():
    draft, target = byte_fallback("a", "▁the", "é"), byte_level()
    shared = mapped(target, draft)
    draft_of = dict(zip(shared.target_ids, shared.draft_ids, strict=True))
    a, line, the = (target.token_to_id(token) for token in ("a", "Ċ", "Ġthe"))
    assert draft_of[a] == draft.token_to_id("a")
    assert draft_of[line] == draft.token_to_id("<0x0A>")
    assert the is None or draft_of[the] == draft.token_to_id("▁the")
    back = mapped(draft, target)
    fallback = draft.token_to_id("<0x61>")
    assert fallback not in back.target_ids
    assert [*back.readings.of(fallback)] == [a]  # read all the same


def test_parts_of_characters_are_equal_by_their_bytes():
    target, draft = byte_level(), byte_fallback()
    shared = mapped(target, draft)
    draft_of = dict(zip(shared.target_ids, shared.draft_ids, strict=True))
    for byte, name in ((0xF0, "ð"), (0x9F, "Ł"), (0xC3, "Ã")):
        assert draft_of[target.token_to_id(name)] == draft.token_to_id(f"<0x{byte:02X}>")
    whole = target.encode("🎉", add_special_tokens=False).ids
    read = shared.readings.read(whole, start=1)
    assert [draft.id_to_token(token) for token in read] == ["<0xF0>", "<0x9F>", "<0x8E>", "<0x89>"]


def test_special_tokens_are_not_equal_to_ordinary_text():
    target = byte_level()
    target.add_tokens([AddedToken("<s>", normalized=False), "<unk>"])  # ordinary text here
    draft = byte_fallback("<", "s", ">")
    shared = mapped(target, draft)
    for name in ("<s>", "<unk>"):
        token = target.token_to_id(name)
        assert token not in shared.target_ids
        assert draft.token_to_id(name) not in shared.readings.of(token)
    spelled = shared.readings.of(target.token_to_id("<s>"))
    assert [draft.id_to_token(token) for token in spelled] == ["<", "s", ">"]
    back = mapped(draft, target)
    special = draft.token_to_id("<s>")
    assert special not in back.target_ids


def test_special_tokens_are_equal_by_name_or_function():
    target, draft = byte_level(), byte_fallback("a")
    target.add_special_tokens(["</s>", "<turn>"])
    end, turn = target.token_to_id("<|endoftext|>"), target.token_to_id("<turn>")
    close = target.token_to_id("</s>")
    shared = mapped(target, draft, {close: 1, end: 1, turn: 1})
    draft_of = dict(zip(shared.target_ids, shared.draft_ids, strict=True))
    assert draft_of[close] == draft.token_to_id("</s>") == 2
    assert draft_of[end] == 1
    assert turn not in draft_of  # a token of the draft is drafted as one token only
    assert [*shared.readings.of(turn)] == [1]


def test_vocabularies_without_a_common_token_are_refused():
    target, draft = (Tokenizer(models.WordLevel({word: 0}, word)) for word in "ab")
    with pytest.raises(PairError, match="no token in common"):
        mapped(target, draft)


def test_draft_that_covers_too_little_text_is_refused():
    target, draft = byte_level(), byte_fallback("a")
    shared = mapped(target, draft).restricted([1, 2, 3])
    assert "which cover 50.0% of a text" in shared.describe_coverage([1, 2, 9, 10], "a text")
    with pytest.raises(PairError, match=r"can draft 3 of the .* which cover 25\.0% of"):
        shared.describe_coverage([1, 8, 9, 10], "a text")


def test_a_token_that_the_draft_adds_at_the_end_is_not_read():
    draft = Tokenizer.from_str(KINDS["byte-level"].to_str())
    draft.add_special_tokens(["<s>", "</s>"])
    ids = {name: draft.token_to_id(name) for name in ("<s>", "</s>")}
    draft.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=list(ids.items())
    )
    assert mapped(KINDS["Gemma"], draft).readings.prefix == (ids["<s>"],)


def test_a_calibration_text_without_tokens_is_refused():
    shared = mapped(KINDS["Gemma"], KINDS["byte-level"])
    with pytest.raises(PairError, match=r"x\.txt has no tokens"):
        shared.describe_coverage([], "x.txt")
