"""The scripts for machines with a GPU or a TPU time programs that contain only the device's work."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend

COUNT = 37
"""Iterations of the timed loop; no loop inside of attention runs as often."""


def attention(script) -> Any:
    check, speed = script("device_checks.kernel_check"), script("device_checks.kernel_speed")
    bench = check.Bench(lambda case: NativeBackend(), 1)
    case = check.Case("tiny", num_heads=4, num_kv_heads=2, head_size=64, page_size=16, dtype="float32")
    return speed.loop_of(bench.batch(case, [1, 1], [20, 40]))


def copy(script) -> Any:
    return script("device_checks.kernel_speed").copy_loop(1 << 12)


def whiles(speed: Any, loop: Any, count: int) -> list[str]:
    """Return the loops of a program whose number of iterations XLA knows to be `count`."""
    text = speed.run.lower(loop.body, count, loop.first, *loop.others).compile().as_text()
    return re.findall(rf'while\(.*known_trip_count":\{{"n":"{count}"', text)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("loop_of", [pytest.param(attention, marks=pytest.mark.slow), copy])
def test_the_device_runs_all_calls_without_asking_whether_there_is_another(script, loop_of) -> None:
    assert len(whiles(script("device_checks.kernel_speed"), loop_of(script), COUNT)) == 1


@pytest.mark.slow
def test_each_call_takes_the_output_of_the_one_before_and_nothing_else_changes(script) -> None:
    """A loop of three is three calls: none is left out as the same as another."""
    speed, loop = script("device_checks.kernel_speed"), attention(script)
    body, carry = jax.jit(loop.body), loop.first
    for _ in range(3):
        carry = body(carry, *loop.others)
    for found, wanted in zip(jax.tree.leaves(loop(3)), jax.tree.leaves(carry), strict=True):
        assert jnp.allclose(found, wanted, atol=1e-6)
    assert not jnp.allclose(loop(2)[1], carry[1], atol=1e-3)
    assert float(speed.copy_loop(1 << 12)(3)[0]) == -1.0


def tiny_bench(script) -> tuple[Any, Any]:
    check = script("device_checks.kernel_check")
    case = check.Case("tiny", num_heads=4, num_kv_heads=2, head_size=64, page_size=16, dtype="float32")
    return check.Bench(lambda case: NativeBackend(), 1), case


def others_found(script, other: Any) -> dict[str, Any]:
    """Measure rows of equal length in two shapes, and skewed ones, beside `other`."""
    speed = script("device_checks.kernel_speed")
    sizes = speed.Sizes(
        decode=((40, 40), (20,) * 3), skewed=(10, 70, 20, 20), copied_bytes=64, rounds=1, trial_calls=1, round_s=0.0
    )
    bench, case = tiny_bench(script)
    return speed.measure_others(bench, case, sizes, {"other": other})


def refusing(script, num_rows: int) -> Any:
    """Return another program that refuses batches of this many rows."""

    def other(batch: Any) -> Any:
        if len(batch.q) == num_rows:
            raise NotImplementedError(f"{num_rows} rows")
        return script("device_checks.kernel_speed").loop_of(batch)

    return other


@pytest.mark.slow
def test_what_another_cannot_do_is_named_and_no_other_figure_is_lost(script) -> None:
    """The other program takes one of two shapes. Its ratio would be that of an easier task, so there is none."""
    found = others_found(script, refusing(script, 3))
    assert found["refused"] == {"3 × 20 by other": "NotImplementedError: 3 rows"}
    assert found["decode ÷ other"] is None
    assert {"2 × 40", "3 × 20", "skewed", "2 × 40 by other", "skewed by other"} == set(found["seconds"])
    worst_ratio = script("device_checks.kernel_speed").worst_ratio
    assert worst_ratio({"a": 1.0, "a by x": 2.0, "b": 3.0, "b by x": 2.0}, ["a", "b"], "x") == 1.5


@pytest.mark.slow
def test_rows_of_different_length_count_unless_they_are_refused(script) -> None:
    """Padded to the longest they may be more than another takes: the ratio of equally long rows stands without them."""
    found = others_found(script, refusing(script, 4))
    taken = found["seconds"]
    worst = max(taken[name] / taken[f"{name} by other"] for name in ("2 × 40", "3 × 20"))
    assert found["decode ÷ other"] == worst
    assert found["skewed ÷ other"] is None
    assert found["refused"] == {"skewed by other": "NotImplementedError: 4 rows"}
    assert found["notes"] == {"decode ÷ other": "skewed refused: NotImplementedError: 4 rows"}
    found = others_found(script, script("device_checks.kernel_speed").loop_of)
    ratio, taken = found["skewed ÷ other"], found["seconds"]
    assert ratio == taken["skewed"] / taken["skewed by other"]
    assert found["notes"] == {"decode ÷ other": f"skewed: {ratio:.3f}"}
    worst = max(taken[name] / taken[f"{name} by other"] for name in ("2 × 40", "3 × 20", "skewed"))
    assert found["decode ÷ other"] == worst


@pytest.mark.slow
def test_a_measurement_goes_on_without_options_that_do_not_run(script) -> None:
    """Beside the kernels stand plain XLA and other options: one that the backend refuses is told by its error."""
    check, speed = script("device_checks.kernel_check"), script("device_checks.kernel_speed")
    _, case = tiny_bench(script)
    bench = check.Bench(lambda case: NativeBackend(**case.backend), 1)
    found = speed.measure_decode(bench, case, speed.TINY_SIZES, {"same": {}, "odd": {"num_threads": 5}})
    assert isinstance(found["K1"], float)
    assert {name: type(each) for name, each in found["times ours"].items()} == {
        "plain xla": float, "same": float, "odd": str,
    }  # fmt: skip
    assert found["times ours"]["odd"].startswith("TypeError")


@pytest.mark.slow
def test_a_copy_is_compared_to_the_data_sheet_of_a_device_that_has_one(script, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = script("device_checks.kernel_speed")
    bench, case = tiny_bench(script)
    for measure in (
        lambda: speed.measure_copy(speed.TINY_SIZES),
        lambda: speed.measure_decode(bench, case, speed.TINY_SIZES, {}),
    ):
        assert "copy_of_data_sheet" not in measure()
        with monkeypatch.context() as patch:
            patch.setitem(speed.BYTES_PER_S, jax.devices()[0].device_kind, 2.0)
            found = measure()
        assert found["copy_of_data_sheet"] == found["copy_bytes_per_s"] / 2
    assert found["notes"]["K1"] == f"the copy: {found['copy_of_data_sheet']:.3f} of the data sheet's bandwidth"
