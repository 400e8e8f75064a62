"""What a closed engine leaves to the process: freed memory goes back to the system, and no program stays traced."""

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.sampling.thresholds import kept_count_and_mass
from jpaged.sampling.top_blocks import block_rows
from jpaged.step.freed_memory import return_freed_memory

ROOT = Path(__file__).parents[3]
BLOCK_BYTES, NUM_BLOCKS = 16_000, 4_000
gives_back = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can be asked"
)


def resident_bytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


@gives_back
def test_freed_blocks_go_back_to_the_system() -> None:
    """Blocks too small for a mapping of their own, behind one that stays."""
    blocks = [np.ones(BLOCK_BYTES, np.uint8) for _ in range(NUM_BLOCKS)]
    before, last = resident_bytes(), blocks[-1]
    del blocks
    return_freed_memory()
    assert last.all()
    assert before - resident_bytes() > BLOCK_BYTES * NUM_BLOCKS / 2


@pytest.mark.parametrize(
    "function",
    [lambda x: block_rows(x).maxima, lambda x: kept_count_and_mass(x, x[:, 0])],
    ids=["maxima of blocks", "counts and masses"],
)
def test_what_is_traced_again_is_not_kept_twice(function: Callable[[jax.Array], object]) -> None:
    """JAX keeps the function of a reduction with what it has traced by it, until the process ends."""

    def num_kept() -> int:
        jax.make_jaxpr(lambda x: function(x))(jnp.zeros((2, 300)))
        gc.collect()
        return sum(isinstance(each, jax.extend.core.ClosedJaxpr) for each in gc.get_objects())

    num_kept()
    assert num_kept() == num_kept()


@gives_back
@pytest.mark.slow
def test_ten_closed_engines_leave_as_much_as_one() -> None:
    command = [sys.executable, ROOT / "scripts" / "bench" / "closed_engines.py"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["tenth ÷ first closed"] <= 1.1
