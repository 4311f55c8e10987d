"""Ctrl-C and SIGTERM at any moment of a command, and errors under --json."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from installed import run
from specedge.runtime.requests.stream import Stream

posix = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")

pytestmark = pytest.mark.usefixtures("shared_costs")
COMMAND = [sys.executable, "-m", "specedge"]
HOOK = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup and & ignore it
def hook(event, arguments, sent=[]):
    if event == "import" and arguments[0] == os.environ["INTERRUPTED_IMPORT"] and not sent:
        sent.append(1)
        os.kill(os.getpid(), getattr(signal, os.environ.get("SENT", "SIGINT")))
if "INTERRUPTED_IMPORT" in os.environ:
    sys.addaudithook(hook)
"""


@pytest.fixture
def interrupted(tmp_path):
    """Run a command that gets a signal when it imports a module for the first time."""
    (tmp_path / "sitecustomize.py").write_text(HOOK, "utf-8")

    def run(module, *arguments, sent="SIGINT", command=COMMAND):
        paths = os.pathsep.join([str(tmp_path), *sys.path])
        return subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "INTERRUPTED_IMPORT": module, "SENT": sent},
            timeout=120,
        )

    return run


@posix
@pytest.mark.parametrize(
    "module",
    ["specedge.errors", "specedge.cli", "numpy._core", "onnxruntime.capi", "tokenizers"],
)
def test_ctrl_c_at_any_moment_of_the_start_exits_130_quietly(interrupted, module):
    result = interrupted(module, "generate", "x", "-n", "3")
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.strip() == "specedge: interrupted"


@posix
def test_ctrl_c_at_the_start_of_the_installed_script_exits_130_quietly(interrupted, tmp_path):
    script = tmp_path / "specedge"
    script.write_text("import sys\nfrom specedge.__main__ import main\nsys.exit(main())\n", "utf-8")
    result = interrupted("specedge.errors", "--help", command=[sys.executable, str(script)])
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.strip() == "specedge: interrupted"


@posix
def test_import_does_not_change_signal_handlers():
    code = "import signal; before = signal.getsignal(2); import specedge, specedge.cli\n"
    code += "assert signal.getsignal(2) is before"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def broken(how):
    """Run a command with an onnxruntime that fails in a given way."""
    code = f"""if True:
        import importlib, sys
        sys.modules["onnxruntime"] = None
        real = importlib.import_module
        def failing(name, *rest):
            if name == "onnxruntime":
                {how}
            return real(name, *rest)
        importlib.import_module = failing
        import specedge
        specedge.load()"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


def test_import_errors_of_onnxruntime_are_reported():
    missing = "libcudart.so.13: cannot open shared object file: No such file or directory"
    said = broken(f"raise ImportError({missing!r})").strip().splitlines()[-1]
    assert missing in said
    assert "not installed" not in said
    inner = broken(
        "raise ModuleNotFoundError(\"No module named 'coloredlogs'\", name='coloredlogs')"
    )
    assert "No module named 'coloredlogs'" in inner.strip().splitlines()[-1]


def test_interrupt_during_import_is_raised_as_keyboard_interrupt():
    said = broken("raise ImportError('initialization failed') from KeyboardInterrupt()")
    assert said.strip().splitlines()[-1] == "KeyboardInterrupt"


def started(*arguments):
    """A command that takes signals, however this process was started."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@posix
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_prints_partial_text_and_summary(number, code):
    process = started("generate", "x", "-n", "900", "--ignore-eos", "-k", "0")
    first = process.stdout.read(1)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert (first + out).endswith("\n")
    summary, last = err.split("\n\n")[0].strip(), err.splitlines()[-1]
    assert re.search(r"tokens? in", summary)
    assert last == f"specedge: {'interrupted' if code == 130 else 'terminated'}"


@posix
def test_sigterm_with_json_prints_partial_results(monkeypatch):
    following, pieces = Stream.__next__, []

    def piece(self):
        pieces.append(1)
        if len(pieces) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return following(self)

    monkeypatch.setattr(Stream, "__next__", piece)
    result = run("generate", "def f(x):", "-n", 100, "--json")
    assert result.returncode == 143
    found = json.loads(result.stdout)
    assert 0 < len(found["tokens"]) < 100
    assert result.stderr.endswith("specedge: terminated\n")


def test_json_after_two_dashes_is_a_prompt():
    from specedge.cli import asked_for_json

    assert asked_for_json(["generate", "--json", "--", "x"])
    assert not asked_for_json(["generate", "--", "--json"])
