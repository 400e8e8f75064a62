"""Bundles are counted by loops, as the compiler leaves them; a dump of another form is refused by name."""

from pathlib import Path

import pytest

from jpaged.commands.bench.bundles import Compiler, DecodeLoops, Loop, bundles_of_prompt, read_loops
from jpaged.pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape, sizes_by_rule

SIZES = sizes_by_rule("v6e", TpuShape(8, 2, 128, "bfloat16", 128))._replace(tile_kv=1024, sub_kv=128)
BUNDLES = "\n".join(["0 : { }", "0x1 LB: > { }", "0x2 LB: >> { }", "0x3 : >> { }", "0x4 PF: > { }", "0x5 PF: { }"])
UTILIZATION = "capacity\nMXU, VSTORE:SPILL\n== UTILIZATION:\n" + "\n".join(["0 0", "1 0", "2 5", "3 0", "4 0", "0 0"])


def loop(begin: int, end: int, depth: int, num_products: int = 0) -> Loop:
    return Loop(begin, end, depth, end - begin, {"MXU": num_products})


KERNEL = [loop(0, 1000, 1), loop(100, 900, 2)]


def test_of_several_bunches_of_heads_each_has_its_turn_for_each_piece() -> None:
    loops = [*KERNEL, loop(200, 300, 3, 1), loop(300, 420, 3, 1), loop(420, 490, 3, 1)]
    shape = TpuShape(8, 2, 128, "bfloat16", 128)  # Two bunches of four.
    # Around queries, around keys, and for each bunch two pieces which the diagonal goes through.
    assert bundles_of_prompt(loops, 256, shape, SIZES, 256) == 200 + (800 - 290) + 2 * (120 + 120)


@pytest.mark.parametrize("num_heads", [4, 2, 1])
def test_one_bunch_of_heads_has_no_loop_over_bunches_and_counts_that_over_pieces(num_heads: int) -> None:
    loops = [*KERNEL, loop(200, 800, 3, 1)]
    shape = TpuShape(num_heads, 1, 128, "bfloat16", 128)
    assert bundles_of_prompt(loops, 512, shape, SIZES, 256) == 2 * (200 + 200) + (2 + 4) * 600


def test_loops_that_are_not_as_known_are_named() -> None:
    shape = TpuShape(8, 2, 128, "bfloat16", 128)
    with pytest.raises(ValueError, match="got 1 of 3 with products, wanted 3"):
        bundles_of_prompt([*KERNEL, loop(200, 800, 3, 1)], 256, shape, SIZES, 256)
    with pytest.raises(ValueError, match="got products at depth 3 and no loop at depth 2 around them"):
        bundles_of_prompt([KERNEL[0], *[loop(n, n + 9, 3, 1) for n in (10, 20, 30)]], 256, shape, SIZES, 256)
    with pytest.raises(ValueError, match="got 0 of 2 with products, wanted 2"):
        DecodeLoops.of(KERNEL, shape, SIZES.decode)
    deep = [*KERNEL, loop(200, 800, 3), loop(210, 790, 4), loop(220, 780, 5), loop(230, 770, 6), loop(240, 760, 7, 1)]
    with pytest.raises(ValueError, match="got 5 of a tile in decode, wanted"):
        DecodeLoops.of([*deep, loop(900, 950, 2), loop(910, 940, 3, 1)], shape, SIZES.decode)


def test_a_dump_is_read_by_its_marks() -> None:
    outer, inner = read_loops(BUNDLES, UTILIZATION)
    assert (outer.begin, outer.end, outer.depth, outer.own, outer.slots["MXU"]) == (1, 5, 1, 2, 1 + 4)
    assert (inner.begin, inner.end, inner.depth, inner.own) == (2, 4, 2, 2)
    assert inner.slots == {"MXU": 5, "VSTORE:SPILL": 5}


@pytest.mark.parametrize(
    ("utilization", "message"),
    [
        ("", "table of slots: got '', wanted a line MXU, … and == UTILIZATION:"),
        (UTILIZATION.replace("MXU, ", "MXU0, "), "table of slots: got 'capacity"),
        (UTILIZATION.replace("\n4 0", ""), "got 5 rows for 6 bundles, wanted one for each, of 2 numbers"),
        (UTILIZATION.replace("\n4 0", "\n4 0 1"), "wanted one for each, of 2 numbers"),
    ],
)
def test_a_table_of_slots_of_another_form_is_named(utilization: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_loops(BUNDLES, utilization)


def test_a_dump_without_the_kernel_is_named(tmp_path: Path) -> None:
    compiler = object.__new__(Compiler)  # Its loops are read without the compiler.
    compiler.folder = tmp_path
    (tmp_path / "ragged_paged_decode-final_bundles.txt").write_text(BUNDLES)
    with pytest.raises(ValueError, match=r"got 1 files of ragged_paged_decode, wanted one named …-final_hlo"):
        compiler.loops_of("ragged_paged_decode")
