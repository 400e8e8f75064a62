"""What the scripts for machines with a GPU or a TPU share, around a backend that runs anywhere."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jpaged.pallas_kernels.ragged_paged_attention import XlaBackend

from .check_scripts import Script, blind


class Forgetful(XlaBackend):
    """A kernel that writes nothing that lasts."""

    def attend(self, cache: Any, *args: Any, **options: Any) -> Any:
        return super().attend(cache, *args, **options)[0], cache.pages


def run(
    check: ModuleType, cases: list[Any], backend: Any = XlaBackend, output: Path | None = None, **options: Any
) -> int:
    args = check.arguments("A run.", ["--seed", "7", *(["--output", str(output)] if output else [])])
    return check.check(args, check.Bench(lambda case: backend(), args.seed), cases, {}, {}, **options)


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
    check, output = script("kernel_check"), tmp_path / "sub" / "found.json"
    every = {"window": 9, "soft_cap": 2.0, "has_sinks": True}
    cases = [tiny(check), tiny(check, "all", **every)]
    assert run(check, cases, output=output) == 0
    found = json.loads(output.read_text())
    assert found["passed"]
    assert (found["seed"], found["interpreted"]) == (7, False)
    assert set(found["machine"]) == {"device", "platform", "jax", "python", "commit", "date"}
    assert set(found["checks"]) == {"plain", "all"}
    assert all(0 < error < check.MOST_ERROR_FLOAT32 for error in found["checks"].values())
    assert "2 of 2 cases right" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("wrong", [blind(XlaBackend), Forgetful])
def test_a_wrong_result_is_named_and_fails(
    script: Script, wrong: type[XlaBackend], capsys: pytest.CaptureFixture[str]
) -> None:
    check = script("kernel_check")
    assert run(check, [tiny(check, window=9), tiny(check, "another", window=9)], wrong) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "wrong: plain, another"


def test_what_is_refused_is_told_and_the_rest_is_done(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    check = script("kernel_check")
    assert run(check, [tiny(check, "bad", dtype="int8"), tiny(check)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("bad: ValueError: ")
    assert "1 of 2 cases right" in lines[-2]
    assert lines[-1] == "wrong: bad"


def test_what_would_begin_too_late_is_listed_as_not_done(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    check = script("kernel_check")
    assert run(check, [tiny(check), tiny(check, "another")], last_start_s=-1) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not done: plain, another"


def test_a_history_is_written_in_chunks_that_hold_every_token_once_and_in_order(script: Script) -> None:
    check = script("kernel_check")
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
