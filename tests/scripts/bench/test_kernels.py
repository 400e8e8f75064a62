"""`scripts/bench/kernels.py` compares programs that compute the same, and says what it measured."""

import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from jpaged.commands.bench.kernels import Workload, paged, random_pages
from jpaged.commands.process import run_command
from jpaged.pallas_kernels.ragged_paged_attention.native.backend import NativeBackend
from jpaged.pallas_kernels.ragged_paged_attention.xla.backend import XlaBackend

GATHER_KINDS = ("full gather", "grouped", "naive")
SMALL = Workload(num_rows=3, context_len=50, num_layers=2, table_len=80)


@pytest.fixture
def kernels(script):
    return script("bench.kernels")


def final(program):
    """Return what the chain of layers ends with: its queries, keys and values."""
    return [np.asarray(x) for x in program.run(program.state)[1:]]


RAGGED = Workload(num_rows=4, context_len=70, num_layers=2, shortest_len=5)
OTHER_HEADS = Workload(
    num_rows=3, context_len=50, num_layers=2, table_len=80, num_heads=4, num_kv_heads=1, head_size=32
)


@pytest.mark.parametrize(
    ("baseline", "workload"),
    [
        pytest.param("full gather", RAGGED, id="full, ragged", marks=pytest.mark.slow),
        pytest.param("grouped", OTHER_HEADS, id="grouped, 4/1 heads"),
        pytest.param("naive", RAGGED, id="naive, ragged"),
        pytest.param("full gather", OTHER_HEADS, id="full, 4/1 heads", marks=pytest.mark.slow),
    ],
)
def test_every_gather_computes_what_paged_attention_does(kernels, baseline, workload):
    assert kernels.GATHER_KINDS == GATHER_KINDS
    gathered = kernels.full_gather(workload, 16, baseline)
    for got, wanted in zip(final(paged(XlaBackend(), workload, 16, "float32")), final(gathered), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)  # Means of unit normals in another order.


@pytest.mark.slow
def test_shared_prefixes_compute_what_each_row_would_alone_and_are_found():
    workload = Workload(num_rows=6, context_len=70, num_layers=2, num_shared=48)
    sharing = NativeBackend(min_saved_tokens=1)
    _, step = random_pages(sharing, workload, 16, "float32", 1)
    assert sharing.planner.sections(step.plan, 6, 6, decodes_only=True).num_shared_pages.tolist() == [3] * 6
    alone = final(paged(replace(sharing, share_prefixes=False), workload, 16, "float32"))
    for got, wanted in zip(final(paged(sharing, workload, 16, "float32")), alone, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_the_dense_prefill_computes_what_paged_attention_does(kernels):
    """A whole prompt in one layer: both then have the same keys and values."""
    workload = Workload(num_rows=1, context_len=40, num_layers=1, query_len=40)
    for got, wanted in zip(
        final(paged(XlaBackend(), workload, 16, "float32")), final(kernels.dense(workload, "float32")), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("optimized")
def test_every_turn_of_the_loop_reads_the_whole_array_and_none_copies_it(kernels, monkeypatch):
    monkeypatch.setattr(kernels, "READ_BYTES", 1 << 20)
    program = kernels.read_bandwidth()
    assert program.num_layers == kernels.NUM_READS > 1
    outside_the_loop = program.run.as_text().split("ENTRY")[1]
    assert "while(" in outside_the_loop
    assert not re.search(r"reduce|fusion|call\(", outside_the_loop), "XLA has taken the sum out of the loop"
    assert program.run.memory_analysis().temp_size_in_bytes < kernels.READ_BYTES // 8
    _, sums = program.run(program.state)
    np.testing.assert_array_equal(sums, np.full(256, kernels.NUM_READS * (1 << 20) // 4 // 256))


@pytest.mark.slow
def test_pages_are_as_large_as_the_backend_serves_them_unless_asked_otherwise(kernels, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="0"):
        kernels.main(["--help"])
    assert "64 with xla, 64 with native, 128 with pallas-tpu, 64 with pallas-gpu" in " ".join(
        capsys.readouterr().out.split()
    )
    for name in ("READ_BYTES", "DECODES", "GATHERS", "SHARED", "PREFILLS"):
        monkeypatch.setattr(kernels, name, {"READ_BYTES": 1 << 20, "DECODES": {"small": SMALL}}.get(name, {}))
    assert kernels.main(["--runs", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["block_size"] == 64


@pytest.mark.parametrize(
    ("kv_dtype", "name"), [("int8", "int8"), pytest.param("fp8", "float8_e4m3fn", marks=pytest.mark.slow)]
)
def test_pages_of_one_byte_are_timed_beside_those_of_float32(kernels, capsys, monkeypatch, kv_dtype, name):
    monkeypatch.setattr(kernels, "BYTE_DECODES", {"small": SMALL})
    monkeypatch.setattr(kernels, "READ_BYTES", 1 << 20)
    assert kernels.main(["--runs", "1", "--block-size", "16", "--kv-dtype", kv_dtype]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ratios"]["decode, small"][f"float32 ÷ {name} pages"] > 0
    assert set(result["ms_per_layer"]["decode, small"]) == {"float32", name}


@pytest.mark.slow
def test_the_bench_writes_what_it_measured(kernels, tmp_path, capsys, monkeypatch):
    small = {name: {f"small {name}": SMALL} for name in ("DECODES", "GATHERS")}
    small["SHARED"] = {"small": Workload(4, 70, 1, num_shared=64)}
    small["PREFILLS"] = {"small": Workload(1, 40, 1, 8)}
    for name, workloads in small.items():
        monkeypatch.setattr(kernels, name, workloads)
    monkeypatch.setattr(kernels, "READ_BYTES", 1 << 20)
    path = tmp_path / "kernels.json"
    assert kernels.main(["--runs", "2", "--block-size", "16", "-o", str(path)]) == 0
    result = json.loads(path.read_text())
    assert list(result)[:2] == ["what", "ratios"]
    assert (result["backend"], result["runs"], result["block_size"]) == ("native", 2, 16)
    assert result["jax"] == jax.__version__
    assert len(result["ratios"]) == 4
    decode = result["ratios"]["decode, small DECODES"]
    assert decode["temporary memory at twice the pages ÷ at once"] == 1.0
    assert all(value > 0 for values in result["ratios"].values() for value in values.values())
    assert result["read_bytes_per_s"] > 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "KV bytes/s ÷ read bandwidth" in shown.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv-dtype", "int4"], "--kv-dtype: got 'int4', allowed: int8, fp8"),
        (["--backend", "pallas-tpu"], "got pallas-tpu, which runs on a tpu, this is a cpu; use --backend xla"),
        (["--backend", "pallas-gpu"], "got pallas-gpu, which runs on a gpu, this is a cpu"),
        (["--backend", "triton"], "got 'triton', allowed: auto, xla, native, pallas-tpu, pallas-gpu"),
        (["--runs", "0"], "--runs: got 0, allowed: an integer ≥ 1"),
        (["--block-size", "0"], "--block-size: got 0"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(kernels, argv, message, capsys):
    assert run_command(kernels.main, argv) == 1
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_a_workload_counts_keys_and_values_of_its_rows(kernels):
    # 3 rows × 50 tokens × keys and values × 3 heads × 64 × 4 bytes.
    assert kernels.kv_bytes(SMALL, "float32") == 3 * 50 * 2 * 3 * 64 * 4
    assert RAGGED.context_lens == [70, 48, 26, 5]
    assert kernels.kv_bytes(RAGGED, "float32") == (70 + 48 + 26 + 5) * 2 * 3 * 64 * 4
    assert kernels.kv_bytes(OTHER_HEADS, "bfloat16") == 3 * 50 * 2 * 1 * 32 * 2
