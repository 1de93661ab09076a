"""Host memory: how much of it this process can still get, within the limits of its control groups (containers)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
MEMORY_FILES = {True: ("memory.max", "memory.current"), False: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""Files of a control group's limit and use, of version 2 and of version 1."""
CACHE = ("active_file", "inactive_file")
"""Fields of ``memory.stat``: the page cache of files, which leaves when programs need memory."""


def free_host_bytes() -> int:
    """Bytes of host memory that this process can still get, and that the page cache may use meanwhile."""
    return min([_available(), *_left_in_groups()])


def _available() -> int:
    try:
        lines = (PROC / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_in_groups() -> Iterator[int]:
    """Rest of the limit of each of this process' control groups, and of the groups that these are in."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, name = line.split(":", 2)
        second = number == "0" and not kinds
        if not second and "memory" not in kinds.split(","):
            continue
        own, root = PurePosixPath(name.lstrip("/")), CGROUPS if second else CGROUPS / "memory"
        for group in (own, *own.parents):
            # In a container the path may be that of the host, and its own group the root.
            try:
                most, used = ((root / group / file).read_text().strip() for file in MEMORY_FILES[second])
                fields = dict(row.split() for row in (root / group / "memory.stat").read_text().splitlines())
                # In version 1 that of the groups below is apart, and the use is of all of them.
                cached = sum(int(fields.get(f"total_{name}", fields.get(name, 0))) for name in CACHE)
                if most != "max":
                    yield max(0, int(most) - int(used) + cached)
            except (OSError, ValueError):
                continue
