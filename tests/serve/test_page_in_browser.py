"""The page at / in headless Chromium, as a person uses it."""

import itertools
import shutil
import threading

import pytest
from javascript_clients import SET_UP
from test_thinking import CALLING, TOKENS

import specedge
from served import MODEL, PROMPT, chat_pair, health, serving, until
from specedge.bundle import store
from tool_pairs import scripted_pair

playwright = pytest.importorskip("playwright.sync_api", reason="needs the browser extra")
pytestmark = pytest.mark.hosts

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
WEATHER = '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}]'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip(f"chromium is missing; {SET_UP}, or apt-get install chromium")
    with playwright.sync_playwright() as started:
        quiet = ["--no-sandbox", "--disable-gpu"]  # Chromium has no sandbox for root
        browser = started.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def scripted():
    """A chat model that writes `pipeline.text`, and its port."""
    pipeline = scripted_pair(CALLING, TOKENS)
    with serving(pipeline, model=MODEL) as port:
        yield pipeline, port


@pytest.fixture
def visit(browser):
    """Open the page of a port; nothing but that server may be asked, and nothing complains."""
    contexts, complaints, hosts, servers = [], [], set(), set()

    def visit(port, view="main > :visible", **options):
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(60_000)
        context.on("console", lambda message: complaints.append(message.text))
        context.on("weberror", lambda error: complaints.append(str(error.error)))
        context.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        servers.add(f"127.0.0.1:{port}")
        page = context.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector(view)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert [text for text in complaints if "401" not in text] == []
    assert hosts == servers


def send(page, text):
    page.fill("#message", text)
    page.press("#message", "Enter")
    page.wait_for_selector("#composer .go:visible")


def spans(page, place):
    found = page.locator(f"#{place} span")
    return found.evaluate_all("nodes => nodes.map(node => [node.textContent, node.className])")


def test_completion_view_shows_colored_tokens(visit):
    pair = specedge.load(store.embedded_folder())
    with serving(pair) as port:
        page = visit(port)
        assert page.input_value("#prompt") == PROMPT
        page.click("[aria-controls=settings]")
        page.fill("[name=max_tokens]", "60")
        page.fill("[name=draft]", "3")
        page.click("[aria-controls=tokens]")
        page.click("text=Complete >> visible=true")
        page.click("#compare:enabled")
        page.wait_for_selector("#verdict:has-text('times as fast; the texts are identical.')")
        wanted = pair.generate(PROMPT, 60, num_draft_tokens=3)
        assert page.text_content("#result") == PROMPT + wanted.text
        assert spans(page, "text-speculative") == [[one.text, one.fate] for one in wanted.spans]
        assert {fate for _, fate in spans(page, "text-plain")} == {"plain"}
        assert "draft tokens accepted" in page.text_content("#figures-speculative")
        assert "tokens/s" in page.text_content("#figures-plain")
        page.click("#continue")
        page.wait_for_selector("#completion-form .go:visible")
        assert page.input_value("#prompt") == PROMPT + wanted.text


def test_conversation_can_be_continued_edited_and_regenerated(visit, scripted):
    pipeline, port = scripted
    page = visit(port)
    page.click("[aria-controls=settings]")
    page.fill("[name=system]", "Be kind.")
    pipeline.text = "First."
    send(page, "One?")
    assert page.text_content("#status") == "Answer: First."
    assert page.locator("#message:focus").count() == 1
    pipeline.text = "Second."
    send(page, "Two?")
    prompt = pipeline.asked_text
    assert [part in prompt for part in ("Be kind.", "One?", "First.", "Two?")] == [True] * 4
    assert page.locator("#log li").count() == 4
    pipeline.text = "Again."
    page.click("[aria-label='Regenerate answer'] >> nth=1")
    page.wait_for_selector("#log li:last-child:has-text('Again.')")
    page.wait_for_selector("#composer .go:visible")
    assert "Second." not in pipeline.asked_text
    assert page.locator("#message:focus").count() == 1
    page.click("[aria-label='Edit message'] >> nth=0")
    assert not page.is_visible("[aria-label='Edit message'] >> nth=0")
    page.press("[aria-label='Edited message']", "Escape")
    page.click("[aria-label='Edit message']:focus")
    page.fill("[aria-label='Edited message']", "Three?")
    page.press("[aria-label='Edited message']", "Enter")
    page.wait_for_selector("#log li:nth-child(2):last-child:has-text('Again.')")
    page.wait_for_selector("#composer .go:visible")
    assert "One?" not in pipeline.asked_text
    page.click("#new-chat")
    assert page.locator("#log li").count() == 0
    page.reload()
    page.wait_for_selector("#log li:has-text('Three?')")
    assert page.input_value("[name=system]") == "Be kind."
    page.click("[aria-controls=chats]")
    page.click("[aria-label='Delete Three?']")
    assert page.locator("#log li, #chat-list li").count() == 0


def test_reasoning_is_collapsed_and_tool_calls_accept_results(visit, scripted):
    pipeline, port = scripted
    page = visit(port)
    page.click("[aria-controls=settings]")
    page.fill("[name=tools]", WEATHER)
    pipeline.text = "<think>\nHm, hot.\n</think>\n\nI look." + CALL
    send(page, "Hot in Rome?")
    assert page.get_attribute("details.thinking", "open") is None
    assert "Hm, hot." in page.text_content("details.thinking")
    assert '"city": "Rome"' in page.text_content("details.call")
    pipeline.text = "It is 31."
    page.fill(".call textarea", "31 degrees")
    page.click("text=Send result")
    page.wait_for_selector("#log li:last-child:has-text('It is 31.')")
    prompt = pipeline.asked_text
    assert "31 degrees" in prompt
    assert "<think>\nHm, hot." in prompt
    assert page.locator(".call form").count() == 0
    page.select_option("[name=thinking]", "off")
    send(page, "And now?")
    assert pipeline.asked_text.endswith("<think>\n\n</think>\n\n")


def test_markdown_is_rendered_and_html_is_escaped(visit, scripted):
    pipeline, port = scripted
    page = visit(port)
    pipeline.text = (
        "## Title\n**Bold** <b>x</b>\n- `one`\n  - two\n3. three\n"
        "| a | b |\n|---|:-:|\n| 1 | *2* |\n| 3 |\n"
        "```python\nprint(1)\n```\n<script>y</script>\n| no | table |"
    )
    send(page, "Show.")
    answer = page.locator("#log .assistant .body")
    assert answer.locator("strong").text_content() == "Bold"
    assert answer.locator("h3").text_content() == "Title"
    assert answer.locator("li").all_text_contents() == ["one", "two", "three"]
    edges = answer.locator("li").evaluate_all("items => items.map(item => item.offsetLeft)")
    assert edges[0] == edges[2] < edges[1]
    assert answer.locator("ol").get_attribute("start") == "3"
    assert answer.locator("th, td").all_text_contents() == ["a", "b", "1", "2", "3"]
    assert "| no | table |" in answer.text_content()
    assert answer.locator("pre").text_content() == "print(1)"
    assert answer.locator("b, script").count() == 0
    assert "<b>x</b>" in answer.text_content()


def test_stop_keeps_the_text_and_frees_the_slot(visit, monkeypatch):
    pair, is_stopped = chat_pair(1), threading.Event()
    forward, passes = pair.target.forward, itertools.count()

    def wait_after_some(*arguments):
        if next(passes) > 8:
            is_stopped.wait(60)
        return forward(*arguments)

    monkeypatch.setattr(pair.target, "forward", wait_after_some)
    with serving(pair, model=MODEL) as port:
        page = visit(port)
        page.fill("#message", PROMPT)
        page.press("#message", "Enter")
        page.wait_for_selector("#text-speculative span", state="attached")
        page.keyboard.press("Escape")
        page.wait_for_selector("#log .assistant:has-text('Stopped.')")
        is_stopped.set()
        until(lambda: health(port)["running"] == 0)
        assert page.text_content("#chat-error") == ""


def test_page_prompts_for_api_key(visit):
    with serving(chat_pair(1), model=MODEL, api_key="k") as port:
        page = visit(port, "[name=key]:focus")
        page.keyboard.type("k")
        page.keyboard.press("Tab")
        page.wait_for_selector("#chat:visible")
        assert page.text_content("#model").startswith(MODEL)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_layout_has_no_horizontal_scroll_and_labeled_controls(visit, scripted, scheme):
    pipeline, port = scripted
    page = visit(port, viewport={"width": 360, "height": 700}, color_scheme=scheme)
    pipeline.text = "```\n" + "x" * 90 + "\n```"
    send(page, "Wide?")
    for view in ("settings", "tokens", "chats"):
        page.click(f"[aria-controls={view}]")
        assert page.locator("aside:visible").count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    unnamed = page.locator("button, input, textarea, select").evaluate_all(
        "nodes => nodes.filter(node => !(node.labels?.length || node.ariaLabel"
        " || node.textContent.trim())).map(node => node.outerHTML)"
    )
    assert unnamed == []
