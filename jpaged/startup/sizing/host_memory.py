"""Free memory and cores of the host, as Linux and its control groups report them."""

from __future__ import annotations

import os
from pathlib import Path

_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controllers named in a line of /proc/self/cgroup → the files of limit and usage, and the field of memory.stat that
counts file pages which the kernel can take back."""


def free_host_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still allocate: the kernel's `MemAvailable`, within its control groups.

    Where /proc is missing (not Linux), all physical memory counts as free.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, KeyError):
        return available
    for line in groups:  # "0::/path" in version 2, "4:memory:/path" in version 1; the path is mostly "/" in containers.
        _, controllers, path = line.split(":", 2)
        root = {"": cgroup, "memory": cgroup / "memory"}.get(controllers)
        if root is not None:
            own = root / path.strip("/")
            for group in (own, *own.parents[: len(own.parts) - len(root.parts)]):
                available = min(available, _free_in_group(group, _GROUP_FILES[controllers], available))
    return available


def _free_in_group(group: Path, names: tuple[str, str, str], available: int) -> int:
    """Return the bytes below the limit of one control group, or `available` if it has none.

    File pages that are not in use now count as free, since the kernel takes them back when memory is short.
    """
    limit_name, used_name, reclaimable = names
    try:
        limit = (group / limit_name).read_text().strip()
        if limit == "max":
            return available
        used = int((group / used_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(stat.get(reclaimable, 0)))
    except OSError:  # The group is outside of this container, or has no memory controller: no limit.
        return available


def num_host_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the cores that this process may keep busy: those it may run on, as its control group lets it."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return num_cores if quota == "max" else max(1, min(num_cores, int(quota) // int(period)))
    except (OSError, ValueError):  # No such controller here.
        return num_cores
