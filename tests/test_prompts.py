"""The prompts of a file: text or JSON, every line checked before any runs."""

import dataclasses

import click
import pytest

from specedge.cli import prompts
from specedge.request import GenerationRequest

DEFAULTS = dataclasses.asdict(GenerationRequest())


def read(path, text, form=None, chat=False, system=None, **request):
    path.write_bytes(text.encode("utf-8"))
    return prompts.read_prompts(str(path), form, chat, system, DEFAULTS | request)


def test_text_file_has_one_prompt_per_nonblank_line(text):
    items = read(text, "\ufeffa\n\n  b \r\n\t\nc\u2028d")
    assert [item.prompt for item in items] == ["a", "  b ", "c\u2028d"]
    assert [item.index for item in items] == [0, 1, 2]


def test_prompt_seeds_are_derived_from_command_line_seed(text, jsonl):
    assert [i.request["seed"] for i in read(text, "a\n\na\n", seed=9)] == [9, 10]
    assert [i.request["seed"] for i in read(text, "a\na", seed=2**64 - 1)] == [2**64 - 1, 0]
    lines = '{"prompt": "a", "seed": 9}\n{"prompt": "a"}\n{"prompt": "a", "seed": null}'
    assert [i.request["seed"] for i in read(jsonl, lines, seed=3)] == [9, 4, 5]
    one, two = read(text, "a\nb")
    assert two.request["seed"] == one.request["seed"] + 1


def test_a_line_of_json_overrides_the_command_line(jsonl):
    items = read(
        jsonl,
        '{"prompt": "a", "id": "x", "temperature": 0.5, "stop": ["b"], "ignore_eos": true}\n'
        '{"messages": [{"role": "user", "content": "Hi"}], "id": 2, "num_draft_tokens": null}',
        temperature=1.0,
        num_draft_tokens=2,
        seed=0,
    )
    assert items[0].request == DEFAULTS | {
        "temperature": 0.5, "stop": ["b"], "ignore_eos": True, "num_draft_tokens": 2, "seed": 0,
    }  # fmt: skip
    assert items[1].request == DEFAULTS | {"temperature": 1.0, "num_draft_tokens": 2, "seed": 1}
    assert items[1].messages == [{"role": "user", "content": "Hi"}]
    assert [item.id for item in items] == ["x", 2]


def test_with_chat_each_prompt_is_a_question(text):
    (item,) = read(text, "Hi", chat=True, system="Be brief.")
    assert item.prompt is None
    assert [m["role"] for m in item.messages] == ["system", "user"]


GOOD = '{"prompt": "z", "id": 1}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"prompt": "a", "temprature": 1}', "key 'temprature' is unknown"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' appears twice"),
        ('{"prompt": "a", "messages": []}', "either 'prompt' or 'messages'"),
        ('{"id": 3}', "either 'prompt' or 'messages'"),
        ('{"prompt": 1}', "prompt must be text"),
        ('{"prompt": "\\ud800"}', "not valid Unicode"),
        ('{"prompt": "a", "id": null}', "id must be"),
        ('{"prompt": "a", "id": true}', "id must be"),
        ('{"prompt": "a", "id": 1}', "id 1 is also that of line 1"),
        ('{"prompt": "a", "seed": true}', "seed must not be true"),
        ('{"prompt": "a", "temperature": NaN}', "NaN"),
        ('{"prompt": "a", "max_new_tokens": 1.5}', "max_new_tokens must be an integer"),
        ('{"prompt": "a", "ignore_eos": "no"}', "ignore_eos must be"),
        ('{"prompt": "a", "drafter": "oracle"}', "drafter must be auto, model, lookup"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] must have 'content'"),
    ],
)
def test_invalid_line_error_has_line_number(jsonl, line, said):
    with pytest.raises(click.UsageError, match=rf"prompts\.jsonl, line 3: .*{said}") as caught:
        read(jsonl, f"{GOOD}\n\n{line}\n{GOOD}")
    assert "\n" not in str(caught.value)


def test_messages_conflict_with_system_option(jsonl):
    line = '{"messages": [{"role": "user", "content": "Hi"}]}'
    with pytest.raises(click.UsageError, match="--system does not apply"):
        read(jsonl, line, chat=True, system="Be brief.")


def test_json_in_text_file_is_not_parsed(text):
    with pytest.raises(click.UsageError, match="--format jsonl or --format text"):
        read(text, GOOD)
    assert read(text, GOOD, form="text")[0].prompt == GOOD
    assert read(text, GOOD, form="jsonl")[0].prompt == "z"
    assert read(text, "{}")[0].prompt == "{}"
