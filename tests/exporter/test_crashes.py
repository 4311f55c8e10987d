"""After any crash, the destination contains a complete bundle or its previous content.

Whole exports take seconds, so most of these are forks that only write: real processes all the same.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import traceback

import pytest

from specedge import destination
from specedge.bundle import Bundle
from specedge.errors import ExportError
from specedge.exporter import export
from specedge.staging import remove_stale_folders
from traces import WITH_TRACES

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has other signals and mounts")
COMMAND = (*WITH_TRACES, "export")


@pytest.fixture
def options(pairs):
    return ("--target", pairs.checkpoint("gpt2")[1], "--max-length", "32", "--ops", "onnx")


@pytest.fixture
def place(pairs, tmp_path):
    """A folder with a bundle in it, whose context is 256, and nothing else."""
    shutil.copytree(pairs.bundle("gpt2").folder, tmp_path / "place/bundle")
    return tmp_path / "place"


@contextlib.contextmanager
def process(function):
    """Run a function in a fork; yields its id. It is killed in the end if it still runs."""
    pid = os.fork()
    if not pid:
        code = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
            function()
            code = 0
        except SystemExit as error:
            code = error.code
        except KeyboardInterrupt:
            code = 130
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def ended(pid):
    """Return the exit code of a process, or the negative number of the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def replacement(place, pause=0.0):
    """Replace the bundle with a copy of shorter context; pause before the end."""
    text = (place / "bundle/bundle.json").read_text("utf-8")
    with destination.destination(place / "bundle") as work:
        shutil.copytree(place / "bundle", work, dirs_exist_ok=True)
        text = text.replace('"context_length": 256', '"context_length": 32')
        (work / "bundle.json").write_text(text, "utf-8")
        (place / "begun").touch()
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and not (place / "go").exists():
            time.sleep(0.01)


def wait_for(path):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def context(place):
    """The context length of the bundle, which is whole and alone."""
    for note in ("begun", "go"):
        (place / note).unlink(missing_ok=True)
    assert [p.name for p in place.iterdir()] == ["bundle"]
    bundle = Bundle.read(place / "bundle")
    for name in bundle.files:
        bundle.check_hash(name)
    return bundle.context_length


@pytest.mark.parametrize(("number", "length"), [(0, 256), (1, 256), (2, 32), (3, 32)])
@pytest.mark.parametrize("next_export", [False, True])
def test_bundle_survives_kill_after_each_rename(place, monkeypatch, number, length, next_export):
    real, done = os.rename, []

    def rename(*paths):
        if len(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*paths)
        done.append(paths)
        if len(done) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(os, "rename", rename)
    with process(lambda: replacement(place)) as pid:
        assert ended(pid) == (-signal.SIGKILL if number < 3 else 0)
    monkeypatch.undo()
    if next_export:
        with pytest.raises(ExportError, match="no-target"):
            export("./no-draft", "./no-target", place / "bundle")
    else:
        remove_stale_folders(place)
    assert context(place) == length


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_interrupted_replacement_keeps_existing_bundle(place, number, code):
    with process(lambda: replacement(place, 60)) as pid:
        wait_for(place / "begun")
        os.kill(pid, number)
        assert ended(pid) == code
    assert context(place) == 256


@pytest.mark.slow
def test_terminated_export_shows_no_error_and_keeps_existing_bundle(options, place):
    command = [*COMMAND, *options, "--output", place / "bundle"]
    exporting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(place / ".bundle.specedge-export/new/target/weights.bin")
    exporting.terminate()
    lines = exporting.communicate(timeout=60)[1].splitlines()
    assert all(re.fullmatch(r"[\w ]+: \d+\.\d s", line) for line in lines)
    assert exporting.returncode == 143
    assert context(place) == 256


def test_export_started_with_nohup_survives_its_terminal(place):
    def ignoring():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        replacement(place, 60)

    with process(ignoring) as pid:
        wait_for(place / "begun")
        os.kill(pid, signal.SIGHUP)
        (place / "go").touch()
        assert ended(pid) == 0
    assert context(place) == 32


def test_second_export_to_one_folder_is_refused(place):
    with process(lambda: replacement(place, 60)) as pid:
        wait_for(place / "begun")
        with pytest.raises(ExportError) as caught:
            export("./no-draft", "./no-target", place / "bundle")
        assert str(caught.value) == (
            f"another export to {place / 'bundle'} is running; wait until it has finished"
        )
        assert Bundle.read(place / "bundle").context_length == 256
        (place / "go").touch()
        assert ended(pid) == 0
    assert context(place) == 32


def test_concurrent_exports_to_one_destination_never_mix(tmp_path):
    output, names = tmp_path / "bundle", ("one", "two", "three")

    def race():
        for i in range(100):
            try:
                with destination.destination(output) as work:
                    assert not list(work.iterdir())
                    for name in names:
                        (work / name).write_text(f"{os.getpid()} {i}", "utf-8")
                    manifest = {"specedge_version": "0", "files": dict.fromkeys(names)}
                    (work / "bundle.json").write_text(json.dumps(manifest), "utf-8")
            except ExportError as error:
                if "another export to" not in str(error):
                    raise

    with process(race) as first, process(race) as second, process(race) as third:
        assert [ended(pid) for pid in (first, second, third)] == [0, 0, 0]
    assert len({(output / name).read_text("utf-8") for name in names}) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"]


def mounted(script, *arguments):
    """Run a shell script as root of a temporary mount namespace."""
    try:
        allowed = subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if allowed.returncode:
        pytest.skip(f"no mounts here: {allowed.stderr.decode().strip()}")
    return subprocess.run(
        ["unshare", "-rm", "sh", "-ec", script, "sh", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_full_disk_keeps_existing_bundle(options, place, tmp_path):
    old = place / "bundle"
    used = sum(p.stat().st_size + 4096 for p in old.rglob("*"))
    script = """
        disk=$1; old=$2; size=$3; shift 3
        mount -t tmpfs -o size=$size none "$disk"
        cp -r "$old" "$disk/bundle"
        "$@" && exit 9
        diff -r "$old" "$disk/bundle"
        ls -A "$disk"
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    command = (*COMMAND, *options, "--output", disk / "bundle")
    result = mounted(script, disk, old, used + 200_000, *command)
    assert (result.returncode, result.stdout) == (0, "bundle\n"), result.stderr
    assert result.stderr.splitlines()[-1] == (
        f"specedge: no space left for {disk / 'bundle'}; free disk space, or specify another "
        "disk with --output"
    )


@pytest.mark.slow
def test_read_only_destination_is_rejected_before_export(options, tmp_path):
    script = 'place=$1; shift; mount -t tmpfs -o ro none "$place"; "$@"'
    result = mounted(script, tmp_path, *COMMAND, *options, "--output", tmp_path / "bundle")
    assert result.returncode == 1
    assert result.stderr == (
        f"specedge: {tmp_path} cannot be written to; specify another folder with --output\n"
    )
