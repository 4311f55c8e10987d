"""The official OpenAI client for JavaScript against servers of two pairs that chat."""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")

from javascript_clients import node_script, output

from served import PROMPT, chat_pair, serving

pytestmark = [pytest.mark.hosts]

MODEL = "chatty"
MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "A class."}]
LENGTH = 24
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
CHECKS = [
    "models",
    "chat",
    "streaming",
    "completions",
    "responses",
    "schema",
    "logprobs",
    "errors",
    "cancellation",
]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return node_script("client.mjs", tmp_path_factory.mktemp("javascript"))


def exported(folder):
    """A random target, and a draft that lacks its chat markers."""
    for package in ("torch", "transformers", "onnxscript"):
        pytest.importorskip(package, reason="needs the export extra")
    from checkpoints import make_instruct_pair
    from specedge.exporter import export

    draft, target = make_instruct_pair(folder, draft_context=512, context=512, layers=1)
    export(draft, target, folder / "bundle", draft_precision="fp32")
    return folder / "bundle"


@pytest.fixture(scope="module", params=["embedded", "random"])
def server(request, script, tmp_path_factory):
    """The address of a server, and what its answers must be: the pair's alone."""
    pytest.importorskip("llguidance", reason="needs the grammar extra")
    folder = exported(tmp_path_factory.mktemp("pair")) if request.param == "random" else None
    alone = chat_pair(1, folder)
    chat = alone.chat(MESSAGES, LENGTH, logprobs=3)
    wanted = {
        "model": MODEL,
        "messages": MESSAGES,
        "length": LENGTH,
        "text": chat.text,
        "logprobs": [one.logprob for one in chat.logprobs],
        "prompt": PROMPT,
        "continuation": alone.generate(PROMPT, LENGTH).text,
        "schema": SCHEMA,
        "json": alone.chat(MESSAGES, 100, json_schema=SCHEMA).text,
    }
    with serving(chat_pair(2, folder), model=MODEL, timeout=60) as port:
        yield f"http://127.0.0.1:{port}", json.dumps(wanted)


@pytest.mark.parametrize("check", CHECKS)
def test_the_client_gets_what_the_pipeline_gives_alone(script, server, check):
    url, wanted = server
    output(script, url, check, wanted)


def test_every_check_of_the_script_is_run(script):
    names = re.findall(r"^  async (\w+)\(\)", Path(script[1]).read_text("utf-8"), re.MULTILINE)
    assert names == CHECKS
