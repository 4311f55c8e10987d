"""Run real clients against `specedge serve`, and write their table into docs/clients.md.

Each file in sessions/ is a session of one client. Its first lines name the client and its pinned
packages; they are installed into an environment of its own, which is deleted after the run. Text
is written by the bundle of a chat model, calls of tools by a scripted model (scripted.py), so that
the server and not the model is judged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import click

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "clients.md"
BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->"
TIMEOUT = 900  # seconds of a session


@dataclass(frozen=True)
class Client:
    """A session's file with its client's name and packages."""

    path: Path
    name: str
    installer: str
    packages: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Client:
        name, packages = path.read_text("utf-8").splitlines()[:2]
        installer, _, names = packages.lstrip("#/ ").partition(": ")
        return cls(path, name.partition(": ")[2], installer, tuple(names.split()))

    @property
    def versions(self) -> str:
        """Packages as the table lists them."""
        return ", ".join(re.sub(r"(\[.*\])?==|(?<=.)@", " ", name) for name in self.packages)


CLIENTS = [
    Client.read(path)
    for path in sorted((HERE / "sessions").iterdir())
    if path.suffix in (".py", ".mjs") and path.stem != "steps"
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@contextmanager
def server(*command: str) -> Iterator[str]:
    """Run a server on a free port; yield its address."""
    port = free_port()
    process = subprocess.Popen([sys.executable, *command, "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise click.ClickException(f"the server did not start: {command}") from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def install(client: Client, folder: Path) -> list[str]:
    """Install a client's packages into a folder; return the command of its session."""
    shutil.copytree(client.path.parent, folder, dirs_exist_ok=True)
    script = str(folder / client.path.name)
    if client.installer == "npm":
        (folder / "package.json").write_text('{"private": true, "type": "module"}', "utf-8")
        quiet = ["--silent", "--no-audit", "--no-fund", "--no-package-lock"]
        subprocess.run(["npm", "install", *quiet, *client.packages], cwd=folder, check=True)
        return ["node" if client.path.suffix == ".mjs" else sys.executable, script]
    python = str(folder / "environment" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)
    pip = [python, "-m", "pip", "install", "-qqq", "--disable-pip-version-check"]
    subprocess.run([*pip, *client.packages], check=True)
    return [python, script]


def run_session(client: Client, urls: dict[str, str]) -> list[dict[str, str | None]]:
    """Return the steps of a client's session: their names and errors."""
    with tempfile.TemporaryDirectory(prefix="specedge-client-") as folder:
        try:
            command = install(client, Path(folder))
        except subprocess.CalledProcessError as error:
            return [{"step": "installation", "error": str(error)}]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        }
        environment |= urls | {"HOME": folder}
        try:
            process = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT,
                cwd=folder, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [{"step": "session", "error": f"not over after {TIMEOUT} seconds"}]
    steps = [json.loads(line) for line in process.stdout.splitlines() if line[:2] == '{"']
    if process.returncode or not steps:
        steps.append({"step": "session", "error": f"exit status {process.returncode}"})
    return steps


def row(client: Client, steps: list[dict[str, str | None]]) -> str:
    """Return a client's line of the table."""
    passed = "; ".join(step["step"] for step in steps if not step["error"])
    failed = "; ".join(step["step"] for step in steps if step["error"])
    return f"| {client.name} | {client.versions} | {passed} | {failed or 'none'} |"


def write_rows(rows: dict[str, str]) -> None:
    """Replace the lines of clients that ran; the others stay."""
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    old = {line.split(" | ")[0][2:]: line for line in table.splitlines()[4:]}
    lines = {name: (old | rows)[name] for name in sorted(old | rows, key=str.casefold)}
    head = f"Run on {date.today():%-d %B %Y}.\n\n"
    head += "| client | packages | exercised | failed |\n|---|---|---|---|\n"
    PAGE.write_text(before + BEGIN + head + "\n".join(lines.values()) + "\n" + END + after, "utf-8")


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--bundle", required=True, help="Bundle of a chat model, SmolLM2-135M-Instruct's.")
@click.option("--float-bundle", help="Bundle of the same model in float32, to compare scores.")
@click.option("--gguf", help="GGUF file of the same model, for transformers' own scores.")
@click.option("--no-write", is_flag=True, help="Leave docs/clients.md as it is.")
def main(
    names: tuple[str, ...], bundle: str, float_bundle: str | None, gguf: str | None, no_write: bool
) -> None:
    stems = [client.path.stem for client in CLIENTS]
    if unknown := set(names) - set(stems):
        raise click.UsageError(f"no session {', '.join(unknown)}; there are {', '.join(stems)}")
    bundle = str(Path(bundle).resolve())
    serve = ("-m", "specedge", "serve", "--served-model-name", "smollm2", "--bundle")
    rows, failed = {}, 0
    with ExitStack() as stack:
        urls = {
            "TEXT_URL": stack.enter_context(server(*serve, bundle)),
            "TOOLS_URL": stack.enter_context(server(str(HERE / "scripted.py"), "--bundle", bundle)),
            "BUNDLE": bundle,
            "EXPORTER_PATH": os.pathsep.join(site.getsitepackages()),
        }
        if float_bundle:
            urls["FLOAT_URL"] = stack.enter_context(server(*serve, float_bundle))
        if gguf:
            urls["GGUF"] = str(Path(gguf).resolve())
        for client in CLIENTS:
            if names and client.path.stem not in names:
                continue
            steps = run_session(client, urls)
            rows[client.name] = row(client, steps)
            failed += sum(bool(step["error"]) for step in steps)
            click.echo(rows[client.name])
            for step in steps:
                if step["error"]:
                    click.echo(f"  {step['step']}: {step['error']}")
    if not no_write:
        write_rows(rows)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
