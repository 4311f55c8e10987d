"""Text spans keep the outcome of their tokens, even if output is delayed."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import TableModel
from specedge.runtime.decoding.protocols import Round
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.text.detokenizer import TextBuffer, TextSpan, TokenOutcome, token_outcomes

A, R, B, P = TokenOutcome.ACCEPTED, TokenOutcome.RECOVERED, TokenOutcome.BONUS, TokenOutcome.PLAIN


@pytest.mark.parametrize(
    ("num_drafted", "num_accepted", "expected"),
    [(0, 0, [P]), (1, 0, [R]), (1, 1, [A, B]), (3, 0, [R]), (3, 2, [A, A, R]), (2, 2, [A, A, B])],
)
def test_last_token_of_round_is_recovered_bonus_or_plain(num_drafted, num_accepted, expected):
    round_ = Round([7] * (num_accepted + 1), num_drafted, num_accepted)
    assert token_outcomes(round_) == expected


@given(
    st.lists(st.tuples(st.text("ab", max_size=3), st.sampled_from(TokenOutcome))),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
    st.data(),
)
def test_spans_join_to_the_text_wherever_it_is_held_back(tokens, stops, data):
    buffer, taken = TextBuffer(stops), []
    outcomes = [outcome for text, outcome in tokens for _ in text]
    for piece, outcome in tokens:
        buffer.add(piece, outcome)
        if data.draw(st.booleans()):
            taken += buffer.take()
    buffer.flush()
    taken += buffer.take()
    text = "".join(span.text for span in taken)
    whole = "".join(piece for piece, _ in tokens)
    assert whole.startswith(text)
    assert buffer.has_matched == any(stop in whole for stop in stops) == (text != whole)
    assert [span.outcome for span in taken for _ in span.text] == outcomes[: len(text)]
    assert all(span.text for span in taken)


def scripted(pipeline, target, draft):
    """A pipeline whose models are sure of their tokens, after a prompt of one token."""

    def model(script):
        def distribution(text):
            row = np.zeros(pipeline.bundle.target.vocab_size)
            row[script[min(len(text), len(script)) - 1]] = 1
            return row

        return TableModel(distribution)

    bundle = dataclasses.replace(pipeline.bundle, end_tokens=(0,))
    return Pipeline(bundle, pipeline.tokenizer, model(target), model(draft))


def spelled(pipeline, text, *wrong):
    """Byte tokens of a text, and the same with other tokens at some places."""
    alphabet = pipeline.tokenizer.get_vocab()
    tokens = [t for c in text for t in pipeline.tokenizer.encode(c).ids]
    draft = [alphabet["!"] if i in wrong else token for i, token in enumerate(tokens)]
    return tokens, draft


def test_a_character_belongs_to_the_token_that_completes_it(pipeline):
    tokens, draft = spelled(pipeline, "x😀yz", 3)
    assert len(tokens) == 7  # x, four bytes, y, z
    made = scripted(pipeline, tokens, draft).generate([5], 7, num_draft_tokens=2)
    # rounds: x + two bytes (A, A, B); one byte (R); the last byte, y, z (A, A, B)
    assert [len(round_.tokens) for round_ in made.rounds] == [3, 1, 3]
    assert made.spans == [TextSpan("x", A), TextSpan("😀", A), TextSpan("y", A), TextSpan("z", B)]


def test_an_incomplete_character_at_the_end_belongs_to_its_last_token(pipeline):
    tokens, draft = spelled(pipeline, "x😀", 2)
    made = scripted(pipeline, tokens, draft).generate([5], 3, num_draft_tokens=1)
    assert made.spans == [TextSpan("x", A), TextSpan("\ufffd", P)]  # one token was wanted
    ended = scripted(pipeline, [*tokens[:3], 0], [*draft[:3], 0])
    assert ended.generate([5], 9, num_draft_tokens=1).spans == [
        TextSpan("x", A),
        TextSpan("\ufffd", R),
    ]


def test_held_back_text_keeps_the_outcome_of_its_token(pipeline):
    tokens, draft = spelled(pipeline, "a##b##c", 1)
    made = scripted(pipeline, tokens, draft).stream([5], 7, num_draft_tokens=3, stop="##c")
    pieces = list(made.traced())
    assert pieces == [
        [TextSpan("a", A)],
        [TextSpan("#", R), TextSpan("#", A), TextSpan("b", A)],
    ]
    assert made.generation.text == "a##b"
    assert made.generation.finish_reason == "stop"


def test_stop_string_within_token_truncates_its_span(pipeline):
    token = pipeline.tokenizer.encode("return").ids
    assert len(token) == 1
    made = scripted(pipeline, token, token).generate([5], 5, num_draft_tokens=1, stop="turn")
    assert made.spans == [TextSpan("re", A)]


@pytest.mark.parametrize(("k", "temperature"), [(0, 0.0), (1, 1.0), (4, 0.0)])
def test_spans_join_to_the_text_and_agree_with_the_counts(pipeline, k, temperature):
    options = {"temperature": temperature, "seed": 3, "num_draft_tokens": k, "ignore_eos": True}
    stream = pipeline.stream("def read_config(path):", 80, **options)
    pieces = ["".join(span.text for span in piece) for piece in stream.traced()]
    made = stream.generation
    assert pieces == list(pipeline.stream("def read_config(path):", 80, **options))
    assert [span for span in made.spans if not span.text] == []
    assert "".join(span.text for span in made.spans) == made.text == "".join(pieces)
    assert len(made.spans) == 80  # this text is ASCII: each token has its own
    counts = {fate: sum(span.fate == fate for span in made.spans) for fate in TokenOutcome}
    if k == 0:
        assert counts == {A: 0, R: 0, B: 0, P: 80}
    else:
        kept = made.stats.num_accepted - counts[A]
        assert 0 <= kept <= 1  # the last round may overshoot by one
        assert min(counts[A], counts[R], counts[B]) > 0
        assert counts[P] <= 1  # nothing is drafted for a last token
