"""Decode on TPU: rows with one query each, whose new key and value are written on the way.

    grid: blocks of BLOCK rows                       VMEM
      long rows, one after another:                    tiles [2, K, S, T, 128]: two slots of one full tile
        full tile │ full tile │ …                        slot a ◀─ DMA ── the next full tile, of whatever row
        no mask, one wait for all pages                  slot b ── compute
        (with a window: masked, and from the first
        page that is seen)
      then the block's rows by twos (float32: by ones): tails [2, BLOCK, K, S, T, 128]: what is left of each row
        sub-tile 0 │ sub-tile 1 │ … of both rows'        the next block's ◀─ DMA ── while this block is computed
        tails, masked; they are independent, so that
        one row's products run while the other waits
        for its maximum

    heads side by side on lanes: the queries of `heads` KV heads, G rows each, are block-diagonal
      Q [heads·G, heads·W] · Kᵀ [heads·W, T]      →  scores [heads·G, T], in one product
      P [heads·G, T] · V [T, heads·W]             →  of which the diagonal blocks count

The new key and value are put into the tail while it lies in VMEM, in the aligned block of tokens that the hardware can
address, and that block is copied back under the compute: the page it lies in must belong to this row alone. Slots
behind a row's end may hold NaN: scores and values there are replaced, never multiplied by zero. Outputs take the place
of the queries; rows of the last block that are not decoded keep theirs.

Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (online softmax); Kwon et al. 2023, arXiv:2309.06180 (pages).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .kv_scales import LayerScales
from .tpu_decode_kernel import DecodeKernel, DecodeRefs, DecodeSizes
from .tpu_tiles import LANES, LOG2_E, HeadLanes, compute_dtype

BLOCK = 4
"""Rows of one grid step."""
MOST_HEADS = 8
"""In one product: of more, whose values stand side by side, the compiler spills registers."""
SPARE_VMEM = 16 << 20
"""Beside the tiles: queries, outputs, scores and what the compiler spills."""


def decode_vmem(tile_bytes: int, block: int = BLOCK) -> int:
    """Bytes of VMEM that decode may need: two slots of a full tile and of each tail of a block, and the rest."""
    return SPARE_VMEM + (2 + 2 * block) * tile_bytes


def heads_together(num_kv_heads: int, group: int, most_rows: int) -> int:
    """KV heads whose scores are computed in one product: a divisor of their number."""
    most = min(num_kv_heads, MOST_HEADS)
    fitting = [n for n in range(1, most + 1) if num_kv_heads % n == 0 and n * group <= most_rows]
    return max(fitting, default=1)


def decode_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"] | None,
    v: Float[Array, "T K H"] | None,
    pages: Float[Array, "C K S Z L"],
    tables: Int[Array, "R P"],
    context_lens: Int[Array, " R"],
    num_rows: Int[Array, ""],
    first_page: Int[Array, ""],
    sinks: Float[Array, " N"] | None,
    kv_scales: LayerScales | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sizes: DecodeSizes,
    interpret: Any = False,
    check_bounds: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "C K S Z L"]]:
    """Attend queries 0 … `num_rows` − 1 to the first `context_lens` tokens of their rows, the last of which is new.

    `k` and `v` are the new keys and values (for pages of one byte a number: such numbers, in more bytes); without them
    nothing is written: the pages hold them already. `first_page` is added to page numbers. Returns `q`, with outputs in
    the place of those queries, and the written pages; both arguments are given up.
    """
    num_tokens, num_heads, head_size = q.shape
    _, num_kv_heads, num_lane_rows, page_size, _ = pages.shape
    lanes = HeadLanes(head_size)
    heads = heads_together(num_kv_heads, num_heads // num_kv_heads, sizes.most_rows)
    num_groups = num_kv_heads // heads
    block = next(size for size in (BLOCK, 2, 1) if num_tokens % size == 0)

    def per_row(num: int) -> pl.BlockSpec:
        return pl.BlockSpec((block, num, head_size), lambda index, *_: (index, 0, 0))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {"q": (q, per_row(num_heads))}
    if k is not None and v is not None:
        inputs |= {"k": (k, per_row(num_kv_heads)), "v": (v, per_row(num_kv_heads))}
    if sinks is not None:
        by_head = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None] * LOG2_E, (num_heads, LANES))
        inputs["sinks"] = by_head, pl.BlockSpec(by_head.shape, lambda *_: (0, 0))
    if kv_scales is not None:
        by_head = jnp.repeat(jnp.stack(kv_scales).astype(jnp.float32), num_heads // num_kv_heads, axis=1)
        by_head = jnp.broadcast_to(by_head[:, :, None], (2, num_heads, LANES))
        inputs["scales"] = by_head, pl.BlockSpec(by_head.shape, lambda *_: (0, 0, 0))
    inputs["pages_in"] = pages, in_hbm
    lens, next_long = _schedule(context_lens, num_rows, sizes.tile, window, block)
    tile_shape, rows = (num_kv_heads, num_lane_rows, sizes.tile, LANES), num_heads // num_groups
    scratch = {
        "tiles": pltpu.VMEM((2, *tile_shape), pages.dtype),
        "tails": pltpu.VMEM((2, block, *tile_shape), pages.dtype),
        "wide_q": pltpu.VMEM((block, num_groups, rows, heads * lanes.width), compute_dtype(q.dtype, pages.dtype)),
        "tops": pltpu.VMEM((block, num_groups, rows, LANES), jnp.float32),
        "totals": pltpu.VMEM((block, num_groups, rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((block, num_groups, rows, lanes.width), jnp.float32),
        "fetched": pltpu.SemaphoreType.DMA((2,)),
        "tail_fetched": pltpu.SemaphoreType.DMA((2,)),
        "written": pltpu.SemaphoreType.DMA(()),
        "next_slot": pltpu.SMEM((1,), jnp.int32),
    }
    names = ["tables", "lens", "next_long", "scalars", *inputs, "out", "pages", *scratch]

    def kernel(*refs: Any) -> None:
        given = dict(zip(names, refs, strict=True))
        DecodeKernel(
            DecodeRefs(**{name: given.get(name) for name in DecodeRefs._fields}),
            lanes=lanes,
            heads=heads,
            sizes=sizes,
            page_size=page_size,
            table_len=tables.shape[1],
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        ).run()

    tile_bytes = num_kv_heads * num_lane_rows * sizes.tile * LANES * pages.dtype.itemsize
    out, pages = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=((num_rows + block - 1) // block,),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[per_row(num_heads), in_hbm],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(pages.shape, pages.dtype)],
        input_output_aliases={names.index("q"): 0, names.index("pages_in"): 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            disable_bounds_checks=not check_bounds,
            vmem_limit_bytes=decode_vmem(tile_bytes, block),
        ),
        interpret=interpret,
        name="ragged_paged_decode",
    )(tables.reshape(-1), lens, next_long, jnp.stack([first_page, num_rows]), *(array for array, _ in inputs.values()))
    return out, pages


def _schedule(lens: Int[Array, " R"], num_rows: Int[Array, ""], tile: int, window: int | None, block: int) -> Any:
    """Lengths, 0 for what is not decoded, and from each row on the next that has full tiles."""
    row = jnp.arange(lens.shape[0])
    lens = jnp.where(row < num_rows, lens, 0)
    first_seen = jnp.zeros_like(lens) if window is None else jnp.maximum(lens - window, 0)
    is_long = jnp.maximum(lens - 1, 0) // tile > first_seen // tile
    following = lax.cummin(jnp.where(is_long, row, lens.shape[0]), reverse=True)
    room = (-lens.shape[0]) % block + block
    return jnp.pad(lens, (0, room)), jnp.pad(following, (0, room), constant_values=lens.shape[0])
