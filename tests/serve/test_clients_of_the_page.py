"""Clients of docs/clients.md, unchanged except for the address."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from javascript_clients import SET_UP, node_script, output

from served import chat_pair, serving

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
LENGTH = 40
PROJECT = """<Project Sdk="Microsoft.NET.Sdk"><PropertyGroup>
<OutputType>Exe</OutputType><TargetFramework>netcoreapp3.1</TargetFramework>
</PropertyGroup></Project>"""


@pytest.fixture(scope="module")
def wanted():
    return chat_pair(1).chat(MESSAGES, LENGTH).text


@pytest.fixture(scope="module")
def client():
    """The code of a language, of a client of a server that draws nothing and writes short texts."""
    pair = chat_pair(1)
    stream = pair.stream
    short = {"temperature": 0, "max_new_tokens": LENGTH}
    pair.stream = lambda prompt, **options: stream(prompt, **options | short)
    with serving(pair) as port:

        def code(language):
            clients = PAGE.read_text("utf-8").partition("## Examples")[2].partition("\n## ")[0]
            (found,) = re.findall(rf"```{language}\n(.*?)```", clients, re.DOTALL)
            assert found.count(":8000/v1") == 1
            return found.replace(":8000/v1", f":{port}/v1")

        yield code


def test_documented_python_client(client, wanted):
    pytest.importorskip("openai", reason="needs the test extra")
    assert output([sys.executable, "-c", client("python")]) == wanted


def test_documented_curl_client(client, wanted):
    if not shutil.which("curl"):
        pytest.skip("curl is missing")
    *events, last, done = output(["sh", "-c", client("sh")]).split("\n\n")[:-1]
    assert done == "data: [DONE]"
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in events) == wanted
    assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == LENGTH


@pytest.mark.hosts
def test_documented_javascript_client(client, wanted, tmp_path):
    command = node_script("client.mjs", tmp_path)
    Path(command[1]).write_text(client("js"), "utf-8")
    assert output(command) == wanted


@pytest.mark.hosts
def test_documented_csharp_client(client, wanted, tmp_path):
    dotnet = Path(os.environ.get("SPECEDGE_HOST_TOOLS") or "none", "bin", "dotnet").resolve()
    if not dotnet.exists():
        pytest.skip(f"no .NET; {SET_UP}")
    (tmp_path / "client.csproj").write_text(PROJECT, "utf-8")
    (tmp_path / "Program.cs").write_text(client("cs"), "utf-8")
    quiet = ["-v", "q", "-nologo", "-warnaserror", "-nodeReuse:false"]
    built = tmp_path / "built"
    given = ["-p:UseSharedCompilation=false", "-o", built, tmp_path / "client.csproj"]
    subprocess.run([dotnet, "build", *quiet, *given], check=True, timeout=300)
    assert output([dotnet, built / "client.dll"]) == wanted
