# client: Codex CLI
# npm: @openai/codex@0.169.0
import json
import os
import subprocess
import sys
from pathlib import Path

from steps import TOOLS, same, step

folder = Path(__file__).parent
home = folder / "home"
home.mkdir()
(home / "config.toml").write_text(f"""model = "scripted"
model_provider = "specedge"
model_context_window = 65536
[model_providers.specedge]
name = "specedge"
base_url = "{TOOLS}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
""", "utf-8")  # fmt: skip


def codex(*arguments):
    command = [folder / "node_modules" / ".bin" / "codex", "exec", *arguments, "--json",
               "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]  # fmt: skip
    process = subprocess.run(
        command, env=os.environ | {"CODEX_HOME": str(home)}, capture_output=True, text=True,
        timeout=300, stdin=subprocess.DEVNULL, cwd=folder,
    )  # fmt: skip
    print(process.stderr[-3000:], file=sys.stderr)
    events = [json.loads(line) for line in process.stdout.splitlines() if line[:1] == "{"]
    same(process.returncode, 0)
    return [event["item"] for event in events if event["type"] == "item.completed"]


@step("exec: text")
def _():
    same(codex("SCRIPT: Hello.")[-1]["text"], "Hello.")


@step("exec: command, its output, answer")
def _():
    call = {"name": "exec_command", "arguments": {"cmd": "echo a-word > written.txt"}}
    items = codex(f"SCRIPT: <tool_call> {json.dumps(call)} </tool_call> ||| It is written.")
    same(items[-1]["text"], "It is written.")
    same((folder / "written.txt").read_text().strip(), "a-word")


@step("exec: next turn of a session")
def _():
    same(codex("resume", "--last", "SCRIPT: Once more.")[-1]["text"], "Once more.")
