"""A grammar on the command line and in files of prompts."""

import json

import pytest

from installed import run

pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
pytest.importorskip("llguidance", reason="needs the grammar extra")

PROMPT = "data = "
SCHEMA = {"enum": ["one", 2, [3]], "x-guidance": {"whitespace_flexible": False}}
LARK = 'start: "ab" start | "c"'


def test_every_kind_of_grammar_reaches_the_text_by_flag_and_by_line(pipeline, tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA), "utf-8")
    lark.write_text(LARK, "utf-8")
    flags = {"json_schema": schema, "grammar": lark, "regex": "[0-9]{3}x"}
    given = {"json_schema": SCHEMA, "grammar": LARK, "regex": flags["regex"]}
    for name, value in given.items():
        made = pipeline.generate(PROMPT, 12, **{name: value})
        flag = f"--{name.replace('_', '-')}"
        by_flag = run("generate", PROMPT, "-n", 12, flag, flags[name], "--json")
        line = json.dumps({"prompt": PROMPT, name: value})
        by_line = run("generate", "--prompts", "-", "--format", "jsonl", "-n", 12, stdin=line)
        for found in (by_flag, by_line):
            assert json.loads(found.stdout)["tokens"] == made.tokens, found.stderr
            assert json.loads(found.stdout)["finish_reason"] == made.finish_reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--regex", "(a"], "regex is refused by llguidance"),
        (["--regex", "a", "--ignore-eos"], "omit ignore_eos"),
        (["--json-schema", "nowhere.json"], "nowhere.json: No such file"),
        (["--json-schema", __file__], "json_schema is not valid JSON"),
        (["--grammar", __file__], "grammar is refused by llguidance"),
        (["--grammar", __file__, "--regex", "a"], "grammar and regex cannot be combined"),
    ],
)
def test_a_bad_grammar_is_one_clear_message(arguments, message):
    result = run("generate", PROMPT, *arguments)
    assert (result.returncode, result.stdout.strip()) == (1, "")
    assert message in result.stderr
    said = [line for line in result.stderr.splitlines() if not line.startswith(("Usage", "Try"))]
    assert len([line for line in said if line.strip()]) == 1


def test_a_line_whose_grammar_is_refused_fails_alone():
    lines = [{"prompt": "a", "regex": "(a"}, {"prompt": "b", "regex": "ab"}]
    stdin = "\n".join(map(json.dumps, lines))
    result = run("generate", "--prompts", "-", "--format", "jsonl", stdin=stdin)
    first, second = map(json.loads, result.stdout.splitlines())
    assert result.returncode == 1
    assert "regex is refused by llguidance" in first["error"]
    assert (second["text"], second["finish_reason"]) == ("ab", "end")
