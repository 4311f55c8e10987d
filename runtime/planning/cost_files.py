"""Pass costs of a loaded bundle: read from the user's data folder, or measured at load.

Each cache key, of bundle, device and versions, has a file for each measurement, numbered from 0,
of which the last is used. A file is created once and keeps its table, so that the first process to
measure wins, and earlier tables remain available.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from specedge.attention_kernels import flash_attention_setting
from specedge.bundle import MANIFEST, Bundle, store
from specedge.cpu_count import cpu_features, processor_name
from specedge.diagnosis import driver
from specedge.errors import SpecEdgeError
from specedge.sampling_options import MAX_EXPORTED_DRAFT_TOKENS
from specedge.strict_json import JsonError, build, parse, to_plain
from specedge.version import __version__

from ..backend.ort import onnxruntime
from ..backend.sessions import Device
from .cost_table import CostTable, Measurement, assumed_costs

FORMAT = 12
MAX_FILE_SIZE = 2**20
MAX_TABLES = 8  # stored tables of a cache key; older ones are deleted
MAX_BUSY = 4  # busy measurements whose lowest costs are confirmed; under a CPU quota, all are busy
KEEP_VARIABLE = "SPECEDGE_KEEP_COSTS"  # set: no load replaces a stored table

PROVISIONAL = "provisional"  # measured under contention: the next load lowers or replaces costs
CONFIRMED = "confirmed"  # replaced by `specedge tune` only
CONTRADICTED = "contradicted"  # round times of a request disagree: the next load replaces it
STATES = (PROVISIONAL, CONFIRMED, CONTRADICTED)
REASONS = {
    PROVISIONAL: "the process waited for a core during an earlier measurement",
    CONTRADICTED: "they disagreed with the round times of an earlier request",
}


@dataclass(frozen=True)
class CostKey:
    """Cache key of measured pass costs: fingerprint of a bundle on a machine.

    `bundle` is the SHA-256 of the manifest, which lists the graphs; `threads` is 0 for the default;
    `gpus` lists the GPUs in use and the driver version; `kernels` is the fingerprint of what else
    selects CPU kernels.
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
    kernels: str

    @property
    def path(self) -> Path:
        """Path of the file with this key's first table."""
        text = json.dumps([FORMAT, to_plain(self)], sort_keys=True)
        return store.costs_folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    @property
    def stored_paths(self) -> list[Path]:
        """Paths of the stored tables, in the order in which they were measured."""
        first = self.path
        stored = [path for path in first.parent.glob(f"{first.stem}*.json") if number_of(path) >= 0]
        return sorted(stored, key=number_of)

    @property
    def next_path(self) -> Path:
        """Path of the table that is measured next."""
        stored = self.stored_paths
        if not stored:
            return self.path
        return self.path.with_stem(f"{self.path.stem}-{number_of(stored[-1]) + 1}")


@dataclass(frozen=True)
class CostFile:
    """Content of a cost file.

    Attributes:
        format: Format of the file.
        key: Cache key.
        costs: Table.
        state: One of STATES.
        was_contradicted: True if the table or an earlier one was contradicted by a request. This
            happens once: a table that was measured for this reason is not contradicted again.
        num_busy: Number of busy measurements whose lowest costs the table has.
    """

    format: int
    key: CostKey
    costs: CostTable
    state: str
    was_contradicted: bool
    num_busy: int = 0

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state must be one of {', '.join(STATES)}, got '{self.state}'")


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
        kernels=kernels_fingerprint(),
    )


class PassCosts:
    """Cost table of a loaded bundle; a request keeps the `table` that it began with.

    Without a `key`, in a pipeline that was not loaded from a bundle, placeholder costs are used and
    nothing is stored. `note` is the reason, in one line, why a stored table is not used or was
    replaced.
    """

    def __init__(self, key: CostKey | None = None) -> None:
        self._key = key
        self._next_path = None if key is None else key.next_path
        self._stored, self.note = (None, None) if key is None else read(key)
        self.table = assumed_costs(MAX_EXPORTED_DRAFT_TOKENS)
        if self._stored is not None:
            self.table = self._stored.costs

    @property
    def is_measured(self) -> bool:
        """Return True if the table was measured for this bundle on this machine."""
        return self.table.origin != "assumed"

    @property
    def is_tested(self) -> bool:
        """Return True if a self-test with this key passed and no passes will be timed."""
        stored = self._stored
        return stored is not None and stored.state == CONFIRMED and stored.costs.is_invariant

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the table in use, by which `restore` finds it."""
        return fingerprint(self.table)

    def complete(self, measure: Callable[[], Measurement]) -> None:
        """Measure and store costs unless a confirmed table is stored already.

        A busy measurement lowers the costs of a provisional table, the last of MAX_BUSY confirms
        it, and one without contention replaces it. The first process to replace a table wins. A
        table that cannot be stored is used by this process only.
        """
        stored = self._stored
        if self.is_measured and (
            stored is None or stored.state == CONFIRMED or os.environ.get(KEEP_VARIABLE)
        ):
            return
        measured = measure()
        costs, num_busy = measured.costs, int(measured.busy)
        if stored is not None and stored.state == PROVISIONAL and measured.busy:
            costs, num_busy = stored.costs.minimum(costs), stored.num_busy + 1
        self.table = costs
        if self._key is not None and self._next_path is not None:
            state = PROVISIONAL if 0 < num_busy < MAX_BUSY else CONFIRMED
            was_contradicted = stored is not None and stored.was_contradicted
            file = CostFile(FORMAT, self._key, costs, state, was_contradicted, num_busy)
            with contextlib.suppress(OSError):
                self._stored = write_first(self._next_path, file)
                self.table = self._stored.costs
        if stored is not None and self.table != stored.costs:
            self.note = f"costs were measured again, since {REASONS[stored.state]}"

    def contradict(self) -> None:
        """Record that round times disagree with the table; the next load measures again, once.

        Tables of `specedge tune` are kept.
        """
        stored = self._stored
        if (
            stored is None
            or self.table != stored.costs
            or stored.costs.origin != "load"
            or stored.was_contradicted
            or os.environ.get(KEEP_VARIABLE)
        ):
            return
        self._stored = replace(stored, state=CONTRADICTED, was_contradicted=True)
        with contextlib.suppress(OSError, ValueError, IndexError):
            path = stored.key.stored_paths[-1]
            if _read_file(path, stored.key) == stored:  # no other process has replaced it
                store.replace_file(path, _text(self._stored))

    def restore(self, fingerprint_: str) -> bool:
        """Use an earlier stored table again; return False if it is no longer stored."""
        if self.fingerprint == fingerprint_:
            return True
        for path in [] if self._key is None else self._key.stored_paths:
            with contextlib.suppress(OSError, ValueError):
                table = _read_file(path, self._stored_key).costs
                if fingerprint(table) == fingerprint_:
                    self.table = table
                    return True
        return False

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


def read(key: CostKey) -> tuple[CostFile | None, str | None]:
    """Return the last stored table or None, and the reason why an existing file is not used."""
    stored = key.stored_paths
    if not stored:
        return None, None
    path = stored[-1]
    try:
        return _read_file(path, key), None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return None, f"{path} is not used ({reason}); costs are measured again"


def _read_file(path: Path, key: CostKey) -> CostFile:
    """Return the content of a cost file. Raises OSError, or ValueError if it is damaged."""
    if path.stat().st_size > MAX_FILE_SIZE:
        raise JsonError(f"has more than {MAX_FILE_SIZE} bytes")
    content = parse(path.read_text("utf-8"))
    if isinstance(content, dict) and content.get("format") != FORMAT:
        raise JsonError(f"has format {content.get('format')}, expected {FORMAT}")
    file = build(CostFile, content)
    if file.key != key:
        raise JsonError("has a different cache key")
    return file


def write(key: CostKey, table: CostTable) -> Path:
    """Store a confirmed table, which replaces earlier ones; return its path. Raises OSError."""
    file = CostFile(FORMAT, key, table, CONFIRMED, was_contradicted=False)
    while write_first(path := key.next_path, file) is not file:
        pass
    return path


def write_first(path: Path, file: CostFile) -> CostFile:
    """Store a table unless another process has used the path; return the one that is stored.

    Raises OSError.
    """
    try:
        store.create_file(path, _text(file))
    except FileExistsError:
        stored = read(file.key)[0]
        return file if stored is None else stored
    for old in file.key.stored_paths[:-MAX_TABLES]:
        old.unlink(missing_ok=True)
    return file


def number_of(path: Path) -> int:
    """Return the number of a cost file by its name; -1 if it is not one."""
    number = path.stem.partition("-")[2] or "0"
    return int(number) if number.isdecimal() else -1


def fingerprint(table: CostTable) -> str:
    """Return the fingerprint of a table."""
    text = json.dumps(to_plain(table), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(file: CostFile) -> str:
    return json.dumps(to_plain(file), indent=1) + "\n"


def kernels_fingerprint() -> str:
    """Return a fingerprint of ONNX Runtime's binary, the CPU's features and attention settings.

    A binary is recognized by its size and time of modification. Features are known on Linux only.
    """
    binary = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state").__file__
    status = os.stat(str(binary))
    parts = [status.st_size, status.st_mtime_ns, cpu_features(), flash_attention_setting()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


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
