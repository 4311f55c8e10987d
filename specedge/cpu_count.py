"""Processor, and the number of CPUs available to this process."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def cpu_count() -> int:
    """Return the number of logical CPUs that this process may use, at least 1.

    Respects the CPU affinity (including cpusets) and the CPU quota of the process's control groups,
    rounded up to whole CPUs.
    """
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        allowed = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return min([allowed, *(max(1, math.ceil(quota)) for quota in cpu_quotas())])


def processor_name() -> str:
    """Return the processor's name and the number of CPUs available, as in "AMD EPYC, 2 cores"."""
    name = platform.processor()
    with suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
        else:
            lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
            fields = ("model name", "Hardware", "Model")
            name = next((s.partition(":")[2] for s in lines if s.startswith(fields)), name)
    return f"{' '.join(name.split()) or platform.machine()}, {cpu_count()} cores"


def cpu_features() -> str:
    """Return the features of the processor that the system reports; empty except on Linux."""
    with suppress(OSError, UnicodeDecodeError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return line.partition(":")[2].strip()
    return ""


def default_threads() -> int:
    """Return ONNX Runtime's default for `intra_op_num_threads`.

    This is 0 (one thread per physical core) unless the process is limited to fewer CPUs, since ONNX
    Runtime respects neither affinity nor quota.
    """
    allowed = cpu_count()
    return allowed if allowed < (os.cpu_count() or 1) else 0


def cpu_quotas(root: Path = Path("/")) -> Iterator[float]:
    """Yield the CPU quotas of the process's control groups and their parents.

    Reads `cpu.max` of cgroup v2 and `cpu.cfs_quota_us` of v1 below `root`. For a group that is not
    visible, such as in a container, only its visible parents count.
    """
    with suppress(OSError, UnicodeDecodeError):
        for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:
                mount, read = root / "sys/fs/cgroup", _quota_v2
            elif "cpu" in controllers.split(","):
                mount, read = root / "sys/fs/cgroup/cpu", _quota_v1
            else:
                continue
            group = Path(name.strip("/"))
            for part in (group, *group.parents):
                with suppress(OSError, ValueError, ZeroDivisionError):
                    yield read(mount / part)


def _quota_v2(group: Path) -> float:
    """Return a quota in CPUs; raise ValueError if the group has none."""
    quota, period = (group / "cpu.max").read_text("utf-8").split()
    return _positive(int(quota) / int(period))


def _quota_v1(group: Path) -> float:
    """Return a quota in CPUs; raise ValueError if the group has none (-1)."""
    quota, period = (
        int((group / f"cpu.cfs_{name}_us").read_text("utf-8")) for name in ("quota", "period")
    )
    return _positive(quota / period)


def _positive(quota: float) -> float:
    if quota <= 0:
        raise ValueError("no quota")
    return quota
