"""`specedge serve` as a process: startup output, allowed hosts and shutdown."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from installed import run
from served import MODEL, PROMPT, ask
from specedge.bundle import MANIFEST, Bundle, store
from specedge.runtime.backend.sessions import Device
from specedge.runtime.planning import cost_files

pytestmark = pytest.mark.usefixtures("shared_costs")
posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
SHORT = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
LONG = SHORT | {"max_tokens": 160, "ignore_eos": True, "speculative": {"off": True}}


@contextmanager
def served(*arguments, **environment):
    """A process that serves, its port, and the line with its address."""
    command = [sys.executable, "-m", "specedge", "serve", "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | environment
    )
    try:
        line = next(line for line in process.stderr if "/v1" in line)
        yield process, int(re.search(r":(\d+)/v1", line)[1]), line
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_startup_line_reports_url_model_and_slots():
    """A server of localhost without a key answers for that name, and for named hosts."""
    options = ("--slots", 2, "--max-length", 256, "--model-name", "pair")
    with served(*options, "--allowed-host", "pair.example") as (_, port, line):
        assert re.fullmatch(
            rf"specedge: http://127\.0\.0\.1:{port}/v1 serves pair \(the embedded pair\) in "
            r"2 slots of 256 tokens and 4\.6 MB each; memory up to \d+\.\d MB\n",
            line,
        )
        assert json.loads(ask(port, "GET", "/v1/models")[2])["data"][0]["id"] == "pair"
        assert json.loads(ask(port, "GET", "/health")[2])["slots"] == 2
        refused = ask(port, "POST", "/v1/completions", SHORT | {"prompt": [7] * 256})[2]
        assert b"takes 256 with at least one new" in refused
        hosts = (f"localhost:{port}", "pair.example", "evil.example")
        statuses = [ask(port, "GET", "/v1/models", Host=host)[0] for host in hosts]
        assert statuses == [200, 200, 403]
        result = run("serve", "--port", port)  # which is told before a pair is loaded
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in result.stderr


def test_notes_follow_the_address(tmp_path):
    key = cost_files.cost_key(Bundle.read(store.embedded_folder()), Device(), Device(), "gqa, gqa")
    damaged = tmp_path / "specedge" / "costs" / key.path.name
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{", "utf-8")
    with served(XDG_DATA_HOME=str(tmp_path)) as (process, _, line):
        assert line.startswith("specedge: http")
        assert process.stderr.readline().startswith(f"note: {damaged} is not used")


@pytest.fixture
def mine():
    """Return a bundle with sampling defaults, which is the default bundle."""
    folder = shutil.copytree(store.embedded_folder(), store.bundles_folder() / "mine")
    manifest = json.loads((folder / MANIFEST).read_text("utf-8").replace('"python-9m"', '"mine"'))
    manifest["default_sampling"] |= {"temperature": 0.2, "top_p": 0.9}
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    store.set_default(folder)
    return folder


def test_last_exported_bundle_is_served_only_if_specified(mine):
    with served() as (process, port, line):
        assert f"serves {MODEL} (the embedded pair) in" in line
        assert f"--bundle {mine}" in process.stderr.readline()
        assert json.loads(ask(port, "GET", "/v1/models")[2])["data"][0]["id"] == MODEL
    environment = {"SPECEDGE_BUNDLE": str(mine), "SPECEDGE_API_KEY": "geheim"}
    with served(**environment) as (process, port, line):
        assert f"serves mine (bundle {mine}) in" in line
        assert ask(port, "GET", "/v1/models")[0] == 401
        given = {"Authorization": "Bearer geheim", "Host": "pair.example"}
        assert ask(port, "GET", "/v1/models", **given)[0] == 200
        process.terminate()
        told = "sampling defaults of the model: temperature 0.2, top_p 0.9"
        assert told in process.stderr.read()


@posix
def test_sigterm_completes_running_requests_and_rejects_new_ones():
    with served("--slots", 1) as (process, port, _):
        wanted = json.loads(ask(port, "POST", "/v1/completions", LONG)[2])["choices"][0]["text"]
        found = []
        thread = threading.Thread(
            target=lambda: found.append(ask(port, "POST", "/v1/completions", LONG))
        )
        thread.start()
        while not json.loads(ask(port, "GET", "/health")[2])["running"]:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        assert json.loads(found[0][2])["choices"][0]["text"] == wanted
        assert process.wait(20) == 0
        assert process.stderr.read() == "specedge: stopped\n"
        with pytest.raises(OSError, match="refused"):
            ask(port, "GET", "/health")


@posix
def test_requests_beyond_grace_period_are_terminated():
    with served("--grace", 0, "--slots", 1) as (process, port, _):
        stream = LONG | {"stream": True, "n": 16, "prompt": [PROMPT, PROMPT]}  # many seconds
        thread = threading.Thread(target=ask, args=(port, "POST", "/v1/completions", stream))
        thread.start()
        while not json.loads(ask(port, "GET", "/health")[2])["running"]:
            time.sleep(0.005)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert time.monotonic() - begin < 5
        thread.join(20)


def test_only_allowed_hosts_are_served_without_a_key(mine):
    options = ("--bundle", mine, "--generation-config", "none")
    hosts = ("--host", "0.0.0.0", "--allowed-host", "pair.example")
    with served(*options, *hosts) as (process, port, line):
        assert f"serves mine (bundle {mine}) in" in line
        assert (
            "anyone who can connect to 0.0.0.0 can use the server; set $SPECEDGE_API_KEY"
            in process.stderr.readline()
        )
        statuses = {
            host: ask(port, "GET", "/v1/models", Host=host, Origin=f"http://{host}")[0]
            for host in ("localhost:49153", "pair.example", "evil.example:49153", "evil.example")
        }
        process.terminate()
        assert "sampling defaults" not in process.stderr.read()
    assert list(statuses.values()) == [200, 200, 403, 403]


@pytest.mark.parametrize(
    ("template", "said"),
    [(b"{% if %}", "chat template is invalid"), (b"\xff\xfe", "cannot be read")],
)
def test_invalid_chat_template_is_one_line_error(tmp_path, template, said):
    path = tmp_path / "broken.jinja"
    path.write_bytes(template)
    result = run("serve", "--port", 0, "--chat-template", path)
    assert result.returncode
    assert said in result.stderr.strip().splitlines()[-1]


def test_missing_serve_extra_error_has_pip_command():
    code = "import sys; sys.modules['uvicorn'] = None; from specedge.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'specedge[serve]'" in result.stderr
