"""Compiles our kernels for a TPU that is not there, and reads their VLIW bundles from the compiler's dump.

The compiler writes down every bundle of a kernel with the slots that it uses. A bundle takes a cycle if nothing waits
for memory; loops are told apart by their marks, and a row or a prompt costs the sum of its loops' bundles times their
iterations. Both sides of a branch count, so the sum is an upper bound of the bundles that are executed. It is static:
caches, copies and the rest of the chip are not in it.

Needs the wheels of the extra `aot`. Nothing here imports JAX before it is used, since JAX reads `prepare`'s
environment when it is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ...pallas_kernels.ragged_paged_attention.interface import KVLayout
    from ...pallas_kernels.ragged_paged_attention.tpu.backend import TpuBackend
    from ...pallas_kernels.ragged_paged_attention.tpu.decode_refs import DecodeSizes
    from ...pallas_kernels.ragged_paged_attention.tpu.sizes import TpuShape, TpuSizes

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
"""Chip → the topology that the compiler is asked for."""
ROWS, TOKENS, TABLE_TOKENS = 64, 8192, 4096
"""Sizes of the step that is compiled; what its loops hold does not depend on them."""
CACHE_BYTES = 256 << 20
"""Least bytes of the pages, twice the VMEM of any chip: XLA puts a smaller cache there, and copies it with loops."""
SPILLS = "VSTORE:SPILL"
"""The slot whose count is the number of spilled registers."""


def prepare(dump: str | None = None) -> None:
    """Set the environment for a JAX that compiles for TPUs, and dumps its schedules to the folder `dump`."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    if dump is not None:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"


class Loop(NamedTuple):
    """A loop of a kernel: the bundles from `begin` to before `end`; `own` of them are in no inner loop."""

    begin: int
    end: int
    depth: int
    own: int
    slots: dict[str, int]

    @property
    def size(self) -> int:
        """Return the number of bundles, those of inner loops counted once."""
        return self.end - self.begin

    def holds(self, other: Loop) -> bool:
        """Return whether `other` lies within this loop."""
        return self.depth < other.depth and self.begin <= other.begin and other.end <= self.end


class Compiler:
    """Compiles for one chip that is not there; `folder` is the dump that `prepare` has set."""

    def __init__(self, chip: str, folder: str):
        import jax
        from jax.experimental import topologies
        from jax.sharding import NamedSharding, PartitionSpec

        from ...sharding import device_mesh

        self.chip, self.folder = chip, Path(folder)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
        self.mesh = device_mesh(topology.devices[:1])
        self.shaped: Any = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(self.mesh, PartitionSpec()))

    def compile(self, function: Any, *args: Any) -> None:
        """Compile a function for these arguments; its dump replaces that of the function before."""
        import jax

        for path in self.folder.iterdir():
            path.unlink()
        with jax.set_mesh(self.mesh):
            jax.jit(function).lower(*args).compile()

    def loops_of(self, kernel: str) -> list[Loop]:
        """Return the loops of the kernel of that name, in order; ValueError for a dump of an unknown form."""
        named = [path for path in self.folder.iterdir() if kernel in path.name and "analysis" not in path.name]
        texts = []
        for end in ("-final_bundles.txt", "-final_hlo-static-per-bundle-utilization.txt"):
            path = next((path for path in named if path.name.endswith(end)), None)
            if path is None:
                raise ValueError(f"the compiler's dump: got {len(named)} files of {kernel}, wanted one named …{end}")
            texts.append(path.read_text())
        return read_loops(*texts)

    def attention_loops(
        self, backend: TpuBackend, shape: TpuShape, dtype: str | None = None, **options: float
    ) -> tuple[list[Loop], list[Loop]]:
        """Return the loops of decode and of prefill over pages of that shape; `options` are `attend`'s.

        `dtype` is that of queries, keys and values; None is that of the pages, or bfloat16 for one-byte pages.
        """
        import jax.numpy as jnp

        from ...pallas_kernels.ragged_paged_attention.interface import AttentionMetadata, LayerPlace
        from ...pallas_kernels.ragged_paged_attention.kv_scales import KVScales
        from ...pallas_kernels.ragged_paged_attention.paged_cache import PagedCache

        shaped = self.shaped
        page = page_layout(backend, shape)
        layout = dataclasses.replace(page, num_pages=-(-CACHE_BYTES // page.page_bytes))
        pages = tuple(shaped(each, layout.dtype) for each in layout.shapes)
        has_scales = layout.dtype.itemsize == 1
        scales = KVScales(*[shaped((1, shape.num_kv_heads), jnp.float32)] * 2) if has_scales else None
        own_dtype = jnp.dtype(dtype or ("bfloat16" if has_scales else layout.dtype))
        cache = PagedCache(pages, layout, (LayerPlace(0, 0),), backend, scales)
        ints: Any = functools.partial(shaped, dtype=jnp.int32)
        step = AttentionMetadata(
            positions=ints((TOKENS,)),
            slot_mapping=ints((1, TOKENS)),
            query_starts=ints((ROWS + 1,)),
            context_lens=ints((ROWS,)),
            page_tables=ints((1, ROWS, TABLE_TOKENS // shape.page_size)),
            num_rows=ints(()),
            num_decode_rows=ints(()),
            plan=ints((backend.plan_len(TOKENS, ROWS),)),
        )
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = (shaped((TOKENS, n, shape.head_size), own_dtype) for n in heads)

        def attend(cache: Any, q: Any, k: Any, v: Any, step: Any) -> Any:
            return cache.attend(0, q, k, v, step, scale=shape.head_size**-0.5, **options)

        self.compile(attend, cache, q, k, v, step)
        return self.loops_of("ragged_paged_decode"), self.loops_of("ragged_paged_prefill")


def page_layout(backend: TpuBackend, shape: TpuShape) -> KVLayout:
    """Return the layout of one page in one layer; ValueError if the kernels do not take the shape."""
    from ...pallas_kernels.ragged_paged_attention.interface import KVShape

    return backend.layout(KVShape(1, 1, shape.page_size, shape.num_kv_heads, shape.head_size, shape.dtype))


class DecodeLoops(NamedTuple):
    """Bundles of the decode kernel: of a block of rows without its tiles, of full tiles, and of tails.

    `full` and `tail` are the innermost loops; a tile that is not unrolled as a whole has further loops around them.
    """

    around: int
    """Bundles of a block of rows without its tails."""
    around_full: int
    """Bundles of a row that has full tiles, without the tiles."""
    full_tile: int
    tail_piece: int
    full: Loop
    tail: Loop
    num_pairs: int

    @classmethod
    def of(cls, loops: list[Loop], shape: TpuShape, sizes: DecodeSizes) -> DecodeLoops:
        """Count the loops of a kernel compiled with these sizes; ValueError for loops of an unknown form."""
        import jax.numpy as jnp

        from ...pallas_kernels.ragged_paged_attention.tpu.decode import BLOCK_ROWS, heads_per_product
        from ...pallas_kernels.ragged_paged_attention.tpu.decode_refs import (
            max_unrolled_products,
            tail_rows_together,
            unroll_factor,
        )

        dtype = jnp.dtype(shape.dtype)
        heads = heads_per_product(shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, sizes.max_rows)
        num_pieces, num_groups, pair = sizes.tile // sizes.full, shape.num_kv_heads // heads, tail_rows_together(dtype)
        most = max_unrolled_products(shape.num_heads // num_groups, heads, dtype)
        full, tail = _with_products(loops, 2)

        def iterations(num: int, max_unrolled: int) -> list[int]:
            """Return the iterations of the loop over `num` products, or nothing if it is unrolled."""
            size = unroll_factor(num, max_unrolled)
            return [num // size] if size < num else []

        def bundles(nest: list[Loop], iterations: list[int]) -> int:
            """Return the bundles of one iteration of the outermost loop; `iterations` are those of the inner ones."""
            if len(nest) != len(iterations) + 1:
                wanted = len(iterations) + 1
                raise ValueError(f"the compiler's loops: got {len(nest)} of a tile in decode, wanted {wanted}")
            if not iterations:
                return nest[0].size
            return nest[0].size - nest[1].size + iterations[0] * bundles(nest[1:], iterations[1:])

        full_nest, tail_nest = (
            [loop for loop in loops if loop.depth >= 3 and (loop is inner or loop.holds(inner))]
            for inner in (full, tail)
        )
        row = _around(full, loops)
        return cls(
            full_tile=bundles(full_nest, iterations(num_pieces, most // num_groups) + iterations(num_groups, most)),
            tail_piece=bundles(tail_nest, iterations(num_groups, most // pair)),
            around=loops[0].size - row.size - tail_nest[0].size,
            around_full=row.size - full_nest[0].size,
            full=full,
            tail=tail,
            num_pairs=BLOCK_ROWS // pair,
        )

    def bundles_of_row(self, context_len: int, sizes: DecodeSizes) -> float:
        """Return the bundles of one of many rows of this length."""
        from ...pallas_kernels.ragged_paged_attention.tpu.decode import BLOCK_ROWS

        num_full = (context_len - 1) // sizes.tile
        num_pieces = -(-(context_len - num_full * sizes.tile) // sizes.tail)
        total = self.around / BLOCK_ROWS + self.num_pairs / BLOCK_ROWS * num_pieces * self.tail_piece
        return total + (self.around_full + num_full * self.full_tile if num_full else 0)


def bundles_of_prompt(loops: list[Loop], length: int, shape: TpuShape, sizes: TpuSizes, tile_q: int) -> int:
    """Return the bundles of all query tiles of a prompt: those around the loops over heads, and these per key piece.

    A single bunch of heads has no such loop: then the loop over pieces counts once per piece, with all sides of its
    branches. ValueError for loops of an unknown form.
    """
    from ...pallas_kernels.ragged_paged_attention.tpu.prefill import heads_per_chunk

    num_bunches = shape.num_heads // heads_per_chunk(shape.num_heads // shape.num_kv_heads, tile_q)
    found = _with_products(loops, 1 if num_bunches == 1 else 3)
    whole, masked, half = found if len(found) == 3 else found * 3
    key_tiles = _around(whole, loops)
    around_queries = loops[0].size - key_tiles.size
    around_keys = key_tiles.size - sum(loop.size for loop in found)
    total = 0
    for position in range(0, length, tile_q):
        end = position + tile_q
        total += around_queries + -(-end // sizes.tile_kv) * around_keys
        for begin in range(0, end, sizes.sub_kv):
            is_whole, is_long = begin + sizes.sub_kv - 1 <= position, min(end - begin, sizes.sub_kv) > sizes.sub_kv // 2
            total += num_bunches * (whole if is_whole else masked if is_long else half).size
    return total


def _with_products(loops: list[Loop], num: int) -> list[Loop]:
    """Return the loops whose own bundles use the matrix unit; ValueError if they are not `num`."""
    found = [loop for loop in loops if loop.slots["MXU"]]
    if len(found) != num:
        raise ValueError(f"the compiler's loops: got {len(found)} of {len(loops)} with products, wanted {num}")
    return found


def _around(inner: Loop, loops: list[Loop]) -> Loop:
    """Return the loop at depth 2, just within the kernel's own, that `inner` lies in."""
    for loop in loops:
        if loop.depth == 2 and loop.holds(inner):
            return loop
    raise ValueError(f"the compiler's loops: got products at depth {inner.depth} and no loop at depth 2 around them")


def read_loops(bundles: str, utilization: str) -> list[Loop]:
    """Return a kernel's loops from the compiler's text of its bundles and its table of the slots that each one uses.

    ValueError names what has an unknown form.
    """
    lines = re.findall(r"^\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:\s*((?:>\s*)*)\{", bundles, re.MULTILINE)
    marks = [(mark, depth.count(">")) for mark, depth in lines]
    names = re.search(r"\n(MXU, .*)\n", utilization)
    _, found, table = utilization.partition("== UTILIZATION:")
    fault = "the compiler's table of slots: got"
    if names is None or not found:
        raise ValueError(f"{fault} {utilization[:80]!r}, wanted a line MXU, … and == UTILIZATION:")
    columns = names[1].split(", ")
    slots = [list(map(int, line.split())) for line in table.strip().splitlines() if re.fullmatch(r"[\d ]+", line)]
    if len(slots) != len(marks) or any(len(row) != len(columns) for row in slots):
        wanted = f"one for each, of {len(columns)} numbers"
        raise ValueError(f"{fault} {len(slots)} rows for {len(marks)} bundles, wanted {wanted}")
    spans = []
    for begin, (mark, depth) in enumerate(marks):
        if mark == "LB":
            # A loop goes on to the next mark that lies outside it; unmarked lines may show any depth.
            outside = (
                end
                for end, (other, of) in enumerate(marks[begin + 1 :], begin + 1)
                if other and (of < depth or (other == "LB" and of <= depth))
            )
            spans.append((begin, next(outside, len(marks)), depth))
    loops = []
    for begin, end, depth in spans:
        inner = {n for b, e, d in spans if d > depth and begin <= b and e <= end for n in range(b, e)}
        own = [n for n in range(begin, end) if n not in inner]
        totals = [sum(slots[n][column] for n in own) for column in range(len(columns))]
        loops.append(Loop(begin, end, depth, len(own), dict(zip(columns, totals, strict=True))))
    return loops
