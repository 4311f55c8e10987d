"""Cost tables on disk: one file for each bundle, device and set of versions, in the data folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specedge.bundle import MANIFEST, Bundle, store
from specedge.cpu_count import cpu_count
from specedge.strict_json import JsonError, build, parse, to_plain
from specedge.version import __version__

from ..backend.cuda import driver
from ..backend.ort import onnxruntime
from ..backend.sessions import Device
from .cost_table import CostTable

FORMAT = 10
LARGEST = 2**20


@dataclass(frozen=True)
class Key:
    """Fingerprint of a bundle on a machine: `bundle` is the SHA-256 of its manifest, which lists
    its graphs, `threads` 0 the default, `gpus` those that models run on, with their driver.
    """

    bundle: str
    device: str
    provider: str
    ops: str
    threads: int
    processor: str
    gpus: str
    specedge: str
    onnxruntime: str

    @property
    def path(self) -> Path:
        """Where the table for it lies."""
        text = json.dumps([FORMAT, to_plain(self)], sort_keys=True)
        return store.costs_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass(frozen=True)
class CostFile:
    """What a file holds; the key again, so that it says what it is of."""

    format: int
    key: Key
    costs: CostTable


def key_of(bundle: Bundle, target_on: Device, draft_on: Device, ops: str) -> Key:
    """The key of a loaded bundle, by where its models are; `ops` are those of both.

    One table serves sessions with a shared pool and with their own: `specedge tune` has the former.
    """
    manifest = (bundle.folder / MANIFEST).read_bytes()
    return Key(
        bundle=hashlib.sha256(manifest).hexdigest(),
        device=" and ".join(dict.fromkeys((target_on.name, draft_on.name))),
        provider=" and ".join(dict.fromkeys((target_on.provider, draft_on.provider))),
        ops=ops,
        threads=target_on.threads or 0,
        processor=processor(),
        gpus=gpus((target_on, draft_on)),
        specedge=__version__,
        onnxruntime=str(onnxruntime().__version__),
    )


def read(key: Key) -> tuple[CostTable | None, str | None]:
    """The table, or None; and why a file that is there is not used."""
    path = key.path
    try:
        if path.stat().st_size > LARGEST:
            raise JsonError(f"has more than {LARGEST} bytes")
        content = parse(path.read_text("utf-8"))
        if isinstance(content, dict) and content.get("format") != FORMAT:
            raise JsonError(f"is of format {content.get('format')}, not {FORMAT}")
        found = build(CostFile, content)
        if found.key != key:
            raise JsonError("is of something else")
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return None, f"{path} is not used ({reason}); costs are measured again"
    return found.costs, None


def write(key: Key, table: CostTable) -> Path:
    """Store a table in place of another, whole or not at all; return its path. Raises OSError."""
    store.replace_file(key.path, _text(key, table))
    return key.path


def write_first(key: Key, table: CostTable) -> CostTable:
    """Store a table unless another process was first; return the stored one. Raises OSError."""
    try:
        store.create_file(key.path, _text(key, table))
    except FileExistsError:
        if (stored := read(key)[0]) is not None:
            return stored
        write(key, table)  # that file is damaged
    return table


def _text(key: Key, table: CostTable) -> str:
    return json.dumps(to_plain(CostFile(FORMAT, key, table)), indent=1) + "\n"


def gpus(devices: Iterable[Device]) -> str:
    """The GPUs of these devices, each with its compute capability, and their driver; none of the
    CPU. The driver is asked in this process: sessions are to have it at work already.
    """
    indices = dict.fromkeys(device.index for device in devices if not device.is_cpu)
    if not indices:
        return ""
    state = driver.query()
    shown = state.get("gpus", [])
    names = [
        "{name}, {capability[0]}.{capability[1]}".format(**shown[i])
        if i < len(shown)
        else "unknown"
        for i in indices
    ]
    return f"{' and '.join(names)}, driver {state.get('version') or state.get('cuda') or 'unknown'}"


def processor() -> str:
    """The processor's name and the number of cores that this process may use."""
    name = platform.processor()
    with contextlib.suppress(OSError, UnicodeDecodeError):  # Linux says it here alone
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith(("model name", "Hardware", "Model")):
                name = line.partition(":")[2]
                break
    return f"{' '.join(name.split()) or platform.machine()}, {cpu_count()} cores"
