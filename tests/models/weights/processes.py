"""Python in processes of their own: with several devices, or with its memory measured."""

import re
import select
import subprocess
import sys
from pathlib import Path

from ... import quick_compile

ROOT = Path(__file__).parents[3]
HAS_PROC = Path("/proc/self/status").is_file()


def run_python(code: str, *args: str, flags: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "HOME": str(Path.home())}
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment, check=True)


def run_over_devices(num_devices: int, code: str, *args: str) -> str:
    """Return what `code` prints on so many virtual devices of a CPU; fail with the end of its errors if it fails."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {**quick_compile.environment(flags), "NPROC": "16"}
    command = [sys.executable, "-c", code, *args]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def peak_bytes(code: str, *args: str) -> list[tuple[int, int]]:
    """Run `code`, and return (expected bytes, peak of anonymous memory) for each of its parts.

    Before a part, `code` prints the bytes it expects and reads a line from stdin; after it, it prints "done". The
    memory is sampled every 10 ms.
    """
    command, found = [sys.executable, "-c", code, *args], []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        while line := child.stdout.readline():
            before = peak = anonymous_bytes(child.pid)
            child.stdin.write("go\n")
            child.stdin.flush()
            while not select.select([child.stdout], [], [], 0.01)[0]:
                peak = max(peak, anonymous_bytes(child.pid))
            peak = max(peak, anonymous_bytes(child.pid))
            assert child.stdout.readline() == "done\n"
            found.append((int(line), peak - before))
    return found


def anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", status)[1])  # type: ignore[index]
