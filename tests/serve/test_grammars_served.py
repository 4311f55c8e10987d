"""Answers that follow a schema, or fields of one's own, at each endpoint."""

import json

import pytest

from served import MODEL, PROMPT, chat_pair, client, serving

MESSAGES = [{"role": "user", "content": "A class."}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def alone():
    return chat_pair(1)


@pytest.fixture(scope="module")
def ai(alone):
    with serving(alone) as port, client(port) as found:
        yield found


def test_response_follows_its_schema_and_reports_truncation(ai, alone):
    wanted = alone.chat(MESSAGES, 24, json_schema=SCHEMA)
    named = {"name": "person", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", "json_schema": named}
    asked = {"messages": MESSAGES, "response_format": form}
    choice = ai.chat.completions.create(**GREEDY, **asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == (wanted.text, "stop")
    assert list(json.loads(wanted.text)) == ["name", "age"]
    cut = ai.chat.completions.create(**(GREEDY | {"max_tokens": 3}), **asked).choices[0]
    assert cut.finish_reason == "length"
    assert wanted.text.startswith(cut.message.content)
    found = ai.responses.create(
        model=MODEL,
        input=MESSAGES,
        temperature=0,
        max_output_tokens=24,
        text={"format": {"type": "json_schema", **named}},
    )
    assert (found.output_text, found.status) == (wanted.text, "completed")
    assert found.text.format.name == "person"


def test_parsed_object_terminates_despite_whitespace_preference(ai):
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    pydantic = pytest.importorskip("pydantic", reason="comes with openai")
    person = pydantic.create_model("Person", name=(str, ...), age=(int, ...))
    asked = GREEDY | {"messages": MESSAGES, "max_tokens": 60, "response_format": person}
    choice = ai.chat.completions.parse(**asked).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.parsed.age >= 0
    found = ai.responses.parse(
        model=MODEL, input=MESSAGES, temperature=0, max_output_tokens=60, text_format=person
    )
    assert found.output_parsed.age >= 0


def test_truncated_json_reports_length_at_every_endpoint(ai):
    few, own = GREEDY | {"max_tokens": 4}, {"json_schema": SCHEMA}
    given = {"messages": MESSAGES, "extra_body": own}
    reasons = [ai.chat.completions.create(**few, **given).choices[0].finish_reason]
    reasons += [
        list(ai.chat.completions.create(stream=True, **few, **given))[-1].choices[0].finish_reason
    ]
    given = {"prompt": PROMPT, "extra_body": own}
    reasons += [ai.completions.create(**few, **given).choices[0].finish_reason]
    reasons += [
        list(ai.completions.create(stream=True, **few, **given))[-1].choices[0].finish_reason
    ]
    assert reasons == ["length"] * 4
    given = {"model": MODEL, "input": MESSAGES, "max_output_tokens": 4, "extra_body": own}
    found = [
        ai.responses.create(**given),
        list(ai.responses.create(stream=True, **given))[-1].response,
    ]
    for one in found:
        assert (one.status, one.output[0].status) == ("incomplete", "incomplete")
        assert one.incomplete_details.reason == "max_output_tokens"


def test_json_object_format_and_custom_grammar_fields(ai):
    form = {"type": "json_object"}
    one = ai.chat.completions.create(messages=MESSAGES, response_format=form, **GREEDY)
    choice = one.choices[0]  # any object may go on and on, and this pair's does
    assert (choice.message.content[0], choice.finish_reason) == ("{", "length")
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.content)
    form = {"format": form}
    given = {"model": MODEL, "input": MESSAGES, "temperature": 0, "max_output_tokens": 24}
    assert ai.responses.create(text=form, **given).status == "incomplete"
    for own in ({"regex": "(ab){3}"}, {"grammar": 'start: "ababab"'}):
        found = ai.completions.create(prompt=PROMPT, extra_body=own, **GREEDY).choices[0]
        assert (found.text, found.finish_reason) == ("ababab", "stop")
