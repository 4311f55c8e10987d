"""Documents name what exists: links, paths, commands and options; the README's snippet runs."""

import itertools
import re
import unicodedata
from pathlib import Path

import click
import pytest

from specedge.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "hosts/**/*.md", "models/**/*.md", "tools/**/*.md")
    for path in ROOT.glob(pattern)
    if "node_modules" not in path.parts
)
FOLDERS = ("specedge", "runtime", "exporter", "models", "tools", "hosts", "tests", "docs", ".ci")
COMMANDS = (ROOT / "docs" / "commands.md").read_text("utf-8")


def text_of(page):
    return (ROOT / page).read_text("utf-8")


def without_code(text):
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", without_code(path.read_text("utf-8")), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        kept = (c for c in plain if c in " -_" or unicodedata.category(c)[0] in "LN")
        found.add("".join(kept).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page))):
        if link.startswith(("http", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    text = re.sub(r"```.*?```", " ", text_of(page), flags=re.DOTALL)
    for path in re.findall(r"`([\w.][\w./-]*)`", text):
        if path.split("/")[0] in FOLDERS and "/" in path and not page.startswith("CHANGELOG"):
            assert (ROOT / path).exists(), path


def commands():
    """Yield every command's name and its click object."""
    for name, command in cli.commands.items():
        parts = getattr(command, "commands", None)
        if parts is None:
            yield name, command
        else:
            yield from ((f"{name} {part}", one) for part, one in parts.items())


@pytest.mark.parametrize(("name", "command"), commands(), ids=lambda value: str(value))
def test_commands_and_options_are_documented(name, command):
    assert f"specedge {name}" in COMMANDS
    assert command.help
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.opts
            assert all(f"`{flag}`" in COMMANDS for flag in option.opts), option.opts


def test_documented_options_exist():
    flags = {flag for _, command in commands() for option in command.params for flag in option.opts}
    flags |= {flag for _, c in commands() for option in c.params for flag in option.secondary_opts}
    flags |= {"--help", "--version"}
    for page in PAGES:
        shell = re.findall(r"`(specedge [^`]*)`", without_code(text_of(page)))
        shell += re.findall(r"^(?:\$ )?(specedge [a-z].*)$", text_of(page), re.MULTILINE)
        for line in shell:
            for flag in re.findall(r"(?<=\s)--[a-z][a-z-]+", line.partition("#")[0]):
                assert flag in flags, (page, line)
    for row in re.findall(r"^\| (`-[^|]*)\|", COMMANDS, re.MULTILINE):
        for flag in re.findall(r"`(--?[a-z][a-z-]*)`", row):
            assert flag in flags | {"-h"}, row


def test_the_readme_has_one_test_command():
    lines = [line for line in text_of("README.md").splitlines() if line.startswith("pip install")]
    assert len([line for line in lines if "pytest" in line]) == 1


def test_the_snippet_of_the_readme_runs(monkeypatch, capsys):
    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    monkeypatch.setenv("SPECEDGE_BUNDLE", str(ROOT / "models" / "embedded"))
    (snippet,) = re.findall(r"```python\n(.*?)```", text_of("README.md"), re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
    assert capsys.readouterr().out


def documented_fields():
    """Return the names of the API's fields by endpoint, from the table of docs/clients.md."""
    table = text_of("docs/clients.md").partition("<!-- fields -->")[2].partition("<!-- end")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in table.splitlines()[3:]]
    endpoints = ("chat", "completions", "responses")
    return {
        endpoint: {row[0].strip("`") for row in rows if row and row[i]}
        for i, endpoint in enumerate(endpoints, 1)
    }


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_documented_fields_are_those_of_the_server(endpoint):
    pytest.importorskip("starlette", reason="needs the serve extra")
    from specedge.serve import fields, requests
    from specedge.serve.errors import ApiError

    parse, body = {
        "chat": (requests.parse_chat, {"messages": [{"role": "user", "content": "a"}]}),
        "completions": (requests.parse_completion, {"prompt": "a"}),
        "responses": (requests.parse_response, {"input": "a"}),
    }[endpoint]
    names = documented_fields()[endpoint]
    known = itertools.chain(
        *fields.OPTIONS.values(), fields.NEUTRAL[endpoint], fields.UNSUPPORTED_FIELDS[endpoint]
    )
    assert {*known} <= names
    codes = {}
    for name in names - body.keys():
        try:
            parse(body | {name: ["impossible"]}, requests.ParserSettings(10, strict=True))
        except ApiError as error:
            codes[name] = error.code
    assert "unknown_field" not in codes.values(), codes
