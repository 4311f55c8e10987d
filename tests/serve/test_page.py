"""The page at / is self-contained and displays token outcomes of streams."""

import re

import pytest

from served import MODEL, PROMPT, ask, chat_pair, client, serving
from specedge.serve.app import PAGE_FILES


@pytest.fixture(scope="module")
def pair():
    return chat_pair(1)


@pytest.fixture(scope="module")
def port(pair):
    with serving(pair, api_key="k") as found:
        yield found


def test_page_needs_no_key_and_loads_only_local_files(port):
    for path, name in PAGE_FILES.items():
        kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[
            name.split(".")[-1]
        ]
        status, headers, said = ask(port, "GET", path)
        assert (status, headers["content-type"].partition(";")[0]) == (200, kind)
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert not re.search(rb"https?://", said)
        for loaded in re.findall(rb'(?:from|src=|rel="stylesheet" href=) ?"(?:\./)?(.+?)"', said):
            assert f"/{loaded.decode()}" in PAGE_FILES


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_traced_stream_has_outcome_of_each_token(pair, port, endpoint):
    messages = [{"role": "user", "content": PROMPT}]
    given = {"model": MODEL, "max_tokens": 30, "temperature": 0, "stream": True}
    with client(port, "k") as ai:
        if endpoint == "chat":
            wanted = pair.chat(messages, 30, num_draft_tokens=3).spans
            asked = ai.chat.completions.create
            given["messages"] = messages
        else:
            wanted = pair.generate(PROMPT, 30, num_draft_tokens=3).spans
            asked = ai.completions.create
            given["prompt"] = PROMPT
        for trace in (True, False):
            extra = {"trace": trace, "speculative": {"num_draft_tokens": 3}}
            chunks = list(asked(extra_body=extra, **given))
            found = [
                (span["text"], span["fate"])
                for chunk in chunks
                for span in getattr(chunk.choices[0], "spans", None) or []
            ]
            assert found == ([(span.text, span.fate) for span in wanted] if trace else [])
