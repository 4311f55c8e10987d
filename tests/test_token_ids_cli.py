"""Prompts as token ids in JSONL, chats in `compare`, and progress without a terminal."""

import importlib
import json

import click
import pytest

from installed import run
from specedge.cli import prompts
from specedge.cli.terminal import ProgressLines
from specedge.request import GenerationRequest

bench = importlib.import_module("specedge.cli.bench")  # the names in the package are commands


def test_token_ids_in_jsonl_are_a_prompt(pipeline, jsonl):
    tokens = pipeline.tokenizer.encode("def read_config(path):").ids
    jsonl.write_text(json.dumps({"prompt": tokens}), "utf-8")
    result = run("generate", "--prompts", jsonl, "-n", 9)
    assert json.loads(result.stdout)["tokens"] == pipeline.generate(tokens, 9).tokens


@pytest.mark.parametrize("prompt", [[], [True], [1.0], [-1], ["a"], {}])
def test_invalid_prompts_are_refused(jsonl, prompt):
    jsonl.write_text(json.dumps({"prompt": prompt}), "utf-8")
    with pytest.raises(click.UsageError, match="line 1: prompt must be text or a list of token"):
        prompts.read_prompts(str(jsonl), None, False, None, vars(GenerationRequest()))


def test_token_ids_are_refused_as_chat_messages(jsonl):
    jsonl.write_text('{"prompt": [1]}', "utf-8")
    with pytest.raises(click.UsageError, match="cannot be a chat message"):
        prompts.read_prompts(str(jsonl), None, True, None, vars(GenerationRequest()))


def test_out_of_vocabulary_id_fails_only_its_line(jsonl):
    jsonl.write_text('{"prompt": [1]}\n{"prompt": [99999999]}\n', "utf-8")
    result = run("generate", "--prompts", jsonl, "-n", 2)
    first, second = map(json.loads, result.stdout.splitlines())
    assert (result.returncode, len(first["tokens"])) == (1, 2)
    assert "prompt token 99999999" in second["error"]


def test_bench_and_verify_support_token_ids(pipeline):
    (found,) = bench._prompts(pipeline, [("ids", [5, 6, 7])])
    assert (found.tokens, found.text) == ([5, 6, 7], pipeline.tokenizer.decode([5, 6, 7]))
    assert pipeline.prompts.tokens_of([5, 6, 7]) == [5, 6, 7]


def test_progress_is_reported_at_intervals_without_a_terminal(capsys):
    now = [0.0]
    lines = ProgressLines(enabled=True, interval=10, clock=lambda: now[0])
    for now[0] in range(0, 25, 3):
        lines.report("measuring", now[0] / 25)
    assert capsys.readouterr().err == "measuring: 48%\nmeasuring: 96%\n"
    ProgressLines(enabled=False, interval=0).report("measuring", 0.5)
    assert capsys.readouterr().err == ""
