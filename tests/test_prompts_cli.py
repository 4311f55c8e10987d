"""`specedge generate --prompts`: all lines are checked first, then each is written when done."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

import installed
from specedge.bundle import MANIFEST, store
from templates import CHATML

pytestmark = pytest.mark.usefixtures("shared_costs")
COMMAND = [sys.executable, "-m", "specedge", "generate"]


def run(*arguments, stdin=""):
    return installed.run("generate", *arguments, stdin=stdin)


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def test_lines_equal_single_requests(pipeline, jsonl):
    options = {"max_new_tokens": 12, "temperature": 0.8, "num_draft_tokens": 4}
    write(jsonl, {"prompt": "def f("}, {"prompt": "import", "id": "b", "seed": 5})
    result = run("--prompts", jsonl, "-n", 12, "--temperature", 0.8, "--seed", 7, "-k", 4)
    assert result.returncode == 0
    one, two = lines_of(result.stdout)
    for line, prompt, seed in ((one, "def f(", 7), (two, "import", 5)):
        made = pipeline.generate(prompt, seed=seed, **options)
        for name in ("text", "tokens", "finish_reason", "seed", "num_draft_tokens"):
            assert line[name] == getattr(made, name)
        assert line["stats"]["num_accepted"] == made.stats.num_accepted
    assert (one["index"], two["index"], two["id"]) == (0, 1, "b")
    assert "id" not in one
    assert result.stderr == "2 of 2 prompts done, 0 failed, 24 tokens\n"


def test_failed_prompt_yields_error_line_and_others_complete(jsonl):
    write(jsonl, {"prompt": "x " * 600, "id": 1}, {"prompt": ""}, {"prompt": "def f("})
    result = run("--prompts", "-", "--format", "jsonl", "-n", 3, stdin=jsonl.read_text("utf-8"))
    assert result.returncode == 1
    long, empty, good = lines_of(result.stdout)
    assert long.keys() == {"index", "id", "asked", "error"}
    assert "shorten it" in long["error"]
    assert "empty" in empty["error"]
    assert len(good["tokens"]) == 3
    assert result.stderr == "3 of 3 prompts done, 2 failed, 3 tokens\n"


def test_short_replay_fails_only_its_line(jsonl):
    write(jsonl, {"prompt": "a", "replay": [["model", 4, 1]]}, {"prompt": "def f("})
    result = run("--prompts", "-", "--format", "jsonl", "-n", 9, stdin=jsonl.read_text("utf-8"))
    assert result.returncode == 1
    failed, good = lines_of(result.stdout)
    assert "the replay ends after 1 rounds" in failed["error"]
    assert len(good["tokens"]) == 9


def test_chat_without_template_is_rejected_before_generation(jsonl, tmp_path):
    write(jsonl, {"prompt": "a"}, {"messages": [{"role": "user", "content": "Hi"}]})
    result = run("--prompts", jsonl, "--output", tmp_path / "out")
    assert (result.returncode, result.stdout) == (1, "")
    assert "has no chat template" in result.stderr
    assert not (tmp_path / "out").exists()


def test_chats_and_prompts_can_be_mixed(jsonl, tmp_path):
    copy = shutil.copytree(store.embedded_folder(), tmp_path / "bundle")
    manifest = json.loads((copy / MANIFEST).read_text("utf-8")) | {"chat_template": CHATML}
    (copy / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    write(jsonl, {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": rendered})
    chat, plain = lines_of(run("--prompts", jsonl, "--bundle", copy, "-n", 9).stdout)
    assert chat["tokens"] == plain["tokens"]


def test_existing_output_requires_overwrite(tmp_path, text):
    text.write_text("a\n", "utf-8")
    out = tmp_path / "out"
    out.write_text("precious", "utf-8")
    result = run("--prompts", text, "--output", out, "-n", 1)
    assert (result.returncode, out.read_text("utf-8")) == (1, "precious")
    assert "--overwrite" in result.stderr
    assert run("--prompts", text, "--output", out, "-n", 1, "--overwrite").returncode == 0
    assert len(lines_of(out.read_text("utf-8"))) == 1


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_ctrl_c_keeps_every_finished_line(tmp_path, text):
    text.write_text("class A:\n" * 200, "utf-8")
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*COMMAND, "--prompts", text, "--output", out, "-n", "60", "--ignore-eos"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not out.exists() or out.read_bytes().count(b"\n") < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    done = len(lines_of(out.read_text("utf-8")))
    assert f"{done} of 200 prompts done" in err
    assert "Traceback" not in err


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX terminal")
def test_progress_bar_does_not_corrupt_output_lines(text):
    import pty

    text.write_text("class A:\nclass B:\n", "utf-8")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "--prompts", text, "-n", "5"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env=os.environ | {"TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # how Linux says that the other end is closed
        pass
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 0, shown
    assert [line["index"] for line in lines_of(printed)] == [0, 1]
    assert b"2/2" in shown
    os.close(ours)
