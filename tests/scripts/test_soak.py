"""Half a minute of mixed traffic and faults against a real server; `scripts/soak.py` says what must hold at its end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("core", ["thread", "process"])
def test_a_soak_of_half_a_minute_holds_every_promise(core: str) -> None:
    flags = ["--minutes", "0.5", "--warmup", "off", "--core", core, "--faults", "5"]
    run = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "soak.py"), *flags], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout)
    assert found["clients"]["complete"] > 10  # On a machine that has other work; hundreds on one that has none.
    assert found["num_preemptions_total"] > 0
    assert found["faults"]
