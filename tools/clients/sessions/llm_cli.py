# client: llm (Simon Willison)
# pip: llm==0.36
import json
import os
import subprocess
import sys
from pathlib import Path

from steps import ANSWER, LOOP, REPORT, TEXT, TOOLS, same, step

folder = Path(__file__).parent
MODEL = """- model_id: {id}
  model_name: {name}
  api_base: {url}/v1
  supports_tools: true
  supports_schema: true
"""
models = [("text", "smollm2", TEXT), ("tools", "scripted", TOOLS)]
lines = [MODEL.format(id=id_, name=name, url=url) for id_, name, url in models]
lines.append(f"- model_id: old\n  model_name: smollm2\n  api_base: {TEXT}/v1\n  completion: true\n")
(folder / "extra-openai-models.yaml").write_text("".join(lines), "utf-8")
(folder / "functions.py").write_text(
    'def weather(city: str) -> str:\n    """Tell the weather."""\n    return "31 in " + city\n'
)


def llm(*arguments):
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    environment = os.environ | {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


SHORT = ("-o", "max_tokens", "8", "-o", "temperature", "0")


@step("prompt, streamed or not; system prompt; next turn")
def _():
    whole = llm("-m", "text", "Hello", "--no-stream", *SHORT)
    same(llm("-m", "text", "Hello", *SHORT), whole)
    assert llm("-m", "text", "Hello", "-s", "Be brief.", *SHORT)
    assert llm("-c", "And?", *SHORT)


@step("completion model")
def _():
    assert llm("-m", "old", "The sky is", *SHORT)


@step("schema")
def _():
    response = llm("-m", "tools", "--schema", "city, degrees int", f"SCRIPT: {REPORT}")
    same(json.loads(response)["degrees"], 31)


@step("tool loop")
def _():
    response = llm("-m", "tools", "--functions", str(folder / "functions.py"), LOOP)
    assert response.endswith(ANSWER), response
