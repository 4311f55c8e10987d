"""Which fields a request may have, and that the page about them says the same."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")

from specedge.request import GenerationRequest
from specedge.serve import asking
from specedge.serve.errors import ApiError
from specedge.serve.fields import ANY, NEUTRAL, Fields
from specedge.serve.shapes import event

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
READS = {
    "chat": (asking.chat, {"messages": [{"role": "user", "content": "a"}]}),
    "completions": (asking.completions, {"prompt": "a"}),
    "responses": (asking.responses, {"input": "a"}),
}


def page():
    """Of each field its cells: one an endpoint."""
    text = PAGE.read_text("utf-8").partition("<!-- fields -->")[2].partition("<!-- end")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[3:]]
    return {row[0].strip("`"): dict(zip(READS, row[1:4], strict=True)) for row in rows if row}


def cell(endpoint, name):
    """What the page must say of a field that an endpoint takes."""
    values = NEUTRAL[endpoint].get(name)
    if name not in NEUTRAL[endpoint]:
        return "yes"
    if values is ANY:
        return "no effect"
    return f"only {' or '.join(f'`{json.dumps(v)}`' for v in values)}" if values else "no"


def known(endpoint, monkeypatch):
    """The fields that an endpoint takes from a body."""
    made = []

    class Noted(Fields):
        def __init__(self, facts):
            super().__init__(facts)
            made.append(self)

    monkeypatch.setattr(asking, "Fields", Noted)
    reads, body = READS[endpoint]
    reads(body | {"stream": True}, 10)
    return made[0]._known


@pytest.mark.parametrize("endpoint", READS)
def test_the_page_has_every_field_of_an_endpoint_and_no_other(endpoint, monkeypatch):
    said = {name: cells[endpoint] for name, cells in page().items() if cells[endpoint]}
    assert said == {name: cell(endpoint, name) for name in known(endpoint, monkeypatch)}


@pytest.mark.parametrize("endpoint", READS)
def test_a_body_of_its_text_alone_is_enough_and_null_is_not_given(endpoint, monkeypatch):
    reads, body = READS[endpoint]
    bare = reads(body, 500)
    nothing = dict.fromkeys(known(endpoint, monkeypatch)) | body
    assert reads(nothing, 500) == bare
    assert (bare.n, bare.stream, bare.num_choices) == (1, False, 1)
    limit = 16 if endpoint == "completions" else 500
    assert bare.options == {"temperature": 1.0, "max_new_tokens": limit}


@pytest.mark.parametrize("endpoint", READS)
def test_every_field_that_is_not_supported_yet_says_so_by_name(endpoint):
    reads, body = READS[endpoint]
    for name, values in NEUTRAL[endpoint].items():
        if values is ANY:
            assert reads(body | {name: {"a": 1}}, 10)
            continue
        for value in values:
            assert reads(body | {name: value}, 10) == reads(body, 10)
        with pytest.raises(ApiError, match=rf"^{name} is not supported yet") as caught:
            reads(body | {name: {"a": [1]}}, 10)
        assert (caught.value.param, caught.value.status) == (name, 400)


@pytest.mark.parametrize("endpoint", READS)
def test_what_drafts_is_chosen_by_name_and_number_or_is_off(endpoint):
    reads, body = READS[endpoint]

    def options(**speculative):
        found = reads(body | {"speculative": speculative}, 10).options
        return found.get("drafter"), found.get("num_draft_tokens")

    assert options(drafter="chain", num_draft_tokens=3) == ("chain", 3)
    assert options(off=True) == (None, 0)
    assert options(off=False, drafter=None) == (None, None)
    assert options(num_draft_tokens="auto") == (None, "auto")
    for wrong in ({"off": True, "drafter": "model"}, {"drafter": 3}, {"num_draft_tokens": True}):
        with pytest.raises(ApiError, match=r"^speculative") as caught:
            options(**wrong)
        assert caught.value.param.startswith("speculative.")


def test_every_option_that_is_taken_is_one_of_a_request():
    reads, body = READS["completions"]
    own = {
        "temperature": 0.5,
        "top_p": 0.5,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "logit_bias": {"3": 1},
        "seed": 2,
        "stop": ["a"],
        "top_k": 3,
        "min_p": 0.1,
        "typical_p": 0.5,
        "repetition_penalty": 1.1,
        "bad_words": ["a"],
        "min_new_tokens": 1,
        "coupling": "gumbel",
        "json_schema": {"type": "object"},
    }
    found = reads(body | own, 10).options
    assert found == own | {"max_new_tokens": 10}
    assert GenerationRequest(**found).seed == 2


def test_an_answer_may_be_sent_back_as_it_came_but_no_part_has_a_field_unread():
    def text(**more):
        part = {"type": "output_text", "text": "b", "annotations": [], "logprobs": [], **more}
        sent = {"role": "assistant", "content": [part], "type": "message", "id": "msg-1"}
        user = {"role": "user", "content": "a"}
        asked = asking.responses({"input": [user, sent | {"status": "incomplete"}]}, 10)
        return asked.prompts[0][1]["content"]

    assert text() == "b"
    with pytest.raises(ApiError, match=r"^input\[1\].*there is no field \"bold\"") as caught:
        text(bold=True)
    assert caught.value.param == "input[1].content[0].bold"


def test_an_event_has_no_character_at_which_a_client_may_end_a_line():
    found = event({"text": "a\u2028b\x85c\u2029"})
    assert len(found.splitlines()) == 2
    assert json.loads(found.removeprefix("data: ")) == {"text": "a\u2028b\x85c\u2029"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"ignore_eos": "yes"}, "ignore_eos must be true or false"),
        ({"coupling": "maximal"}, "coupling must be residual or gumbel"),
        ({"coupling": ["gumbel"]}, "coupling must be residual or gumbel"),
        ({"stream": 1}, "stream must be true or false, got 1"),
        ({"min_new_tokens": 20}, "min_new_tokens 20 is above max_tokens 5"),
        ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
        ({"prompt": {"a": 1}}, "prompt must be text, token ids, or a list of either"),
        ({"prompt": []}, "prompt must be text, token ids, or a list of either"),
        ({"prompt": [1, True]}, "prompt must be text, token ids, or a list of either"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, got 21"),
        ({"model": 3}, "model must be a name, got 3"),
        ({"stop": ["a"] * 1025}, "stop must have at most 1024 entries, got 1025"),
        ({"bad_words": [[1]] * 1025}, "bad_words must have at most 1024 entries"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias must have at most 1024"),
        ({"stream_options": {"usage": True}, "stream": True}, 'there is no field "usage"'),
    ],
)
def test_a_wrong_value_is_told_in_the_fields_own_name(change, said):
    with pytest.raises(ApiError) as caught:
        asking.completions({"prompt": "a", "max_tokens": 5} | change, 10)
    assert said in caught.value.message
    assert re.split(r"[ .]", caught.value.param)[0] in (*change, "usage")


def test_an_earlier_call_without_arguments_is_one_of_an_empty_object():
    for given in ({"arguments": ""}, {"arguments": "{}"}, {}):
        call = {"id": "a", "type": "function", "function": {"name": "clock"} | given}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        asked = asking.chat({"messages": messages}, 10)
        assert asked.prompts[0][0]["tool_calls"][0]["function"]["arguments"] == {}
