"""Masks of grammars, and refused grammars."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grammars import END, allowed_of, constraint, texts_of
from specedge.errors import OptionError, SpecEdgeError
from specedge.request import DrafterName, GenerationRequest
from specedge.runtime.sampling.history import History
from specedge.runtime.text import grammars
from specedge.runtime.text.grammars import NUM_CACHED, Grammars

WORDS = ["a", "ab", "abca", "cab", "bbb"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cd"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def allowed(one, *new):
    return [int(token) for token in np.flatnonzero(~one.banned(History([7, 8], new)))]


def test_the_mask_depends_on_the_text_only():
    one, texts = constraint("regex", "|".join(WORDS)), texts_of(*WORDS)
    beginnings = sorted({text[:i] for text in texts for i in range(len(text) + 1)})
    beginnings += [(*text, *[END] * n) for text in sorted(texts) for n in (1, 2)]
    order = np.random.default_rng(0).permutation(5 * len(beginnings))
    for i in order:
        new = beginnings[i % len(beginnings)]
        assert allowed(one, *new) == allowed_of(texts, new)


def test_a_complete_text_allows_end_tokens_only():
    one = constraint("regex", "ab", ends=(END, 2))
    assert allowed(one) == [0]
    assert allowed(one, 0, 1) == allowed(one, 0, 1, 2, 0) == [2, END]
    assert allowed(one, 0) == [1]


def test_a_grammar_violation_is_an_error_of_its_request_only():
    one = constraint("regex", "ab|cc")
    for _ in range(2):
        with pytest.raises(OptionError, match="violates the grammar"):
            one.banned(History([], [0, 0]))
        assert allowed(one, 0) == [1]
        assert allowed(one, 2) == [2]


def test_a_llguidance_failure_is_limited_to_its_request(monkeypatch):
    monkeypatch.setattr(grammars, "MAX_RENEWALS", 0)
    one = constraint("grammar", 'start: "b" "a" | "a" rest\nrest: "c" rest')
    one._mixed = False  # no other text has used its matcher
    for _ in range(2):
        assert allowed(one, 0) == [2]
        with pytest.raises(OptionError, match=r"cannot be applied to this text: .*Too many items"):
            one.banned(History([], [0, 2]))
        assert allowed(one, 1) == [0]


def test_a_mask_is_computed_once_for_draft_and_target(monkeypatch):
    one, asked = constraint("regex", "[ab]*c"), []
    mask = one._mask
    monkeypatch.setattr(one, "_mask", lambda: asked.append(list(one._read)) or mask())
    text = History([7], [0, 1])
    for _ in range(2):
        for i in range(4):
            one.banned(text.then([1] * i))
    assert len(asked) == 4
    text.extend([1, 0])
    one.banned(text)
    assert asked[-1] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"regex": "(a"}, "regex is rejected by llguidance: .*unclosed group"),
        ({"grammar": "start: rest"}, "grammar is rejected by llguidance: .*unknown name"),
        ({"grammar": "start: " + "(" * 10**5}, "grammar is rejected.*too deeply nested"),
        ({"json_schema": {"type": "strin"}}, "json_schema is rejected by llguidance: Invalid type"),
        ({"json_schema": {"not": {}}}, r"json_schema is rejected by llguidance: .*not"),
        ({"json_schema": '{"minLength": 5, "maxLength": 2, "type": "string"}'}, "Unsatisfiable"),
        ({"json_schema": {"$ref": "http://localhost:1/x"}}, "json_schema is rejected"),
    ],
)
def test_unsatisfiable_grammar_is_rejected_before_generation(pipeline, options, reason):
    with pytest.raises(OptionError, match=reason) as caught:
        pipeline.stream("a", 9, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_grammar_without_allowed_tokens_is_rejected(pipeline):
    with pytest.raises(OptionError, match=r"grammar.*leave no token"):
        pipeline.generate("a", 9, regex="a", min_new_tokens=9)


def test_compiled_grammars_are_cached(pipeline, monkeypatch):
    made, compiled = [], grammars.compiled

    def counted(*given):
        made.append(given[-1])
        return compiled(*given)

    monkeypatch.setattr(grammars, "compiled", counted)
    kept = Grammars(pipeline.bundle, pipeline.tokenizer)
    for text in ["a", "b", "a", *"c" * 3, *map(str, range(NUM_CACHED)), "a"]:
        kept.constraint(GenerationRequest(regex=text))
    assert made == ["a", "b", "c", *map(str, range(NUM_CACHED)), "a"]


def test_concurrent_requests_share_a_compilation(pipeline, monkeypatch):
    made, compiled = [], grammars.compiled

    def slowly(*given):
        made.append(given[-1])
        time.sleep(0.1)
        return compiled(*given)

    monkeypatch.setattr(grammars, "compiled", slowly)
    kept = Grammars(pipeline.bundle, pipeline.tokenizer)
    kept.constraint(GenerationRequest(regex="z"))  # hands the tokenizer over
    with ThreadPoolExecutor(6) as threads:
        found = list(
            threads.map(lambda text: kept.constraint(GenerationRequest(regex=text)), "ab" * 3)
        )
        wrong = [threads.submit(kept.constraint, GenerationRequest(regex="(a")) for _ in range(2)]
    assert all(found)
    assert all(isinstance(one.exception(), OptionError) for one in wrong)
    assert sorted(made[:3]) == ["a", "b", "z"]
    assert set(made[3:]) == {"(a"}


def spaces_of(pipeline, guidance, space):
    """Return how many whitespace characters may begin an object, up to forty."""
    schema = {"type": "object", "required": ["a"]} | guidance
    one = pipeline.grammars.constraint(GenerationRequest(json_schema=schema))
    begin, (more,) = (pipeline.prompts.tokens(text) for text in ("{", space))
    for count in range(40):
        if one.banned(History([7], [*begin, *[more] * count]))[more]:
            return count
    return 40


@pytest.mark.parametrize(
    ("guidance", "most"),
    [
        ({}, 1),
        ({"x-guidance": {"coerce_one_of": True}}, 1),
        ({"x-guidance": {"whitespace_flexible": True}}, 40),
        ({"x-guidance": {"whitespace_flexible": False}}, 0),
        ({"x-guidance": {"whitespace_pattern": "[ ]{0,7}"}}, 7),
    ],
)
def test_whitespace_is_bounded_by_default(pipeline, guidance, most):
    assert spaces_of(pipeline, guidance, " ") == most
    assert guidance or spaces_of(pipeline, guidance, "\n") == 1


@pytest.mark.parametrize("written", [{}, {"indent": 4}, {"separators": (",", ":")}])
def test_common_json_formatting_matches_the_schema(pipeline, written):
    text = json.dumps({"name": "Al", "age": 30, "tags": ["a", "b"]}, **written)
    schema = {name: value for name, value in PERSON.items() if name != "x-guidance"}
    one = pipeline.grammars.constraint(GenerationRequest(json_schema=schema))
    tokens = pipeline.prompts.tokens(text)
    assert np.flatnonzero(~one.banned(History([7], tokens))).tolist() == [
        *pipeline.bundle.end_tokens
    ]


def test_a_bundle_without_end_tokens_is_refused(pipeline):
    class Endless:
        end_tokens, target = (), pipeline.bundle.target

    with pytest.raises(OptionError, match="regex needs an end token"):
        Grammars(Endless, pipeline.tokenizer).constraint(GenerationRequest(regex="a"))


def test_a_missing_llguidance_names_the_pip_command(pipeline, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(SpecEdgeError, match=r'pip install "specedge\[grammar\]"'):
        Grammars(pipeline.bundle, pipeline.tokenizer).constraint(GenerationRequest(regex="a"))


@pytest.mark.parametrize("drafter", [*DrafterName])
def test_greedy_json_equals_plain_masked_decoding_for_every_drafter(pipeline, drafter):
    options = {"json_schema": PERSON, "max_new_tokens": 60}
    plain = pipeline.generate("data = ", num_draft_tokens=0, **options)
    assert plain.finish_reason == "end"
    for k in (1, 4, 8, "auto"):
        found = pipeline.generate("data = ", num_draft_tokens=k, drafter=drafter, **options)
        assert (found.tokens, found.text) == (plain.tokens, plain.text)
    assert list(json.loads(plain.text)) == ["name", "age", "tags"]


def test_truncated_json_reports_its_finish_reason(pipeline):
    cut = pipeline.generate("data = ", 5, json_schema=PERSON)
    whole = pipeline.generate("data = ", 60, json_schema=PERSON)
    assert (cut.finish_reason, whole.finish_reason) == ("length", "end")
    assert whole.text.startswith(cut.text)
