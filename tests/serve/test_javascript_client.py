"""The official OpenAI client for JavaScript against servers of two pairs that chat."""

import json
import re
from pathlib import Path

import pytest
from expected_answers import MODEL, random_pair, wanted
from javascript_clients import node_script, output

from served import chat_pair, serving
from tool_templates import QWEN

pytestmark = [pytest.mark.hosts]

CHECKS = [
    "models",
    "chat",
    "streaming",
    "completions",
    "responses",
    "schema",
    "tools",
    "logprobs",
    "errors",
    "cancellation",
]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return node_script("client.mjs", tmp_path_factory.mktemp("javascript"))


@pytest.fixture(scope="module", params=["embedded", "random"])
def server(request, script, tmp_path_factory):
    """The address of a server, and what its answers must be: the pair's alone."""
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    folder = random_pair(tmp_path_factory.mktemp("pair")) if request.param == "random" else None
    alone = chat_pair(1, folder, QWEN)
    with serving(chat_pair(2, folder, QWEN), model=MODEL, timeout=60) as port:
        yield f"http://127.0.0.1:{port}", json.dumps(wanted(alone))


@pytest.mark.parametrize("check", CHECKS)
def test_client_result_equals_direct_pipeline_result(script, server, check):
    url, answers = server
    output(script, url, check, answers)


def test_every_check_of_the_script_is_run(script):
    names = re.findall(r"^  async (\w+)\(\)", Path(script[1]).read_text("utf-8"), re.MULTILINE)
    assert names == CHECKS
