"""`jpaged tune` finds better sizes and writes them where a start reads them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jpaged.commands.bench.bundles import SPILLS, Compiler, Loop
from jpaged.commands.bench.tune import DECODES, Bundles, Measured, _tune, search, write_entry
from jpaged.commands.cli import main
from jpaged.errors import ConfigError
from jpaged.pallas_kernels.ragged_paged_attention.interface import AttentionShape, KVShape
from jpaged.pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
from jpaged.pallas_kernels.ragged_paged_attention.tpu.decode_refs import DecodeSizes
from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import (
    TpuShape,
    TpuSizes,
    check_sizes,
    read_tuned,
    sizes_by_rule,
    sizes_of,
)
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend
from jpaged.startup.attention.choice import attention_shape, backend_by_name, choose_attention, tuned_path

from ...startup.attention.test_attention_choice import model_with

ROOT = Path(__file__).parents[4]
WIDE_SHAPES = [(32, 8, 128, "bfloat16"), (32, 32, 128, "bfloat16"), (32, 32, 128, "float32"), (64, 64, 80, "float32")]
SHAPE = TpuShape(32, 8, 128, "bfloat16", 128)
FLAGS = ["tune", "--num-heads", "32", "--num-kv-heads", "8", "--head-size", "128"]
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


class ByRule:
    """A machine that is fastest at certain sizes, and refuses to work with others."""

    name, unit = "measured", "ms"

    def __init__(self, best: dict[str, int], *, sees_copies: bool = True, refused: tuple[int, ...] = ()):
        self.best, self.sees_copies, self.refused = best, sees_copies, refused
        self.tried: list[TpuSizes] = []

    def figures(self, kind: str, candidates: Sequence[TpuSizes]) -> list[dict[str, float] | str]:
        self.tried += candidates
        found: list[dict[str, float] | str] = []
        for sizes in candidates:
            flat = {**sizes._asdict(), **sizes.decode._asdict()}
            cost = 1.0 + sum(abs(flat[name] - value) / value for name, value in self.best.items())
            found.append("no room" if flat["full"] in self.refused else {"short": cost, "long": 3 * cost})
        return found


def test_every_size_goes_to_where_it_is_best() -> None:
    start = sizes_by_rule("v6e", SHAPE)
    source = ByRule({"full": 512, "max_rows": 32, "sub_kv": 256, "tile_kv": 1024})
    found = search("v6e", SHAPE, source, start)
    assert (found.sizes.decode.full, found.sizes.decode.max_rows) == (512, 32)
    assert (found.sizes.sub_kv, found.sizes.tile_kv) == (256, 1024)
    assert (found.sizes.decode.tile, found.sizes.decode.tail) == (start.decode.tile, start.decode.tail)
    assert found.after["short"] == 1.0 < found.before["short"]
    for sizes in source.tried:
        check_sizes("v6e", SHAPE, sizes)


def test_a_gain_of_two_percent_is_not_worth_a_change() -> None:
    start = sizes_by_rule("v6e", SHAPE)
    source = ByRule({"max_rows": start.decode.max_rows})
    source.figures = lambda kind, candidates: [  # type: ignore[method-assign]
        {"short": 1.0 if sizes == start else 0.981} for sizes in candidates
    ]
    assert search("v6e", SHAPE, source, start).sizes == start


def test_bundles_leave_alone_what_is_fetched_together() -> None:
    start = sizes_by_rule("v6e", SHAPE)
    source = ByRule({"tile": 4096, "tile_kv": 4096}, sees_copies=False)
    assert search("v6e", SHAPE, source, start).sizes == start
    assert {(sizes.decode.tile, sizes.tile_kv) for sizes in source.tried} == {(start.decode.tile, start.tile_kv)}


def test_sizes_that_do_not_compile_are_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    start = sizes_by_rule("v6e", SHAPE)
    found = search("v6e", SHAPE, ByRule({"full": 512}, refused=(512,)), start)
    assert found.sizes.decode.full == start.decode.full
    assert "decode: full 512: no room" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="tune: no room, with sizes that a start would take"):
        search("v6e", SHAPE, ByRule({}, refused=(start.decode.full,)), start)


@pytest.mark.parametrize(("at_start", "is_taken"), [(0, False), (1, True)])
def test_sizes_that_spill_more_registers_in_decode_than_those_of_a_start_lose(at_start: int, is_taken: bool) -> None:
    """Sizes with more spills lose even if their schedule is shorter."""

    def attention_loops(backend: TpuBackend, shape: TpuShape) -> tuple[list[Loop], list[Loop]]:
        assert backend.sizes is not None
        size, spills = (10, 1) if backend.sizes.decode.full == 512 else (90, at_start)
        full, tail = {"MXU": 1, SPILLS: spills}, {"MXU": 1, SPILLS: 0}
        around = [Loop(0, 999, 1, 0, {"MXU": 0}), Loop(100, 300, 2, 0, {"MXU": 0}), Loop(400, 600, 2, 0, {"MXU": 0})]
        return [*around, Loop(150, 150 + size, 3, size, full), Loop(450, 500, 3, 50, tail)], []

    start = sizes_by_rule("v6e", SHAPE)
    longer = start._replace(decode=start.decode._replace(full=512))
    source = Bundles(cast(Compiler, SimpleNamespace(chip="v6e", attention_loops=attention_loops)), SHAPE)
    held, other = source.figures("decode", [start, longer])
    assert isinstance(held, dict)
    if is_taken:
        assert isinstance(other, dict)
        assert other["row of 8000"] < held["row of 8000"]
    else:
        assert other == "spills 1 registers in its innermost loops"


def test_loops_that_are_not_as_known_are_one_error_with_their_number() -> None:
    loops = [Loop(0, 900, 1, 300, {"MXU": 0}), Loop(100, 700, 2, 600, {"MXU": 5})]
    compiler = SimpleNamespace(chip="v6e", attention_loops=lambda backend, shape: (loops, loops))
    source = Bundles(cast(Compiler, compiler), SHAPE)
    with pytest.raises(ConfigError, match="the compiler's loops: got 1 of 2 with products, wanted 2, with sizes that"):
        search("v6e", SHAPE, source, sizes_by_rule("v6e", SHAPE))


def entry_of(sizes: TpuSizes, **changes: Any) -> dict[str, Any]:
    entry = {"chip": "v6e", "shape": SHAPE._asdict(), "source": "measured", "date": "2026-11-20", "jax": "0.10.2"}
    return {**entry, "sizes": {**sizes._asdict(), "decode": sizes.decode._asdict()}, "figures": {}, **changes}


def test_an_entry_takes_the_place_of_the_same_shapes_and_a_start_reads_it() -> None:
    table = tuned_path(TpuBackend)
    table.parent.mkdir(parents=True)
    first = sizes_by_rule("v6e", SHAPE)._replace(sub_kv=128)
    second = first._replace(sub_kv=256)
    write_entry(table, entry_of(first))
    write_entry(table, entry_of(first, chip="v5e"))
    write_entry(table, entry_of(second))
    assert [(entry.chip, entry.sizes) for entry in read_tuned(table)] == [("v5e", first), ("v6e", second)]
    backend = backend_by_name("pallas-tpu", AttentionShape(32, 8, 128), [TPU])
    assert isinstance(backend, TpuBackend)
    assert sizes_of("v6e", SHAPE, backend.tuned) == second
    assert hash(backend) != hash(TpuBackend.for_heads("v6e", 32, 128))


def test_a_broken_table_of_the_user_ends_the_start_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    tuned_path(TpuBackend).parent.mkdir(parents=True)
    tuned_path(TpuBackend).write_text("[{}]")
    for asked in ("auto", "pallas-tpu"):
        with pytest.raises(ConfigError, match=r"tuned/tpu\.json: entry 0: .*delete the entry, and tune again"):
            choose_attention(asked, attention_shape(model_with(head_size=128), "bfloat16"), [TPU])


def test_what_is_measured_are_the_kernels_themselves() -> None:
    """Interpreted, tiny: two sizes have their turns, and one that the kernels cannot take says so."""

    class Interpreted(Measured):
        def backend(self, sizes: TpuSizes) -> TpuBackend:
            return TpuBackend("v6e", sizes, tile_q=16, interpret=pltpu.InterpretParams())

        def workloads(self, kind: str) -> dict[str, Any]:
            from jpaged.commands.bench.kernels import Workload

            return {"rows of 40": Workload(2, 40, 1, num_heads=2, num_kv_heads=1, head_size=64)}

    sizes = TpuSizes(DecodeSizes(32, 32, 16, 8, 8), 32, 16)
    source = Interpreted("v6e", TpuShape(2, 1, 64, "float32", 16), num_runs=1)
    good, bad = source.figures("decode", [sizes, sizes._replace(decode=sizes.decode._replace(tail=200))])
    assert isinstance(good, dict)
    assert good["rows of 40"] > 0
    assert isinstance(bad, str)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size", "dtype"), WIDE_SHAPES)
def test_pages_of_what_is_measured_fit_beside_those_of_other_sizes(
    num_heads: int, num_kv_heads: int, head_size: int, dtype: str
) -> None:
    shape = TpuShape(num_heads, num_kv_heads, head_size, dtype, 128)
    source = Measured("v5e", shape, num_runs=1)
    for workload in (*source.workloads("decode").values(), *source.workloads("prefill").values()):
        num_pages = workload.num_rows * -(-workload.context_len // 128)
        layout = TpuBackend(chip="v5e").layout(
            KVShape(workload.num_layers, num_pages, 128, num_kv_heads, head_size, dtype)
        )
        assert num_pages * layout.page_bytes <= 1 << 30
        assert min(workload.num_rows, workload.num_layers) >= 1


def test_workloads_of_eight_heads_are_whole() -> None:
    found = Measured("v6e", SHAPE, num_runs=1).workloads("decode").values()
    assert {each.context_len: (each.num_rows, each.num_layers) for each in found} == DECODES


@dataclass(frozen=True)
class Fails(XlaBackend):
    """A backend whose runs fail from the run number `first` on."""

    first: int = 0
    runs: list[int] = field(default_factory=list, compare=False)

    def attend(self, pages: Any, layout: Any, inputs: Any) -> Any:
        def run() -> np.ndarray:
            self.runs.append(1)
            if len(self.runs) > self.first:
                raise MemoryError("no room")
            return np.zeros((), np.float32)

        out, pages = super().attend(pages, layout, inputs)
        return out + jax.pure_callback(run, jax.ShapeDtypeStruct((), np.float32)), pages


@pytest.mark.parametrize("first", [0, 1], ids=["alone", "in its turn"])
def test_sizes_that_cannot_be_run_are_named(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, a size is left out; if it fails beside the others it is not told which of them has no room."""

    class Measures(Measured):
        def backend(self, sizes: TpuSizes) -> Any:
            return XlaBackend() if sizes.sub_kv == 128 else Fails(first=first)

    monkeypatch.setattr("jpaged.commands.bench.tune.DECODES", {40: (2, 1)})
    good = sizes_by_rule("v6e", SHAPE)._replace(sub_kv=128)
    source = Measures("v6e", SHAPE._replace(dtype="float32"), num_runs=1)
    found = source.figures("decode", [good, good._replace(sub_kv=256)])
    assert isinstance(found[1], str)
    assert found[1].startswith("JaxRuntimeError: ")
    if first == 0:
        assert isinstance(found[0], dict)
        assert found[0]["rows of 40"] > 0
    else:
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--source: got measured, which needs a TPU, this is a cpu; use --source bundles --chip v6e"),
        (["--source", "guess"], "--source: got 'guess', allowed: measured, bundles"),
        (["--source", "bundles"], "--chip: got none with --source bundles, allowed: v5e, v6e, v7x"),
        (["--chip", "v4"], "--chip: got 'v4', allowed: v5e, v6e, v7x"),
        (["--dtype", "int8"], "--dtype: got 'int8', allowed: bfloat16, float32"),
        (["--num-heads", "33"], "--num-heads: got 33, allowed: multiples of --num-kv-heads, 8"),
        (["--block-size", "0"], "--block-size: got 0, allowed: an integer ≥ 1"),
        (["--model", "x"], "unrecognized arguments: --model x; see jpaged tune --help"),
    ],
)
def test_what_cannot_be_tuned_is_refused_by_name(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FLAGS, *flags]) == 1
    assert message in capsys.readouterr().err


SHAPE_FLAGS = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "block_size": 128}


def test_tuning_without_a_home_asks_for_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)  # An id that no user has.
    args = SimpleNamespace(**SHAPE_FLAGS, output=None)
    with pytest.raises(ConfigError, match=r"--output: got none, and this user has no table .*; name one, or set HOME"):
        _tune(args, "v6e", None)


def test_a_table_that_cannot_be_written_is_refused_before_the_search(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    args = SimpleNamespace(**SHAPE_FLAGS, output=tmp_path / "file" / "table.json")
    with pytest.raises(ConfigError, match=r"--output: .*table\.json cannot be written .*; name another table"):
        _tune(args, "v6e", None)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[aot]'")
@pytest.mark.parametrize("heads", [("8", "2"), ("4", "1")], ids=["two bunches of heads", "one"])
def test_bundles_tune_a_chip_that_is_not_there(heads: tuple[str, str], tmp_path: Path) -> None:
    """A few heads, so that a compilation takes a second: an entry is written, or it is said that none is better."""
    table = tmp_path / "table.json"
    flags = ["tune", "--num-heads", heads[0], "--num-kv-heads", heads[1], "--head-size", "128", "--source", "bundles"]
    code = "import sys; from jpaged.commands.cli import main; sys.exit(main(sys.argv[1:]))"
    run = subprocess.run(
        [sys.executable, "-c", code, *flags, "--chip", "v6e", "-o", str(table)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    assert "decode: max_rows 16: 1.0000 of the first" in run.stderr
    if table.exists():
        (entry,) = json.loads(table.read_text())
        assert (entry["chip"], entry["source"], entry["figures"]["unit"]) == ("v6e", "bundles", "bundles")
        assert read_tuned(table)
