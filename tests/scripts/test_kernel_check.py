"""The part that the scripts for machines with a GPU or a TPU share, with a backend that runs anywhere."""

import dataclasses
import itertools
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jpaged.pallas_kernels.ragged_paged_attention.kv_scales import quantize
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

from .check_scripts import Script, blind, report_here


class Forgetful(XlaBackend):
    """A kernel whose writes are lost."""

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        return super().attend(pages, layout, inputs)[0], pages


def run(script: Script, cases: list[Any], folder: Path, backend: Any = XlaBackend) -> int:
    parts = script("device_checks.kernel_check").parts_of(lambda case: backend(), cases, 7)
    item = script("device_checks.items").Item("correctness", 1, "", lambda session: parts)
    return report_here(script, [item], {}, folder)


def tiny(check: ModuleType, name: str = "plain", **changes: Any) -> Any:
    return check.Case(
        name,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        page_size=16,
        rows=check.TINY,
        **{"dtype": "float32", **changes},
    )


def test_it_prints_and_writes_what_it_found(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = script("device_checks.kernel_check")
    every = {"window": 9, "soft_cap": 2.0, "has_sinks": True}
    assert run(script, [tiny(check), tiny(check, "all", **every)], tmp_path) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["passed"]
    assert found["seed"] == 7
    assert set(found["machine"]) == {"device", "platform", "jax", "python", "commit", "has_changes", "date"}
    assert set(found["checks"]) == {"plain", "all"}
    assert all(0 < error < check.MOST_ERROR_FLOAT32 for error in found["checks"].values())
    assert "2 of 2 cases right" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize("wrong", [blind(XlaBackend), Forgetful])
def test_a_wrong_result_is_named_and_fails(
    script: Script, wrong: type[XlaBackend], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = script("device_checks.kernel_check")
    assert run(script, [tiny(check, window=9), tiny(check, "another", window=9)], tmp_path, wrong) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["wrong: plain, another", "failed"]


def test_what_is_refused_is_told_and_the_rest_is_done(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = script("device_checks.kernel_check")
    assert run(script, [tiny(check, "bad", dtype="float16"), tiny(check)], tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("bad: ValueError: ")
    assert "1 of 2 cases right" in lines[-3]
    assert lines[-2:] == ["wrong: bad", "failed"]


def test_a_case_has_the_same_numbers_whatever_else_runs(script: Script) -> None:
    check = script("device_checks.kernel_check")
    alone, beside = ([tiny(check, "b")], [tiny(check, "a"), tiny(check, "b")])
    errors = [check.parts_of(lambda case: XlaBackend(), cases, 7)["b"].run() for cases in (alone, beside)]
    assert errors[0] == errors[1] != check.parts_of(lambda case: XlaBackend(), alone, 8)["b"].run()


def test_a_history_is_written_in_chunks_that_hold_every_token_once_and_in_order(script: Script) -> None:
    check = script("device_checks.kernel_check")
    rows = check.Rows((1, 1, 3), (150, 65, 4), num_tokens=8, num_rows=4)
    *history, last = check.works(rows)
    done = [0, 0, 0]
    for work in history:
        assert sum(work.query_lens) <= work.num_tokens == check.HISTORY_TOKENS
        assert sorted(work.query_lens, key=lambda length: length != 1) == list(work.query_lens)
        for row, query_len, context_len in zip(work.rows, work.query_lens, work.context_lens, strict=True):
            done[row] += query_len
            assert context_len == done[row]
    assert done == [149, 64, 1]
    assert (last.rows, last.query_lens, last.context_lens) == ((0, 1, 2), rows.query_lens, rows.context_lens)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_the_oracle_stores_what_the_kernels_are_told_to_store(script: Script, dtype: str) -> None:
    """Made by numpy alone, so that a conversion that is wrong on a device is not wrong in both."""
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(64, 2, 16)).astype(np.float32), np.array([0.004, 0.1], np.float32)
    quantized = np.asarray(quantize(jnp.asarray(x), jnp.asarray(scale), dtype)).astype(np.float64)
    assert np.array_equal(script("device_checks.kernel_check").as_stored(x, scale, dtype), quantized * scale[:, None])
    assert np.abs(quantized).max() == (127 if dtype == "int8" else 448)


class FirstLayer(XlaBackend):
    """A kernel that reads and writes the first layer, whichever it is told."""

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        return super().attend(pages, layout, dataclasses.replace(inputs, first_page=jnp.int32(0)))


class Unclamped(XlaBackend):
    """A kernel that also reads the pages before the window of each row, with a weight of zero."""

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        out, pages = super().attend(pages, layout, inputs)
        tables, size = inputs.tables, layout.page_size
        is_whole = (jnp.arange(tables.shape[1])[None] + 1) * size <= inputs.step.context_lens[:, None]
        of_pages = pages[0][tables].sum(axis=(2, 3, 4))
        return out + 0 * jnp.where(is_whole, of_pages, 0).sum(), pages


class Racing(XlaBackend):
    """A kernel whose results differ by a rounding each time."""

    times = itertools.count()

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        out, pages = super().attend(pages, layout, inputs)
        shape = jax.ShapeDtypeStruct((), np.float32)
        noise = io_callback(lambda: np.float32(next(self.times) % 2 * 1e-6), shape)
        return out * (1 + noise).astype(out.dtype), pages


def paths(check: ModuleType) -> dict[str, Any]:
    """Return cases that take other paths than lengths and sizes alone do."""
    shared = check.Rows((1, 1, 1, 17), (1, 66, 70, 40), 64, num_rows=4, num_shared=16)
    return {
        "second layer": tiny(check, layer=1),
        "null pages": tiny(check, window=9, is_freed=True),
        "shared pages": dataclasses.replace(tiny(check), rows=shared),
        "far pages": tiny(check, num_numbers=50_000),
    }


@pytest.mark.parametrize("name", ["second layer", "null pages", "shared pages", "far pages"])
def test_every_path_of_the_cases_is_right_and_repeats(script: Script, name: str) -> None:
    check = script("device_checks.kernel_check")
    case = paths(check)[name]
    assert check.Bench(lambda case: XlaBackend(), 1, num_repeats=2).error(case) <= case.most_error


def test_a_step_that_gives_other_bits_when_it_is_run_again_is_wrong(script: Script) -> None:
    check = script("device_checks.kernel_check")
    assert check.Bench(lambda case: Racing(), 1).error(tiny(check)) <= tiny(check).most_error
    with pytest.raises(RuntimeError, match="other bits"):
        check.Bench(lambda case: Racing(), 1, num_repeats=3).error(tiny(check))


def test_a_layer_that_is_not_the_one_it_was_told_is_wrong(script: Script) -> None:
    """The check finds the wrong layer even if the kernel reads the pages that it wrote."""
    check = script("device_checks.kernel_check")
    with pytest.raises(RuntimeError, match="another layer"):
        check.Bench(lambda case: FirstLayer(), 1).error(paths(check)["second layer"])


def test_a_page_that_was_given_back_is_not_read(script: Script) -> None:
    check = script("device_checks.kernel_check")
    case = paths(check)["null pages"]
    bench = check.Bench(lambda case: Unclamped(), 1)
    assert bench.error(dataclasses.replace(case, is_freed=False)) <= case.most_error
    with pytest.raises(FloatingPointError, match="not finite"):
        bench.error(case)
    tables = check.without_freed(bench.tables(case, case.rows.context_lens), case)
    # The query at position 65 sees from 57 on, in the fourth page of 16; the first of 17 at 23, from 15 on.
    assert (tables[1] > 0).tolist() == [False, False, False, True, True]
    assert (tables[3, :3] > 0).all()


def test_rows_share_what_they_are_said_to_share_and_far_pages_are_far(script: Script) -> None:
    check = script("device_checks.kernel_check")
    case, far = paths(check)["shared pages"], paths(check)["far pages"]
    bench = check.Bench(lambda case: XlaBackend(), 1)
    tables = check.with_aliases(bench.tables(case, case.rows.context_lens), case)
    assert tables[1, 0] == tables[2, 0] == tables[3, 0] > 0
    assert len({*tables[1:, 1], tables[0, 0]}) == 4
    assert bench.tables(far, [100]).min() * far.page_size * far.num_kv_heads * far.head_size >= 50_000


def test_a_step_that_only_decodes_is_of_the_program_that_serves_such_steps(script: Script) -> None:
    check, seen = script("device_checks.kernel_check"), []

    class Recording(XlaBackend):
        def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
            seen.append(inputs.step.decodes_only)
            return super().attend(pages, layout, inputs)

    decodes = check.Rows((1, 1), (3, 40), num_tokens=2, num_rows=2)
    for rows, is_checked_alone in ((decodes, True), (check.TINY, False)):
        case = dataclasses.replace(tiny(check), rows=rows)
        bench = check.Bench(lambda case: Recording(), 1)
        assert bench.error(case) <= case.most_error
        assert seen[-1] is is_checked_alone
        assert bench.batch(case, rows.query_lens, rows.context_lens).step.decodes_only is is_checked_alone
