"""Untrusted text cannot control or flood the terminal, and input is limited."""

import json
import shutil
import sys

import pytest

from installed import run
from manifests import make_bundle
from specedge.bundle import MANIFEST, store
from specedge.cli import options
from specedge.cli.terminal import pluralize, sanitize, sanitize_line
from specedge.errors import BundleError

EVIL = "\x1b[2J\u202egnp.exe\u2066\x9b31m\x07"


def harmless(text):
    return all(line.isprintable() for line in text.splitlines())


def test_control_characters_are_escaped():
    assert sanitize_line("é 漢字 «x»") == "é 漢字 «x»"
    assert sanitize_line("a\x1b[2J\u202eb\nc") == "a\\x1b[2J\\u202eb\\nc"
    long = sanitize_line("x" * 10**6 + "; the cure")
    assert len(long) < 2100
    assert long.endswith("; the cure")
    assert sanitize("a\x07\nb") == "a\\x07\nb"


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "x", EVIL: 1},
        {"prompt": "x", "k" * 10**6: 1},
        {"prompt": "x", "drafter": EVIL},
        {"prompt": "x", "drafter": f"ngram:{EVIL}"},
        {"prompt": "x", "id": EVIL * 10**5, "top_k": -1},
    ],
)
def test_prompts_cannot_control_the_terminal(jsonl, line):
    jsonl.write_text(json.dumps(line, ensure_ascii=False), "utf-8")
    result = run("generate", "--prompts", jsonl)
    assert result.returncode == 1
    assert "line 1" in result.stderr
    assert harmless(result.stderr)
    assert len(result.stderr) < 3000


def test_megabyte_ids_make_a_short_message(jsonl):
    line = json.dumps({"prompt": "x", "id": EVIL * 10**5}, ensure_ascii=False)
    jsonl.write_text(f"{line}\n{line}\n", "utf-8")
    result = run("generate", "--prompts", jsonl)
    assert harmless(result.stderr)
    assert len(result.stderr) < 3000
    assert result.stderr.strip().endswith("is also that of line 1")


@pytest.mark.parametrize("command", ["inspect", "list", "generate"])
def test_names_and_licenses_cannot_control_the_terminal(tmp_path, command):
    home = tmp_path / "specedge" / "bundles" / "one\u202etwo"
    make_bundle(home)
    manifest = json.loads((home / MANIFEST).read_text("utf-8"))
    manifest["models"]["target"]["source"] |= {
        "license": "MIT\u202e\u2066",
        "id": "some/\u202emodel",
    }
    (home / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    arguments = [] if command == "list" else ["--bundle", str(home)]
    prompt = ["x"] if command == "generate" else []
    result = run(command, *prompt, *arguments, XDG_DATA_HOME=str(tmp_path))
    assert harmless(result.stdout + result.stderr)
    assert "\\u202e" in result.stdout + result.stderr


@pytest.mark.parametrize("name", ["a prompt", "a file"])
def test_unbounded_input_is_rejected_at_stated_limit(name, monkeypatch, tmp_path):
    import click

    zeros = tmp_path / "zeros"
    zeros.write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr(options, "MAX_PROMPT", 2**20)
    monkeypatch.setattr(options, "MAX_TEXT", 2 * 2**20)
    limit = {"a prompt": 1, "a file": 2}[name]
    read, given = {
        "a prompt": (options.read_prompt, "-"),
        "a file": (options.read_text, str(zeros)),
    }[name]
    with zeros.open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(click.UsageError, match=f"exceeds the limit of {limit} MiB"):
            read(given)


def test_token_count_is_pluralized():
    assert run("generate", "x", "-n", 1).stderr.startswith("1 token in ")
    assert (pluralize(0, "token"), pluralize(1, "token"), pluralize(2, "token")) == (
        "0 tokens", "1 token", "2 tokens",
    )  # fmt: skip


def test_invalid_ngram_file_error_has_line_number(jsonl):
    jsonl.write_text('{"prompt": "a"}\n{"prompt": "b", "drafter": "ngram:gone"}\n', "utf-8")
    result = run("generate", "--prompts", jsonl)
    assert result.returncode == 1
    assert "prompts.jsonl, line 2: gone: No such file" in result.stderr
    jsonl.write_text('{"prompt": "a"}\n', "utf-8")
    result = run("generate", "--prompts", jsonl, "--drafter", "ngram:gone")
    assert "line" not in result.stderr


@pytest.mark.parametrize("note", ["", "\n", "relative", "/" + "x" * 5000, "/x\0y", "/" * 10**6])
def test_invalid_default_file_is_one_line_error(tmp_path, monkeypatch, note):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    if store.data_folder() != tmp_path / "specedge":
        pytest.skip("no XDG folders here")
    (tmp_path / "specedge").mkdir()
    (tmp_path / "specedge/default").write_text(note, "utf-8")
    with pytest.raises(BundleError, match="delete the file to use the embedded pair") as caught:
        store.find_bundle()
    assert len(str(caught.value)) < 500
    shutil.rmtree(tmp_path / "specedge")
    assert store.find_bundle() == store.embedded_folder()
