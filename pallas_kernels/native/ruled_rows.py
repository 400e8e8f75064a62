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
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ffi import ffi_call
from jaxtyping import Array, Bool, Float, Int
from llvmlite import ir

from .llvm import F32, I8, I16, I32, I64, Code, constant, lanes_for
from .registry import register
from .xla_call import Call, Work, handler

MIN_PARALLEL_BLOCKS = 1 << 9
"""Rows of fewer blocks together run on one thread: waking a second would take longer."""
INFINITY = float("inf")
I1 = ir.IntType(1)


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
    blocks: Float[Array, "R b B"], is_ruled: Bool[Array, " R"], saved: SavedBlocks, results: Array
) -> Float[Array, "R b B"]:
    """Return the blocks that `ruled_rows` was given, from those that it returned, in place.

    `results` are what was computed from the changed blocks. They are not read: XLA waits for them, where it would copy
    the blocks otherwise.
    """
    rows, (_, num_blocks, block) = _whole_rows(blocks), blocks.shape
    row_type = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
    call = ffi_call(_restore_handler(num_blocks, block), row_type, input_output_aliases={0: 0})
    return call(rows, saved.is_changed, saved.rows, is_ruled, results).reshape(blocks.shape)


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
    name = f"jpaged_ruled_rows_{shape.vocab_size}_{lanes_for(shape.block)}_{code_key}"
    return register(name, lambda: handler(name, num_arguments, 5, _prepare, body))


@cache
def _restore_handler(num_blocks: int, block: int) -> str:
    """Compile the custom call that writes saved blocks back, and return its name. A unit of work is a row."""

    def body(code: Code, arguments: list[ir.Value], row: ir.Value) -> None:
        _, is_changed, saved, is_ruled, _, blocks = arguments
        first_block = code.build.mul(row, I64(num_blocks))
        # Nothing is told of blocks here, so that the flags stand for it.
        source, out = (_RowBlocks(code, block, (base, base, is_changed), first_block) for base in (saved, blocks))

        def restore(index: ir.Value) -> None:
            with code.build.if_then(out.has_flag(index)):
                out.copy_logits(source, index)

        with code.build.if_then(_is_set(code, is_ruled, row)):
            code.loop(0, num_blocks, restore)

    name = f"jpaged_restored_rows_{num_blocks}_{block}_{lanes_for(block)}"
    return register(name, lambda: handler(name, 5, 1, _prepare, body))


def _prepare(code: Code, call: Call) -> Work:
    """Emit code that hands all addresses on, counts the rows, and decides whether they are worth several threads.

    The second argument has a number for each block of each row.
    """
    num_rows = call.arguments[1].size(0)
    num_blocks = code.build.mul(num_rows, call.arguments[1].size(1))
    is_large = code.build.icmp_signed(">=", num_blocks, I64(MIN_PARALLEL_BLOCKS))
    return Work([buffer.data for buffer in (*call.arguments, *call.results)], [num_rows], is_large)


def _is_set(code: Code, flags: ir.Value, index: ir.Value) -> ir.Value:
    """Return a flag as an i1."""
    return code.build.icmp_signed("!=", code.load(flags, index, I8), I8(0))


def _emit_row(code: Code, shape: _Shape, bits: RuleBits, arguments: Sequence[ir.Value], row: ir.Value) -> None:
    """Emit code that applies the rules and the mask of row number `row`, if it has any, and copies what is not ruled.

    The blocks are the first argument and the first result, in place.
    """
    build, num_blocks = code.build, -(-shape.vocab_size // shape.block)
    blocks, maxima, has_nan, is_ruled, *optional = arguments[:-5]
    _, *results = arguments[-5:]
    first_block = build.mul(row, I64(num_blocks))
    new_maxima, new_has_nan, saved, is_changed = results
    source = _RowBlocks(code, shape.block, (blocks, maxima, has_nan), first_block)
    out = _RowBlocks(code, shape.block, (blocks, new_maxima, new_has_nan), first_block)
    before = _RowBlocks(code, shape.block, (saved, maxima, is_changed), first_block)
    code.loop(0, num_blocks, lambda index: out.copy_summary(source, index))
    with build.if_then(_is_set(code, is_ruled, row)):
        rules = _row_rules(code, shape, bits, optional, row) if shape.rule_widths is not None else None
        mask = None
        if shape.mask_words is not None:
            mask = _bytes_at(code, optional[-1], build.mul(row, I64(shape.mask_words)), I32)
        _emit_ruled(code, shape, bits, out, before, rules, mask)


def _row_rules(code: Code, shape: _Shape, bits: RuleBits, arrays: Sequence[ir.Value], row: ir.Value) -> _RowRules:
    """Emit code that finds the rules of a row's slot; `arrays` begin with those of `Rules`."""
    build, (num_words, num_values) = code.build, shape.rule_widths or (0, 0)
    tokens, bias, touched, words, values, slots, output_index = arrays[:7]
    slot = code.load_index(slots, row)
    first_token = build.mul(slot, I64(shape.vocab_size))
    slot_values = _bytes_at(code, values, build.mul(slot, I64(num_values)), F32)
    num_drawn = build.sitofp(code.load(output_index, row, I32), F32)
    return _RowRules(
        _bytes_at(code, tokens, first_token, I32),
        _bytes_at(code, bias, first_token, F32),
        _bytes_at(code, touched, build.mul(slot, I64(-(-shape.vocab_size // shape.block))), I32),
        _bytes_at(code, words, build.mul(slot, I64(num_words)), I32),
        build.fcmp_ordered("<", num_drawn, code.load(slot_values, bits.min_tokens, F32)),
        *(
            code.load(slot_values, column, F32)
            for column in (bits.repetition_penalty, bits.frequency_penalty, bits.presence_penalty)
        ),
    )


def _bytes_at(code: Code, base: ir.Value, offset: ir.Value, element_type: ir.Type) -> ir.Value:
    """Return the address of the element at `offset` as a byte pointer."""
    return code.build.bitcast(code.at(base, offset, element_type), base.type)


def _emit_ruled(
    code: Code,
    shape: _Shape,
    bits: RuleBits,
    logits: _RowBlocks,
    saved: _RowBlocks,
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


def _emit_bans(
    code: Code, bits: RuleBits, words: ir.Value, shape: _Shape, logits: _RowBlocks, saved: _RowBlocks
) -> None:
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


class _RowBlocks:
    """A row's logits in memory, with what is told of each of its blocks."""

    def __init__(self, code: Code, block: int, arrays: Sequence[ir.Value], first_block: ir.Value) -> None:
        """`arrays` are the addresses of all logits, and of the maximum and a flag of each block; `first_block` is the
        row's first block in them.
        """
        self._code, self._block, self.lanes = code, block, lanes_for(block)
        logits, maxima, flags = arrays
        self._logits = _bytes_at(code, logits, code.build.mul(first_block, I64(block)), F32)
        self._maxima = _bytes_at(code, maxima, first_block, F32)
        self._flags = _bytes_at(code, flags, first_block, I8)

    def load(self, token: ir.Value, lanes: int) -> ir.Value:
        """Load a vector of logits from `token` on."""
        return self._code.load_vector(self._logits, token, F32, lanes)

    def store(self, values: ir.Value, token: ir.Value) -> None:
        """Store a vector of logits from `token` on."""
        self._code.store_vector(values, self._logits, token)

    def write(self, index: ir.Value, vector_from: Callable[[ir.Value], ir.Value]) -> None:
        """Emit a block whose vectors `vector_from(first token)` computes, and what is told of it."""

        def write_vector(token: ir.Value) -> ir.Value:
            values = vector_from(token)
            self.store(values, token)
            return values

        self._summarize(index, write_vector)

    def summarize(self, index: ir.Value) -> None:
        """Emit what is told of a block that was written."""
        self._summarize(index, lambda token: self.load(token, self.lanes))

    def copy_logits(self, source: _RowBlocks, index: ir.Value) -> None:
        """Emit a copy of a block's logits."""
        for token in self._vectors_of(index):
            self.store(source.load(token, self.lanes), token)

    def copy_summary(self, source: _RowBlocks, index: ir.Value) -> None:
        """Emit a copy of what is told of a block."""
        self._code.store(self._code.load(source._maxima, index, F32), self._maxima, index)
        self._code.store(self._code.load(source._flags, index, I8), self._flags, index)

    def set_flag(self, flag: ir.Value, index: ir.Value) -> None:
        """Emit a block's flag; see `has_flag`."""
        self._code.store(self._code.build.zext(flag, I8), self._flags, index)

    def has_flag(self, index: ir.Value) -> ir.Value:
        """Return a block's flag: whether it holds a NaN, or in saved blocks whether it was changed."""
        return _is_set(self._code, self._flags, index)

    def _vectors_of(self, index: ir.Value) -> Iterator[ir.Value]:
        """Yield the first token of each vector of a block."""
        first_token = self._code.build.mul(index, I64(self._block))
        for offset in range(0, self._block, self.lanes):
            yield self._code.build.add(first_token, I64(offset))

    def _summarize(self, index: ir.Value, vector_from: Callable[[ir.Value], ir.Value]) -> None:
        """Emit the maximum of a block's vectors, NaNs aside, and whether they hold a NaN."""
        code, build = self._code, self._code.build
        maximum, is_nan = (
            constant(ir.VectorType(F32, self.lanes), -INFINITY),
            constant(ir.VectorType(I1, self.lanes), 0),
        )
        for token in self._vectors_of(index):
            values = vector_from(token)
            maximum = code.maximum(values, maximum)
            is_nan = build.or_(is_nan, build.fcmp_unordered("uno", values, values))
        code.store(code.reduce(maximum, code.maximum), self._maxima, index)
        code.store(build.zext(code.reduce(is_nan, build.or_), I8), self._flags, index)
