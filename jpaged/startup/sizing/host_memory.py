"""Free memory and cores of the host, as Linux and its control groups report them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class _MemoryFiles(NamedTuple):
    """Where a control group's directory tells the memory of its processes."""

    limit: str
    """File with the limit in bytes."""
    usage: str
    """File with the bytes in use."""
    reclaimable: str
    """Field of the file memory.stat with the bytes of file pages that the kernel can take back."""


_MEMORY_FILES = {
    "": _MemoryFiles("memory.max", "memory.current", "inactive_file"),
    "memory": _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers named in a line of /proc/self/cgroup → the files of their groups: none in version 2, memory in version
1."""


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still allocate.

    That is the kernel's `MemAvailable`, or less if a control group (a container's, for example) has less below its
    memory limit. Where /proc is missing (not Linux), all physical memory counts as free. `proc` and `cgroup` are the
    mount points.
    """
    free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free_bytes = int(fields["MemAvailable"].split()[0]) * 1024
        cgroup_lines = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, KeyError):
        return free_bytes
    # "0::/path" in version 2, "4:memory:/path" in version 1; the path is mostly "/" in containers.
    for line in cgroup_lines:
        _, controllers, path = line.split(":", 2)
        root = {"": cgroup, "memory": cgroup / "memory"}.get(controllers)
        if root is not None:
            # Limits are inherited: those of all groups that contain the process's group hold too.
            process_group = root / path.strip("/")
            outer_groups = process_group.parents[: len(process_group.parts) - len(root.parts)]
            for group in (process_group, *outer_groups):
                free_bytes = min(free_bytes, _free_in_group(group, _MEMORY_FILES[controllers], free_bytes))
    return free_bytes


def _free_in_group(group: Path, files: _MemoryFiles, unlimited_bytes: int) -> int:
    """Return the bytes that are free below the memory limit of the control group whose directory is `group`.

    Returns `unlimited_bytes` if the group has no limit; version 1 has a very large number instead. Cached file pages
    that are inactive count as free, since the kernel takes them back when memory is short.
    """
    try:
        limit = (group / files.limit).read_text().strip()
        if limit == "max":
            return unlimited_bytes
        used_bytes = int((group / files.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used_bytes + int(stat.get(files.reclaimable, 0)))
    except OSError:  # The group is outside of this container, or has no memory controller: no limit.
        return unlimited_bytes


def num_host_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores that this process may keep busy, at least 1.

    That is the number of cores that it may run on, or less if the control group at `cgroup` (version 2) has a quota:
    "150000 100000" in cpu.max, microseconds of processor time per period, is rounded down to 1 core.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return num_cores if quota == "max" else max(1, min(num_cores, int(quota) // int(period)))
    except (OSError, ValueError):  # No such controller here.
        return num_cores
