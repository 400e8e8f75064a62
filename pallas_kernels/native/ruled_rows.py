"""Applies rules of requests to rows of logits in native code, in place, and takes them back.

XLA:CPU makes several passes over whole rows of it, and a copy. Here a row is one unit of work, and only those of its
blocks of 128 tokens are read that a rule or a mask changes: most rules change a few. The maxima of blocks, which a
sampler reads first, are kept up to date. What the rules mean is written in `sampling.logit_rules`.

The logits as they were are needed again to score tokens. So blocks are saved before they are changed, in an array of
the size of the logits, of which the other blocks are never touched, and `restored_rows` writes them back.

Letters: R rows, V vocabulary, b blocks of B tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Bool, Float, Int
from llvmlite import ir

from .llvm import F32, I8, I16, I32, I64, Code, constant
from .registry import register
from .row_blocks import I1, INFINITY, RowBlocks
from .row_calls import RowShape, is_set, prepare_rows, row_address
from .xla_call import handler


class RuleBits(NamedTuple):
    """Bits of entries of `Rules.tokens` and `Rules.words`, and the columns of parameters in `Rules.values`."""

    in_prompt: int
    ends: int
    drawn: int
    """A mask: the bits of `tokens` that count how often a token was drawn."""
    is_first: int
    is_last: int
    is_matched: int
    word_id: int
    """A mask: the bits of `words` that are the token's id."""
    min_tokens: int
    """Column of the parameter; so are the next three."""
    repetition_penalty: int
    frequency_penalty: int
    presence_penalty: int


class Rules(NamedTuple):
    """The rules of all state slots, as `LogitRulesState` has them, and the slot of each of R rows."""

    tokens: Int[Array, "slots V"]
    bias: Float[Array, "slots V"]
    touched: Int[Array, "slots b"]
    """Not 0 where `tokens` or `bias` may not be 0: they are not read for other blocks."""
    words: Int[Array, "slots words"]
    values: Float[Array, "slots A"]
    slots: Int[Array, " R"]
    output_index: Int[Array, " R"]
    """How many tokens each row has drawn."""


class LogitBlocks(NamedTuple):
    """Logits of R rows in blocks, with the maximum of each block, NaNs aside, and whether it holds a NaN."""

    blocks: Float[Array, "R b B"]
    """−inf fills up the last block of a row."""
    maxima: Float[Array, "R b"]
    has_nan: Bool[Array, "R b"]


class SavedBlocks(NamedTuple):
    """Blocks of logits as they were. Both arrays mean nothing for rows that are not ruled."""

    rows: Float[Array, "R bB"]
    """Means nothing for blocks that were not changed."""
    is_changed: Bool[Array, "R b"]


def ruled_rows(
    logits: LogitBlocks,
    is_ruled: Bool[Array, " R"],
    rules: Rules | None,
    masks: Int[Array, "R words"] | None,
    bits: RuleBits,
    *,
    vocab_size: int,
) -> tuple[LogitBlocks, SavedBlocks]:
    """Return rows of logits after the rules of their slots and their masks, and the blocks that these have changed.

    Rows that are not `is_ruled` stay as they are. A mask has a bit for each token, 32 in a word: −inf is added to
    tokens whose bit is not set. Rules or masks may be None. The blocks are changed in place: XLA copies them if
    anything else reads them later. `restored_rows` gives them back as they were.
    """
    widths = None if rules is None else (rules.words.shape[1], rules.values.shape[1])
    shape = _Shape(vocab_size, logits.blocks.shape[2], widths, None if masks is None else masks.shape[1])
    rows, flags = _whole_rows(logits.blocks), jax.ShapeDtypeStruct(logits.has_nan.shape, jnp.bool_)
    row_type, maxima_type = (jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (rows, logits.maxima))
    call = ffi_call(_handler(shape, bits), (row_type, maxima_type, flags, row_type, flags), input_output_aliases={0: 0})
    results = call(rows, *logits[1:], is_ruled, *(rules or ()), *([] if masks is None else [masks]))
    new_rows, maxima, has_nan, saved, is_changed = results
    blocks = new_rows.reshape(logits.blocks.shape)
    return LogitBlocks(blocks, maxima, has_nan), SavedBlocks(saved, is_changed)


def restored_rows(
    blocks: Float[Array, "R b B"], is_ruled: Bool[Array, " R"], saved: SavedBlocks, *, after: Array
) -> Float[Array, "R b B"]:
    """Return the blocks that `ruled_rows` was given, from those that it returned, in place.

    `after` is what was computed from the changed blocks. It is not read: XLA waits for it, where it would copy the
    blocks otherwise.
    """
    rows, shape = _whole_rows(blocks), RowShape(*blocks.shape[1:])
    row_type = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    call = ffi_call(_restore_handler(shape), row_type, input_output_aliases={0: 0})
    return call(rows, saved.is_changed, saved.rows, is_ruled, after).reshape(blocks.shape)


def _whole_rows(blocks: Float[Array, "R b B"]) -> Float[Array, "R bB"]:
    """Return blocks as the rows that they were cut from: XLA does not see that an array may be changed in place that it
    has reshaped."""
    return blocks.reshape(blocks.shape[0], -1)


class _Shape(NamedTuple):
    """The shapes that code is compiled for."""

    vocab_size: int
    block: int
    rule_widths: tuple[int, int] | None
    """Entries of bad words and of values of a slot; None without rules."""
    mask_words: int | None
    """Words of a mask; None without masks."""

    @property
    def row(self) -> RowShape:
        """The blocks of a row of logits."""
        return RowShape(-(-self.vocab_size // self.block), self.block)


class _RowRules(NamedTuple):
    """What a row's code reads of its slot: addresses of its first entries, and numbers."""

    tokens: ir.Value
    bias: ir.Value
    touched: ir.Value
    words: ir.Value
    is_too_early: ir.Value
    """i1: whether the tokens that end a sequence are still forbidden."""
    repetition: ir.Value
    frequency: ir.Value
    presence: ir.Value


@cache
def _handler(shape: _Shape, bits: RuleBits) -> str:
    """Compile the custom call for rows of these shapes, and return its name. A unit of work is a row."""

    def body(code: Code, arguments: list[ir.Value], row: ir.Value) -> None:
        _emit_row(code, shape, bits, arguments, row)

    num_arguments = 4 + len(Rules._fields) * (shape.rule_widths is not None) + (shape.mask_words is not None)
    code_key = hashlib.sha256(repr((shape, bits)).encode()).hexdigest()[:16]
    name = f"jpaged_ruled_rows_{shape.vocab_size}_{shape.row.lanes}_{code_key}"
    return register(name, lambda: handler(name, num_arguments, 5, prepare_rows, body))


@cache
def _restore_handler(shape: RowShape) -> str:
    """Compile the custom call that writes saved blocks back, and return its name. A unit of work is a row."""

    def body(code: Code, arguments: list[ir.Value], row: ir.Value) -> None:
        _, is_changed, saved, is_ruled, _, blocks = arguments
        # Logits alone are copied, so that no maxima are needed.
        source, out = (
            RowBlocks(code, shape, row, logits=logits, maxima=logits, flags=is_changed) for logits in (saved, blocks)
        )

        def restore(index: ir.Value) -> None:
            with code.build.if_then(out.has_flag(index)):
                out.copy_logits(source, index)

        with code.build.if_then(is_set(code, is_ruled, row)):
            code.loop(0, shape.num_blocks, restore)

    name = f"jpaged_restored_rows_{shape.num_blocks}_{shape.block}_{shape.lanes}"
    return register(name, lambda: handler(name, 5, 1, prepare_rows, body))


def _emit_row(code: Code, shape: _Shape, bits: RuleBits, arguments: Sequence[ir.Value], row: ir.Value) -> None:
    """Emit code that applies the rules and the mask of row number `row`, if it has any, and copies what is not ruled.

    The blocks are the first argument and the first result, in place.
    """
    blocks, maxima, has_nan, is_ruled, *optional = arguments[:-5]
    _, *results = arguments[-5:]
    new_maxima, new_has_nan, saved, is_changed = results
    source = RowBlocks(code, shape.row, row, logits=blocks, maxima=maxima, flags=has_nan)
    out = RowBlocks(code, shape.row, row, logits=blocks, maxima=new_maxima, flags=new_has_nan)
    before = RowBlocks(code, shape.row, row, logits=saved, maxima=maxima, flags=is_changed)
    code.loop(0, shape.row.num_blocks, lambda index: out.copy_summary(source, index))
    with code.build.if_then(is_set(code, is_ruled, row)):
        rules = _row_rules(code, shape, bits, optional, row) if shape.rule_widths is not None else None
        mask = None
        if shape.mask_words is not None:
            mask = row_address(code, optional[-1], row, shape.mask_words, I32)
        _emit_ruled(code, shape, bits, logits=out, saved=before, rules=rules, mask=mask)


def _row_rules(code: Code, shape: _Shape, bits: RuleBits, arrays: Sequence[ir.Value], row: ir.Value) -> _RowRules:
    """Emit code that finds the rules of a row's slot; `arrays` begin with those of `Rules`."""
    build, (num_words, num_values) = code.build, shape.rule_widths or (0, 0)
    tokens, bias, touched, words, values, slots, output_index = arrays[:7]
    slot = code.load_index(slots, row)
    slot_values = row_address(code, values, slot, num_values, F32)
    num_drawn = build.sitofp(code.load(output_index, row, I32), F32)
    return _RowRules(
        row_address(code, tokens, slot, shape.vocab_size, I32),
        row_address(code, bias, slot, shape.vocab_size, F32),
        row_address(code, touched, slot, shape.row.num_blocks, I32),
        row_address(code, words, slot, num_words, I32),
        build.fcmp_ordered("<", num_drawn, code.load(slot_values, bits.min_tokens, F32)),
        *(
            code.load(slot_values, column, F32)
            for column in (bits.repetition_penalty, bits.frequency_penalty, bits.presence_penalty)
        ),
    )


def _emit_ruled(
    code: Code,
    shape: _Shape,
    bits: RuleBits,
    *,
    logits: RowBlocks,
    saved: RowBlocks,
    rules: _RowRules | None,
    mask: ir.Value | None,
) -> None:
    """Emit code that applies a row's rules and its mask, block by block, and then bans bad words.

    A mask may change all blocks, and rules those that are touched. The last block may be shorter: its tokens are
    computed one by one.
    """
    build, num_whole = code.build, shape.vocab_size // shape.block

    def changed(token: ir.Value, lanes: int) -> ir.Value:
        values = logits.load(token, lanes)
        if rules is not None:
            values = _ruled_vector(code, bits, rules, values, token)
        return values if mask is None else build.fadd(values, _mask_bias(code, mask, token, lanes))

    def if_changed(index: ir.Value, change: Callable[[], None]) -> None:
        """Emit `change` of a block that is saved first, unless nothing changes it."""
        is_changed = ir.Constant(I1, 1)
        if mask is None and rules is not None:
            is_changed = build.icmp_signed("!=", code.load(rules.touched, index, I32), I32(0))
        saved.set_flag(is_changed, index)
        with build.if_then(is_changed):
            saved.copy_logits(logits, index)
            change()

    def change_block(index: ir.Value) -> None:
        if_changed(index, lambda: logits.write(index, lambda token: changed(token, logits.lanes)))

    def change_last() -> None:
        start = num_whole * shape.block
        code.loop(start, shape.vocab_size, lambda token: logits.store(changed(token, 1), token))
        logits.summarize(I64(num_whole))

    code.loop(0, num_whole, change_block)
    if num_whole * shape.block < shape.vocab_size:
        if_changed(I64(num_whole), change_last)
    if rules is not None:
        _emit_bans(code, bits, rules.words, shape, logits, saved)


def _ruled_vector(code: Code, bits: RuleBits, rules: _RowRules, logits: ir.Value, token: ir.Value) -> ir.Value:
    """Return a vector of logits after bias, min_tokens and penalties: those from `token` on."""
    build, lanes, vector_type = code.build, logits.type.count, logits.type
    int_type = ir.VectorType(I32, lanes)
    zero, zeros = constant(vector_type, 0.0), constant(int_type, 0)
    tokens = code.load_vector(rules.tokens, token, I32, lanes)
    bias = code.load_vector(rules.bias, token, F32, lanes)

    def has(mask: int) -> ir.Value:
        return build.icmp_signed("!=", build.and_(tokens, constant(int_type, mask)), zeros)

    is_forbidden = build.and_(has(bits.ends), code.broadcast(rules.is_too_early, lanes))
    logits = build.fadd(logits, build.select(is_forbidden, constant(vector_type, -INFINITY), bias))
    repetition = code.broadcast(rules.repetition, lanes)
    inverse = code.broadcast(build.fdiv(constant(F32, 1.0), rules.repetition), lanes)
    factor = build.select(build.fcmp_ordered(">", logits, zero), inverse, repetition)
    logits = build.select(has(bits.drawn | bits.in_prompt), build.fmul(logits, factor), logits)
    counts = build.sitofp(build.and_(tokens, constant(int_type, bits.drawn)), vector_type)
    logits = code.add_product(build.fneg(code.broadcast(rules.frequency, lanes)), counts, logits)
    return build.fsub(logits, build.select(has(bits.drawn), code.broadcast(rules.presence, lanes), zero))


def _mask_bias(code: Code, mask: ir.Value, token: ir.Value, lanes: int) -> ir.Value:
    """Return 0 for tokens from `token` on whose bit is set, and −inf for others.

    A vector of 16 or 8 lanes begins at a multiple of its lanes, so that its bits are whole bytes of the mask.
    """
    build, vector_type = code.build, ir.VectorType(F32, lanes)
    if lanes == 1:
        word = code.load(mask, build.lshr(token, I64(5)), I32)
        bit = build.trunc(build.lshr(word, build.trunc(build.and_(token, I64(31)), I32)), I1)
        is_allowed = code.broadcast(bit, 1)
    else:
        element_type = {16: I16, 8: I8}[lanes]
        part = code.load(mask, build.udiv(token, I64(lanes)), element_type)
        is_allowed = build.bitcast(part, ir.VectorType(I1, lanes))
    return build.select(is_allowed, constant(vector_type, 0.0), constant(vector_type, -INFINITY))


def _emit_bans(code: Code, bits: RuleBits, words: ir.Value, shape: _Shape, logits: RowBlocks, saved: RowBlocks) -> None:
    """Emit code that adds −inf to each token that would complete a bad word, and looks through its block again.

    An entry of `words` is a token of a word. The next token would complete one if it is the word's last entry, and
    also its first one or the entry behind a matched one.
    """
    build, num_words = code.build, (shape.rule_widths or (0, 0))[0]

    def ban(entry_index: ir.Value, before: ir.Value) -> list[ir.Value]:
        entry = code.load(words, entry_index, I32)

        def has(value: ir.Value, bit: int) -> ir.Value:
            return build.icmp_signed("!=", build.and_(value, I32(bit)), I32(0))

        may_come_next = build.or_(has(entry, bits.is_first), has(before, bits.is_matched))
        with build.if_then(build.and_(has(entry, bits.is_last), may_come_next)):
            token = build.sext(build.and_(entry, I32(bits.word_id)), I64)
            # A word may hold an id beyond the vocabulary, which has no logit.
            with build.if_then(build.icmp_signed("<", token, I64(shape.vocab_size))):
                index = build.udiv(token, I64(shape.block))
                with build.if_then(build.not_(saved.has_flag(index))):
                    saved.copy_logits(logits, index)
                    saved.set_flag(ir.Constant(I1, 1), index)
                logits.store(build.fadd(logits.load(token, 1), constant(ir.VectorType(F32, 1), -INFINITY)), token)
                logits.summarize(index)
        return [entry]

    # Nothing is matched in front of the first entry.
    code.loop(0, num_words, ban, carried=[I32(0)])
