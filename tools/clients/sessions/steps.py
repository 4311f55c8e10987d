"""Steps of a session: each prints one line of JSON with its name and its error, if any."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback

TEXT, TOOLS = os.environ["TEXT_URL"], os.environ["TOOLS_URL"]  # without /v1
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<tool_call> {"name": "weather", "arguments": {"city": "Rome"}} </tool_call>'
ANSWER = "It is 31 degrees in Rome."
LOOP = f"SCRIPT: {CALL} ||| {ANSWER}"  # a call, and the answer to its result
REPORT = '{"city": "Rome", "degrees": 31}'  # structured output
REPORT_CALL = CALL.replace("weather", "Report").replace('{"city": "Rome"}', REPORT)


def step(name):
    """Return a decorator that runs a function and prints its outcome."""

    def run(function):
        error = None
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as caught:
            traceback.print_exc()
            error = f"{type(caught).__name__}: {caught}"[:300]
        print(json.dumps({"step": name, "error": error}), flush=True)

    return run


def same(value, expected):
    assert value == expected, f"{value!r} is not {expected!r}"
