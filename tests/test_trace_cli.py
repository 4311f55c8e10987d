"""`specedge generate --trace`: the marks are readable, and without them the text is exact."""

import json
import re
import sys

import pytest

import installed
from specedge.cli import trace

PROMPT = "def read_config(path):"
COLOURS = {"": "plain", "32": "accepted", "31": "recovered", "36": "bonus"}


def run(*arguments, **variables):
    return installed.run("generate", PROMPT, "-n", 40, *arguments, **variables)


def runs_of(spans):
    """Neighbours of one fate in one, as colours show them."""
    joined = []
    for text, fate in spans:
        if joined and joined[-1][1] == fate:
            joined[-1] = (joined[-1][0] + text, fate)
        else:
            joined.append((text, fate))
    return joined


def test_colors_mark_outcomes_and_text_is_exact(pipeline):
    result = run("--trace", "-k", "4", FORCE_COLOR="1")
    made = pipeline.generate(PROMPT, 40, num_draft_tokens=4)
    found = re.findall(r"\x1b\[(3\d)m(.*?)\x1b\[0m", result.stdout, re.DOTALL)
    expected = [(s.text, str(s.fate)) for s in made.spans if s.fate != "plain"]
    assert runs_of((text, COLOURS[code]) for code, text in found) == runs_of(expected)
    assert re.sub(r"\x1b\[\d+m", "", result.stdout) == made.text + "\n"


def test_trace_uses_brackets_without_a_terminal(pipeline):
    result = run("--trace", "-k", "4")
    assert "\x1b" not in result.stdout + result.stderr
    assert all(mark in result.stdout for mark in "«»⟨⟩⟦⟧")
    assert re.sub("[«»⟨⟩⟦⟧]", "", result.stdout) == pipeline.generate(PROMPT, 40).text + "\n"
    legend, summary = result.stderr.splitlines()
    assert legend.startswith("trace: «accepted draft token», ")
    assert "40 tokens" in summary


def test_plain_decoding_has_no_marks(pipeline):
    result = run("--trace", "-k", "0", FORCE_COLOR="1")
    assert result.stdout == pipeline.generate(PROMPT, 40).text + "\n"
    assert "plain decoding, no token is marked" in result.stderr


def test_json_has_spans_only_with_trace(pipeline):
    result = run("--trace", "--json", "-k", "4")
    made = pipeline.generate(PROMPT, 40, num_draft_tokens=4)
    spans = [{"text": span.text, "fate": span.fate} for span in made.spans]
    assert json.loads(result.stdout)["spans"] == spans
    assert "trace" not in result.stderr
    assert "spans" not in json.loads(run("--json").stdout)


class Terminal:
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("variables", "terminal", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": ""}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colors_follow_terminal_and_variables(monkeypatch, variables, terminal, expected):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if terminal:
        monkeypatch.setattr(sys, "stdout", Terminal())
    assert trace.has_colors() is expected
