"""The format of a step's input: ONE int32 buffer per step, cut into named sections at fixed offsets.

One buffer, because transfers to a device are slow to start: nine arrays took 304 µs, one takes 20 µs. The host writes
the sections through numpy views (step_inputs.py), and the compiled step reads them as slices of the traced array
(step.py). A layout belongs to one token bucket, and to steps that only decode or to all others. It is a static argument
of the compiled step, so that every offset is a constant of the program. Floats travel as the bits of a float32. With T
tokens, R rows, S sampled rows, all padded, and for each page-table group (a set of layers that share page tables):

    counts        [4]          COUNT_FIELDS
    samples       [fields, S]  SAMPLE_FIELDS of each sampled row
    changes       [4, N]       CHANGE_FIELDS of each page-table change; padding sets a null page to itself
    token_ids     [T]          an id ≥ 0, or −(s + 1) ≤ −2 for the last token that was sampled in state slot s
    positions     [T]          position of each token in its sequence
    slot_mapping  [groups, T]  page × page size + offset where each token's key and value are written
    query_starts  [R + 1]      row r holds the tokens query_starts[r] to query_starts[r + 1]
    context_lens  [R]          tokens of each row, those of this step included
    seq_slots     [R]          state slot of each row
    decode_lens   [R]          tokens that a decode program computes for each row; 0 in other programs
    plan          [plan_len]   what the attention backend planned on the host

Padding is zero everywhere but in `query_starts`: page 0, KV slot 0 and state slot 0 belong to no sequence. Each section
begins at a multiple of SECTION_ALIGN values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

from ..sampling.sample_columns import SAMPLE_FIELDS

SECTION_ALIGN = 64
"""In int32 values: 256 bytes. XLA hands a slice of the buffer to a GPU kernel in place, wherever it begins, and kernels
of Mosaic refuse arrays that do not begin at a multiple of 256 bytes."""
TOKEN, SLOT, OUTPUT_INDEX = map(SAMPLE_FIELDS.index, ("token", "slot", "output_index"))
CHANGE_FIELDS = ("table_group", "slot", "table_index", "page")
"""A page-table change: in page-table group `table_group`, entry `table_index` of state slot `slot`'s table becomes
`page`."""
COUNT_FIELDS = ("num_tokens", "num_rows", "num_decode_rows", "num_samples")
"""How much of the padded sections is used. `num_decode_rows` counts rows with one token."""


@dataclass(frozen=True)
class StepLayout:
    """The sections of the packed buffer for one token bucket. Hashable: it is a static argument of compiled steps."""

    num_tokens: int
    """Tokens of the bucket, padding included; so are the sizes below."""
    num_rows: int
    num_samples: int
    num_table_groups: int
    """Page-table groups: sets of layers that share their page tables."""
    num_changes: int
    """Page-table changes that the buffer has room for."""
    plan_len: int
    """Length of what the attention backend plans on the host."""
    decodes_only: bool = False
    """Whether the step's program takes rows of one token only."""

    @cached_property
    def sections(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Return the name of each section → (its offset in the buffer, its shape), both in int32 values.

        The dict's order is the order in the buffer. Each offset is a multiple of SECTION_ALIGN = 64: "counts" has 4
        values at offset 0, so "samples" begins at 64. The module's docstring says what each section holds.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "counts": (len(COUNT_FIELDS),),
            "samples": (len(SAMPLE_FIELDS), self.num_samples),
            "changes": (len(CHANGE_FIELDS), self.num_changes),
            "token_ids": (self.num_tokens,),
            "positions": (self.num_tokens,),
            "slot_mapping": (self.num_table_groups, self.num_tokens),
            "query_starts": (self.num_rows + 1,),
            "context_lens": (self.num_rows,),
            "seq_slots": (self.num_rows,),
            "decode_lens": (self.num_rows,),
            "plan": (self.plan_len,),
        }
        aligned_sizes = (-(-prod(shape) // SECTION_ALIGN) * SECTION_ALIGN for shape in shapes.values())
        # Not strict: `offsets` has one value more than there are sections, the end of the last one.
        offsets = accumulate(aligned_sizes, initial=0)
        return {name: (offset, shape) for offset, (name, shape) in zip(offsets, shapes.items(), strict=False)}

    @cached_property
    def size(self) -> int:
        """Return the length of the buffer in int32 values."""
        offset, shape = self.sections["plan"]
        return offset + prod(shape)

    def view(self, packed: Any) -> dict[str, Any]:
        """Return name → section of a packed buffer, int32 [size], each in its own shape and without padding.

        The sections of a numpy buffer are views: writing to one writes to the buffer. Those of a traced JAX array are
        slices of it.
        """
        return {
            name: packed[offset : offset + prod(shape)].reshape(shape)
            for name, (offset, shape) in self.sections.items()
        }
