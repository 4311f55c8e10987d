# client: opencode
# npm: opencode-ai@1.18.33
import json
import os
import subprocess
import sys
from pathlib import Path

from steps import TOOLS, same, step

folder = Path(__file__).parent
project = folder / "project"
project.mkdir()
model = {"name": "scripted", "tool_call": True, "limit": {"context": 65536, "output": 4096}}
provider = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "specedge",
    "options": {"baseURL": f"{TOOLS}/v1", "apiKey": "none"},
    "models": {"scripted": model},
}
config = {"provider": {"specedge": provider}, "permission": "allow", "autoupdate": False,
          "share": "disabled"}  # fmt: skip
(project / "opencode.json").write_text(json.dumps(config), "utf-8")


def opencode(*arguments):
    *options, message = arguments
    command = [folder / "node_modules" / ".bin" / "opencode", "run", "--format", "json",
               "--print-logs", "--model", "specedge/scripted", *options]  # fmt: skip
    environment = os.environ | {"OPENCODE_DISABLE_MODELS_FETCH": "1", "PWD": str(project)}
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, input=message,
        cwd=project,
    )  # fmt: skip
    print(process.stderr[-2000:], process.stdout[-2000:], file=sys.stderr)
    same(process.returncode, 0)
    events = [json.loads(line) for line in process.stdout.splitlines() if line[:1] == "{"]
    return [event["part"]["text"] for event in events if event["type"] == "text"]


@step("run: text")
def _():
    same(opencode("SCRIPT: Hello.")[-1].strip(), "Hello.")


@step("run: command, its output, answer")
def _():
    arguments = {"command": "echo a-word > written.txt", "description": "Write a word"}
    call = json.dumps({"name": "bash", "arguments": arguments})
    texts = opencode(f"SCRIPT: <tool_call> {call} </tool_call> ||| It is written.")
    same(texts[-1].strip(), "It is written.")
    same((project / "written.txt").read_text().strip(), "a-word")


@step("run: next turn of a session")
def _():
    same(opencode("--continue", "SCRIPT: Once more.")[-1].strip(), "Once more.")
