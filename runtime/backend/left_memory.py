"""How much memory is left to this process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def left_bytes() -> int | None:
    """The least of what the system, the process's limit and its control group leave, if known.

    Swap and pages of files count as free where the system or the group would give them up.
    """
    found = []
    with suppress(OSError, ValueError, KeyError):
        facts = _numbers(Path("/proc/meminfo"))
        found.append(1024 * (facts["MemAvailable"] + facts["SwapFree"]))
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text("utf-8").split()[0])
            found.append(max(limit - pages * resource.getpagesize(), 0))
    with suppress(OSError):
        own = Path(Path("/proc/self/cgroup").read_text("utf-8").rpartition("::")[2].strip())
        for group in (own, *own.parents):
            with suppress(OSError, ValueError, KeyError):
                found.append(group_left_bytes(Path("/sys/fs/cgroup") / group.relative_to("/")))
    return min(found, default=None)


def group_left_bytes(group: Path) -> int:
    """What a control group leaves; ValueError where it has no limit."""
    limit = int((group / "memory.max").read_text("utf-8"))
    used = int((group / "memory.current").read_text("utf-8"))
    facts = _numbers(group / "memory.stat")
    return max(limit - used + facts["inactive_file"] + facts["active_file"], 0)


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.replace(":", " ").split() for line in path.read_text("utf-8").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}
