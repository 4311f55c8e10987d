"""The page at / in headless Chromium: it streams, colours tokens by fate, and has no complaints."""

import json
import shutil

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")

from javascript_clients import SET_UP, node_script, output

from served import MODEL, PROMPT, chat_pair, health, serving, until

pytestmark = [pytest.mark.hosts]

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    if not (chromium := next(filter(None, map(shutil.which, NAMES)), None)):
        pytest.skip(f"chromium is missing; {SET_UP}, or apt-get install chromium")
    return [*node_script("page.mjs", tmp_path_factory.mktemp("page")), chromium]


@pytest.fixture(scope="module")
def pair():
    return chat_pair(1)


@pytest.fixture(scope="module")
def port(pair):
    with serving(pair) as found:
        yield found


def shown(command, port, what):
    return json.loads(output(command, f"http://127.0.0.1:{port}/", what))


def joined(spans):
    return "".join(text for text, _ in spans)


@pytest.mark.parametrize("what", ["chat", "completions"])
def test_tokens_are_streamed_and_coloured_beside_plain_decoding(command, pair, port, what):
    found = shown(command, port, what)
    messages = [{"role": "user", "content": PROMPT}]
    given = {"num_draft_tokens": 3}
    if what == "chat":
        wanted = pair.chat(messages, 60, **given)
    else:
        wanted = pair.generate(PROMPT, 60, **given)
    assert found["model"].startswith(f"{MODEL}, drafted by ")
    assert found["speculative"] == [[span.text, span.fate] for span in wanted.spans]
    assert joined(found["plain"]) == joined(found["speculative"]) == wanted.text
    assert {fate for _, fate in found["plain"]} == {"plain"}
    assert found["steps"] > 3
    fates = [colour.partition(" ")[0] for colour in found["colours"]]
    assert fates == ["accepted", "bonus", "plain", "recovered"]
    assert len({colour.partition(" ")[2] for colour in found["colours"]}) == 4
    assert "draft tokens accepted" in found["figures"][0]
    assert found["figures"][1].endswith("1.00 tokens a round")
    assert found["verdict"].endswith("times as fast; the texts are the same")
    assert (found["error"], found["messages"]) == ("", [])
    path = "/v1/chat/completions" if what == "chat" else "/v1/completions"
    assert set(found["requests"]) == {"/", "/page.css", "/page.js", "/v1/models", path}


def test_stop_ends_the_text_and_frees_the_slot(command, port):
    found = shown(command, port, "stop")
    assert 0 < len(found["speculative"]) < 450
    assert (found["plain"], found["verdict"]) == ([], "")
    assert (found["error"], found["messages"]) == ("", [])
    until(lambda: health(port)["running"] == 0)
