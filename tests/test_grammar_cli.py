"""A grammar on the command line and in files of prompts."""

import json

from installed import run

PROMPT = "data = "
SCHEMA = {"enum": ["one", 2, [3]], "x-guidance": {"whitespace_flexible": False}}
LARK = 'start: "ab" start | "c"'


def test_every_kind_of_grammar_reaches_the_text_by_flag_and_by_line(pipeline, tmp_path):
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA), "utf-8")
    lark.write_text(LARK, "utf-8")
    flags = {"json_schema": schema, "grammar": lark, "regex": "[0-9]{3}x"}
    given = {"json_schema": SCHEMA, "grammar": LARK, "regex": flags["regex"]}
    lines = "\n".join(json.dumps({"prompt": PROMPT, name: value}) for name, value in given.items())
    by_line = run("generate", "--prompts", "-", "--format", "jsonl", "-n", 12, stdin=lines)
    for line, (name, value) in zip(by_line.stdout.splitlines(), given.items(), strict=True):
        made = pipeline.generate(PROMPT, 12, **{name: value})
        flag = f"--{name.replace('_', '-')}"
        by_flag = run("generate", PROMPT, "-n", 12, flag, flags[name], "--json")
        for found in map(json.loads, (line, by_flag.stdout)):
            assert (found["tokens"], found["finish_reason"]) == (made.tokens, made.finish_reason)


def test_invalid_grammar_fails_only_its_line():
    lines = [{"prompt": "a", "regex": "(a"}, {"prompt": "b", "regex": "ab"}]
    stdin = "\n".join(map(json.dumps, lines))
    result = run("generate", "--prompts", "-", "--format", "jsonl", stdin=stdin)
    first, second = map(json.loads, result.stdout.splitlines())
    assert result.returncode == 1
    assert "regex is rejected by llguidance" in first["error"]
    assert (second["text"], second["finish_reason"]) == ("ab", "end")
