"""Pass costs of a loaded bundle: read from the user's data folder, or measured at load.

Each cache key, of bundle, device and versions, has one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from specedge.bundle import MANIFEST, Bundle, store
from specedge.cpu_count import processor_name
from specedge.diagnosis import driver
from specedge.errors import SpecEdgeError
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS
from specedge.strict_json import JsonError, build, parse, to_plain
from specedge.version import __version__

from ..backend.ort import onnxruntime
from ..backend.sessions import Device
from .cost_table import CostTable, assumed_costs

FORMAT = 10
MAX_FILE_SIZE = 2**20


@dataclass(frozen=True)
class CostKey:
    """Cache key of measured pass costs: fingerprint of a bundle on a machine.

    `bundle` is the SHA-256 of the manifest, which lists the graphs; `threads` is 0 for the default;
    `gpus` lists the GPUs in use and the driver version.
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
        """Path of the file with this key's table."""
        text = json.dumps([FORMAT, to_plain(self)], sort_keys=True)
        return store.costs_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@dataclass(frozen=True)
class CostFile:
    """Content of a cost file: cache key and table."""

    format: int
    key: CostKey
    costs: CostTable


def cost_key(bundle: Bundle, target_on: Device, draft_on: Device, ops: str) -> CostKey:
    """Return the cache key of a loaded bundle, by the devices and graph variants of its models.

    Sessions with a shared thread pool and sessions with their own pools use the same table.
    """
    manifest = (bundle.folder / MANIFEST).read_bytes()
    return CostKey(
        bundle=hashlib.sha256(manifest).hexdigest(),
        device=" and ".join(dict.fromkeys((target_on.name, draft_on.name))),
        provider=" and ".join(dict.fromkeys((target_on.provider, draft_on.provider))),
        ops=ops,
        threads=target_on.threads or 0,
        processor=processor_name(),
        gpus=gpu_names((target_on, draft_on)),
        specedge=__version__,
        onnxruntime=str(onnxruntime().__version__),
    )


class PassCosts:
    """Cost table of a loaded bundle; a request keeps the `table` that it began with.

    Without a `key`, in a pipeline that was not loaded from a bundle, placeholder costs are used and
    nothing is stored. `note` is the reason, in one line, why a stored table is not used.
    """

    def __init__(self, key: CostKey | None = None) -> None:
        self._key = key
        stored, self.note = (None, None) if key is None else read(key)
        self.table = stored or assumed_costs(MAX_EXPORTED_DRAFT_TOKENS)

    @property
    def is_measured(self) -> bool:
        """Return True if the table was measured for this bundle on this machine."""
        return self.table.origin != "assumed"

    def complete(self, measure: Callable[[], CostTable]) -> None:
        """Measure and store costs unless a table is stored already.

        The first process to write wins. A table that cannot be stored is used by this process only.
        """
        if not self.is_measured:
            self.table = measure()
            if self._key is not None:
                with contextlib.suppress(OSError):
                    self.table = write_first(self._key, self.table)

    def store(self, table: CostTable) -> Path:
        """Replace the table in use and the stored one; return its path.

        Raises:
            SpecEdgeError: The pipeline was not loaded from a bundle.
            OSError: The file cannot be written.
        """
        path = write(self._stored_key, table)
        self.table = table
        return path

    def store_as_default(self, table: CostTable) -> Path:
        """Store a table for the default thread count; return its path. Raises as `store`."""
        return write(replace(self._stored_key, threads=0), table)

    @property
    def _stored_key(self) -> CostKey:
        if self._key is None:
            raise SpecEdgeError(
                "costs cannot be stored for a pipeline that was not loaded from a bundle"
            )
        return self._key

    def check_writable(self) -> None:
        """Raise OSError if costs cannot be stored."""
        if self._key is not None:
            store.check_writable(self._key.path)


def read(key: CostKey) -> tuple[CostTable | None, str | None]:
    """Return the stored table or None, and the reason why an existing file is not used."""
    path = key.path
    try:
        if path.stat().st_size > MAX_FILE_SIZE:
            raise JsonError(f"has more than {MAX_FILE_SIZE} bytes")
        content = parse(path.read_text("utf-8"))
        if isinstance(content, dict) and content.get("format") != FORMAT:
            raise JsonError(f"has format {content.get('format')}, expected {FORMAT}")
        file = build(CostFile, content)
        if file.key != key:
            raise JsonError("has a different cache key")
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return None, f"{path} is not used ({reason}); costs are measured again"
    return file.costs, None


def write(key: CostKey, table: CostTable) -> Path:
    """Replace the stored table atomically; return its path. Raises OSError."""
    store.replace_file(key.path, _text(key, table))
    return key.path


def write_first(key: CostKey, table: CostTable) -> CostTable:
    """Store a table unless one exists; return the stored one. Raises OSError."""
    try:
        store.create_file(key.path, _text(key, table))
    except FileExistsError:
        if (stored := read(key)[0]) is not None:
            return stored
        write(key, table)  # the existing file is damaged
    return table


def _text(key: CostKey, table: CostTable) -> str:
    return json.dumps(to_plain(CostFile(FORMAT, key, table)), indent=1) + "\n"


def gpu_names(devices: Iterable[Device]) -> str:
    """Return GPU names with compute capability and driver version; empty for the CPU.

    The driver is queried in this process, so sessions must have initialized it already.
    """
    indices = dict.fromkeys(device.index for device in devices if not device.is_cpu)
    if not indices:
        return ""
    state = driver.query()
    gpus = state.get("gpus", [])
    names = [
        "{name}, {capability[0]}.{capability[1]}".format(**gpus[i]) if i < len(gpus) else "unknown"
        for i in indices
    ]
    return f"{' and '.join(names)}, driver {state.get('version') or state.get('cuda') or 'unknown'}"
