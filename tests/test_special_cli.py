"""`--special-tokens`: by default, every command treats special tokens as text."""

import importlib
import json
import shutil

import pytest

from corpus import END
from installed import run
from specedge.bundle import MANIFEST, store
from specedge.errors import PromptError
from specedge.runtime.drafters import ngram_files
from specedge.runtime.text import special_tokens
from specedge.verification import audit

bench = importlib.import_module("specedge.cli.bench")  # the name in the package is a command
TEXT = f"import os\n{END}import json"
ECHO = "{{ bos_token }}{{ messages[0].content }}"


@pytest.fixture
def lengths(pipeline):
    """The tokens of TEXT, as text and with the control token."""
    allowed = pipeline.tokenizer.encode(TEXT).ids
    as_text = pipeline.prompts.tokens(TEXT)
    assert len(as_text) > len(allowed)
    return len(as_text), len(allowed)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("arguments", [["generate", "--json"], ["compare", "--json"]])
def test_special_tokens_in_prompt_need_the_option(lengths, arguments):
    for option, wanted in zip(([], ["--special-tokens"]), lengths, strict=True):
        made = run(*arguments, TEXT, "-n", 2, *option)
        found = json.loads(made.stdout)
        assert found.get("plain", found)["stats"]["num_prompt_tokens"] == wanted


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("command", ["generate", "compare"])
def test_special_tokens_in_message_need_the_option(lengths, tmp_path, command):
    copy = shutil.copytree(store.embedded_folder(), tmp_path / "bundle")
    manifest = json.loads((copy / MANIFEST).read_text("utf-8"))
    (copy / MANIFEST).write_text(json.dumps(manifest | {"chat_template": ECHO}), "utf-8")
    for option, wanted in zip(([], ["--special-tokens"]), lengths, strict=True):
        made = run(command, "--json", "--chat", TEXT, "-n", 2, "--bundle", copy, *option)
        found = json.loads(made.stdout)
        assert found.get("plain", found)["stats"]["num_prompt_tokens"] == wanted + 1


def test_a_line_of_jsonl_overrides_the_command_line(lengths, jsonl):
    lines = [{"prompt": TEXT}, *({"prompt": TEXT, "special_tokens": on} for on in (False, True))]
    jsonl.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    as_text, allowed = lengths
    for option, wanted in (
        ([], [as_text, as_text, allowed]),
        (["--special-tokens"], [allowed, as_text, allowed]),
    ):
        made = run("generate", "--prompts", jsonl, "-n", 1, *option).stdout.splitlines()
        assert [json.loads(line)["stats"]["num_prompt_tokens"] for line in made] == wanted
    jsonl.write_text(json.dumps({"prompt": TEXT, "special_tokens": "all"}), "utf-8")
    refused = run("generate", "--prompts", jsonl)
    assert "line 1: special_tokens must be true or false, got 'all'" in refused.stderr


def test_bench_and_verify_handle_special_tokens_alike(pipeline, lengths):
    for on, wanted in zip((False, True), lengths, strict=True):
        (prompt,) = bench._prompts(pipeline, [("mine", TEXT)], on)
        assert (len(prompt.tokens), prompt.text) == (wanted, TEXT)
        first, *_ = audit._prompts(pipeline.bundle, [TEXT], on)
        assert len(first.tokens) == wanted


def test_ngram_build_handles_special_tokens_alike(pipeline, tmp_path, text):
    text.write_text(TEXT, "utf-8")
    for option, wanted in (([], 0), (["--special-tokens"], 1)):
        out = tmp_path / f"{wanted}.npz"
        assert run("ngram", "build", text, "--output", out, *option).returncode == 0
        tables = ngram_files.read(out, pipeline.bundle)
        assert tables.unigrams[pipeline.tokenizer.token_to_id(END)] == wanted


def test_encoding_error_names_the_file(tmp_path, text, monkeypatch):
    def refused(*_, **__):
        raise PromptError("a text spells </s>")

    monkeypatch.setattr(special_tokens.SpecialTokens, "encode_text", refused)
    text.write_text(TEXT, "utf-8")
    result = run("ngram", "build", text, "--output", tmp_path / "out.npz")
    assert (result.returncode, result.stderr) == (1, f"specedge: {text}: a text spells </s>\n")
    assert not (tmp_path / "out.npz").exists()
