"""Free memory and cores of the host, as Linux and its control groups report them."""

from __future__ import annotations

import os
import sys
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


class _ProcessLimit:
    """What this process may count on, as other limits of a process are set: once, by what has started it."""

    max_bytes = sys.maxsize


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still allocate.

    That is the kernel's `MemAvailable`, or less if a control group (a container's, for example) has less below its
    memory limit. Where /proc is missing (not Linux), or does not tell `MemAvailable`, all physical memory counts as
    free, and nowhere more than `limit_host_bytes` has said. `proc` and `cgroup` are the mount points; tests give
    folders of their own.
    """
    return min(_unlimited_free_bytes(proc, cgroup), _ProcessLimit.max_bytes)


def limit_host_bytes(num_bytes: int) -> None:
    """Let `free_host_bytes` return at most so much in this process, since others use the rest."""
    _ProcessLimit.max_bytes = num_bytes


def _unlimited_free_bytes(proc: Path, cgroup: Path) -> int:
    free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        free_bytes = int(fields["MemAvailable"].split()[0]) * 1024  # The field is in KiB: "8123456 kB".
        cgroup_lines = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, KeyError):
        return free_bytes
    # "0::/path" in version 2, "4:memory:/path" in version 1; the path is mostly "/" in containers.
    for line in cgroup_lines:
        _, controllers, path = line.split(":", 2)
        root = {"": cgroup, "memory": cgroup / "memory"}.get(controllers)
        if root is not None:  # Lines of other controllers say nothing of memory.
            # Limits are inherited: those of all groups up to `root` that contain the process's group hold too.
            process_group = root / path.strip("/")
            outer_groups = process_group.parents[: len(process_group.parts) - len(root.parts)]
            for group in (process_group, *outer_groups):
                free_bytes = min(free_bytes, _free_in_group(group, _MEMORY_FILES[controllers], free_bytes))
    return free_bytes


def _free_in_group(group: Path, files: _MemoryFiles, unlimited_bytes: int) -> int:
    """Return the bytes that are free below the memory limit of the control group whose directory is `group`.

    That is limit − bytes in use + inactive cached file pages, which the kernel takes back when memory is short, and 0
    if the use exceeds the limit. Returns `unlimited_bytes` if the group has no limit. Version 1 writes a very large
    number for "no limit", so the result may exceed `unlimited_bytes`; the caller takes the smaller one.
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
