"""Client requests and their expected responses from a single pair."""

import pytest

from served import PROMPT

MODEL = "chatty"
MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "A class."}]
LENGTH = 24
FORM = {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
SCHEMA = FORM | {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rom", "Paris"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"name": "weather", "description": "The weather of days.", "parameters": PARAMETERS}


def random_pair(folder):
    """A bundle of a random target, and of a draft that lacks its chat markers."""
    for package in ("torch", "transformers", "onnxscript"):
        pytest.importorskip(package, reason="needs the export extra")
    from checkpoints import make_instruct_pair
    from specedge.exporter import export

    draft, target = make_instruct_pair(folder, draft_context=512, context=512, layers=1)
    export(draft, target, folder / "bundle", draft_precision="fp32")
    return folder / "bundle"


def wanted(alone):
    """Return the requests and the expected responses of an unshared pair."""
    chat = alone.chat(MESSAGES, LENGTH, logprobs=3)
    return {
        "model": MODEL,
        "messages": MESSAGES,
        "length": LENGTH,
        "text": chat.text,
        "logprobs": [one.logprob for one in chat.logprobs],
        "prompt": PROMPT,
        "continuation": alone.generate(PROMPT, LENGTH).text,
        "schema": SCHEMA,
        "json": alone.chat(MESSAGES, 100, json_schema=SCHEMA).text,
        "tool": TOOL,
    }
