"""Free memory of the host, read from files laid out as Linux lays them out."""

import os
import sys

import pytest

from jpaged.startup.sizing.host_memory import _ProcessLimit, free_host_bytes, limit_host_bytes, num_host_cores

GIB = 1 << 30


def host(tmp_path, groups, files):
    """Return the free bytes with 8 GiB available in /proc and these files in the control groups."""
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    cgroup.mkdir()
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return free_host_bytes(proc, cgroup)


def limit_2(folder, limit, used, inactive):
    stat = f"anon 5\ninactive_file {inactive}"
    return {f"{folder}memory.max": limit, f"{folder}memory.current": used, f"{folder}memory.stat": stat}


def limit_1(folder, limit, used, inactive):
    names = "limit_in_bytes", "usage_in_bytes", "stat"
    stat = f"inactive_file 7\ntotal_inactive_file {inactive}"
    return {f"memory/{folder}memory.{name}": text for name, text in zip(names, (limit, used, stat), strict=True)}


HOSTS = {
    "no limit": ("0::/\n", {}, 8 * GIB),
    "the word max": ("0::/\n", limit_2("", "max", 5, 0), 8 * GIB),
    "a container's limit": ("0::/\n", limit_2("", 4 * GIB, GIB, 0), 3 * GIB),
    "idle file pages can be had back": ("0::/\n", limit_2("", 4 * GIB, 3 * GIB, GIB), 2 * GIB),
    "a limit above what there is": ("0::/\n", limit_2("", 64 * GIB, GIB, 0), 8 * GIB),
    "over the limit": ("0::/\n", limit_2("", GIB, 2 * GIB, 0), 0),
    "a group of its own": ("0::/a/b\n", limit_2("a/b/", 2 * GIB, GIB, 0), GIB),
    "a parent is tighter": ("0::/a/b\n", limit_2("a/b/", 6 * GIB, 0, 0) | limit_2("a/", 3 * GIB, 0, 0), 3 * GIB),
    "a path from outside the container": ("0::/docker/x\n", limit_2("", 2 * GIB, 0, 0), 2 * GIB),
    "version 1": ("5:cpu:/\n4:memory:/x/y\n0::/\n", limit_1("x/y/", 5 * GIB, 2 * GIB, GIB), 4 * GIB),
    "version 1 without a limit": ("4:memory:/\n", limit_1("", 9223372036854771712, 5, 0), 8 * GIB),
}


@pytest.mark.parametrize(("groups", "files", "expected"), HOSTS.values(), ids=HOSTS.keys())
def test_free_memory_is_what_the_kernel_and_every_control_group_leave(tmp_path, groups, files, expected):
    assert host(tmp_path, groups, files) == expected


def test_without_proc_all_physical_memory_counts_as_free(tmp_path):
    assert 0 < free_host_bytes(tmp_path / "none", tmp_path) < 1 << 50
    assert 0 <= free_host_bytes() < 1 << 50


def test_cores_are_those_that_the_process_and_its_control_group_may_use(tmp_path):
    num_cores = num_host_cores(tmp_path)
    assert 1 <= num_cores <= (os.cpu_count() or 1)
    for text, expected in {"max 100000": num_cores, "100000 100000": 1, "50000 100000": 1, "odd": num_cores}.items():
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert num_host_cores(tmp_path) == expected


def test_a_process_counts_on_no_more_than_its_share(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_ProcessLimit, "max_bytes", sys.maxsize)  # Put back afterwards.
    free_bytes = free_host_bytes()
    limit_host_bytes(free_bytes // 4)
    assert free_host_bytes() == free_bytes // 4
    limit_host_bytes(1 << 60)
    assert free_host_bytes() < 1 << 50
