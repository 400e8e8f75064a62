"""What XLA makes of our programs for a TPU v6e and an H100, compiled here without either, and for a CPU."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from jpaged.pallas_kernels.ragged_paged_attention import MAX_MOVES

ROOT = Path(__file__).parents[1]
NUM_PAGES = 1024
TARGETS = {  # Target → what its devices call themselves, and the wheels that hold its compiler.
    "cpu": ("cpu", ()),
    "v6e": ("TPU v6 lite", ("libtpu",)),
    "h100": ("NVIDIA H100 80GB HBM3", ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")),
}


def missing_wheels(names):
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            yield name


def output_of(script, target, num_devices, *args):
    """The JSON object that a script prints of programs for `num_devices` devices of that kind."""
    kind, wheels = TARGETS[target]
    if missing := list(missing_wheels(wheels)):
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[aot]'")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / script), target, str(num_devices), *args],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["kind"] == kind
    return found


@pytest.fixture(scope="module", params=[("cpu", 1), ("v6e", 1), ("v6e", 4), ("h100", 1), ("h100", 4)], ids=str)
def compiled(request):
    return output_of("compile_for_device.py", *request.param, str(NUM_PAGES))


@pytest.mark.parametrize("program", ["copy", "swap_in"])
def test_a_program_that_writes_pages_writes_them_into_the_cache_that_it_was_given(compiled, program):
    """All of the cache is aliased, and what is needed beside it is at most the page under way, never a cache."""
    found = compiled["programs"][program]
    assert found["aliased"] == NUM_PAGES * compiled["page_bytes"]
    assert found["temporary"] <= compiled["page_bytes"] + 2**20
    assert found["outputs"] - found["aliased"] < 4096
    assert found["collectives"] == 0


def test_a_swap_out_leaves_one_batch_of_pages_beside_the_cache(compiled):
    found, batch_bytes = compiled["programs"]["swap_out"], MAX_MOVES * compiled["page_bytes"]
    assert batch_bytes <= found["outputs"] < batch_bytes + 4096
    assert found["temporary"] < 2**20
    assert found["collectives"] == 0


def test_attention_in_plain_xla_writes_and_reads_the_cache_in_place(compiled):
    """On any chip: all pages are aliased, and what is needed beside them does not grow with them."""
    temporary = {}
    for name, found in compiled["programs"].items():
        if name.startswith("attention"):
            kind, num_pages = name.rsplit(", ", 1)
            num_pages = int(num_pages.split()[0])
            # Two of the model's 32 layers.
            assert found["aliased"] == num_pages * compiled["page_bytes"] // 16
            temporary.setdefault(kind, set()).add(found["temporary"])
    for kind, sizes in temporary.items():
        assert len(sizes) == 1, kind
        assert max(sizes) < NUM_PAGES * compiled["page_bytes"] // 16 // 4


@pytest.mark.parametrize("compiled", [("v6e", 1), ("h100", 1)], ids=str, indirect=True)
def test_what_kernels_are_timed_by_copies_no_more_than_it_is_said_to(compiled):
    """K1 is a rate to that of a copy: were there another copy in its loop, attention would seem twice as good; and one
    of the pages in the loop of attention would hide what that takes."""
    assert set(compiled["loops"]) == {"copy", "decode"}
    for name, found in compiled["loops"].items():
        assert found["copies"] == [], name
        # Whatever writes a buffer that is not the one it reads needs room for it.
        assert found["temporary"] < found["buffer"] // 2, name


STEPS = [
    ("cpu", 1),
    # 32 layers: minutes each.
    *(pytest.param(param, marks=pytest.mark.slow) for param in (("v6e", 1), ("v6e", 4), ("h100", 1))),
]


@pytest.fixture(scope="module", params=STEPS, ids=str)
def steps(request):
    return output_of("compile_step.py", *request.param)


def test_a_whole_step_makes_nothing_as_large_as_a_layers_keys(steps):
    """No copy, convert or transpose of them: a prompt's step, a decode step, and the loop that decodes on."""
    assert {tuple(name.split()[1:2]) for name in steps["steps"]} == {("forward",), ("decode",)}
    for name, reports in steps["steps"].items():
        for found in reports:
            assert found["large"] == [], name


def test_a_whole_step_takes_the_cache_as_it_is_and_needs_as_much_beside_it_whatever_its_size(steps):
    for name, reports in steps["steps"].items():
        for found in reports:
            # With hidden states, page tables and last tokens, which are donated too.
            assert 0 <= found["aliased"] - found["cache"] - found["hidden"] < 2**20, name
        few, many = reports
        assert many["pages"] == 2 * few["pages"]
        assert many["temporary"] == few["temporary"], name


def test_products_read_each_weight_once(steps):
    """The compiler counts no more than 1.15 times the weights' bytes; on a GPU it does not count."""
    if steps["kind"].startswith("NVIDIA"):
        pytest.skip("cost_analysis is not available on a GPU")
    for dtype, (accessed, weights) in steps["products"].items():
        assert 1.0 <= accessed / weights <= 1.15, dtype


def test_a_sampler_keeps_its_rules_where_they_are(steps):
    """With every rule and logprobs: the counts of tokens and the biases of all slots are donated, and not copied."""
    for dtype, found in steps["samplers"].items():
        # A TPU pads the rows of tables.
        assert found["rules"] <= found["aliased"] < 1.05 * found["rules"] + 2**20, dtype
        assert found["large"] == [], dtype
        assert found["temporary"] < 5 * found["rules"], dtype
