"""Servers in processes of their own; needs the standard library only, as workers of peers do."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LOADING = 300.0  # seconds at most


@contextmanager
def running_server(command: Sequence[object], **options: Any) -> Iterator[tuple[str, int]]:
    """Run the command of a server; yield its address and process id once /health answers.

    Args:
        command: Command, in which {port} stands for a free port.
        **options: Options of the process, such as `stderr`.

    Raises:
        RuntimeError: The server ended or did not answer in time.
    """
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    arguments = [str(part).replace("{port}", str(port)) for part in command]
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + LOADING
    with subprocess.Popen(arguments, **options) as process:
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError as error:
                    if process.poll() is not None or time.monotonic() > end:
                        message = f"the server did not start: {shlex.join(arguments)}"
                        raise RuntimeError(message) from error
                    time.sleep(0.2)
            yield url, process.pid
        finally:
            process.terminate()
