"""Compiles what an output must look like, and says after each token which ones may come next.

The package llguidance does the work: an Earley parser over lexemes, whose masks are bits by token id. Every request has
a parser of its own, since copies of one share its automaton and its limits: what one request reached would end another.
The samples of one request do share it. Nothing here knows steps or devices; masks are numpy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...checks import refusal
from ...sampling.sample_columns import ALL_ALLOWED, num_mask_words
from ...structured_outputs import JSON_KINDS, StructuredOutputsParams
from ..answers.bound_format import BoundFormat
from ..chat.thinking import Thinking
from ..tokenizing.tokenizer import Tokenizer
from .call_rules import CallRules
from .compiler import GrammarCompiler, grammar_text
from .compiler_errors import told
from .kept import KeptValues

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from .call_grammar import CallGrammars
    from .structured_grammar import StructuredGrammars

logger = logging.getLogger("jpaged")
MAX_TEXT_BYTES = 32 << 20
"""What requests asked for and its grammars as text may take, with and without tools, as long as they are remembered."""
MAX_SPARE_BYTES = 128 << 20
"""What parsers for later requests may take, by the estimate of BYTES_PER_COMPILE_S."""
BYTES_PER_COMPILE_S = 200_000_000
"""At most so much of memory takes a parser at its start for each second of a processor that compiling it took. Of 40
grammars, from single texts to 1,500 properties and to the limits of a parser, it was 0.02 to 0.19 MB a millisecond."""
MIN_SPARE_BYTES = 64 << 10
"""What the smallest parser takes, which is compiled in less time than is measured exactly."""
SPARE_DELAY_S = 0.05
"""Seconds before the next parser is compiled: the request that took the last one has its first token by then, which
compiling would have delayed."""
MAX_SPARES_TO_MAKE = 8
"""Grammars that wait to be compiled again; beyond them none is added."""
ENFORCED = "what docs/structured_outputs.md lists"
NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2 - 1))
"""Threads that compute masks. With one, the thread of the step does it: on few cores, which compute the model too, it
waited longer for another thread (2.4 ms for 16 masks) than the masks take (0.5 ms)."""


class GrammarFailure(Exception):  # noqa: N818
    """A request cannot go on because of its grammar. The message is the request's error, and none of its text."""


def _reason(failure: str) -> str:
    """Return a colon and the reason of a matcher's failure."""
    return failure.removeprefix("its grammar cannot go on")


class Matcher:
    """Where in a grammar one sample is."""

    def __init__(self, parser: LLMatcher, num_bytes: int = 0):
        self.parser, self.num_bytes = parser, num_bytes
        """An estimate of the memory of a parser that was compiled for it."""

    def copy(self) -> Matcher:
        """Return a matcher at the same place, for another sample of the same request."""
        return Matcher(self.parser.deep_copy())

    def advance(self, token_id: int) -> bool:
        """Take the next token of the sample; return whether the grammar is over, so that none can follow.

        Raise GrammarFailure if the grammar does not allow the token, or takes too much work.
        """
        if not self.parser.consume_token(token_id):
            raise GrammarFailure(self.failure or "its grammar does not allow the token that was drawn")
        return self.parser.is_stopped()

    def advance_all(self, token_ids: Sequence[int]) -> None:
        """Take tokens that `advance` has taken before. If it fails now, `failure` says so."""
        self.parser.consume_tokens(list(token_ids))

    @property
    def failure(self) -> str:
        """Return why the grammar cannot go on; empty while it can."""
        if not self.parser.is_error():
            return ""
        return f"its grammar cannot go on: {told(self.parser.get_error())}"


class Grammars:
    """The grammars of all requests of one model. Threads may share it.

    llguidance is imported, and its tables of the vocabulary are made, when the first grammar is compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        """`vocab_size` is the width of the model's logits, and a model's `eos_token_ids` end an output."""
        self._compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
        self._texts: KeptValues[tuple[StructuredOutputsParams, Thinking, int | None], str] = KeptValues(MAX_TEXT_BYTES)
        """What requests asked for lately → the grammar's text."""
        self._call_texts: KeptValues[Hashable, tuple[str, tuple[str, ...]]] = KeptValues(MAX_TEXT_BYTES)
        """What requests with tools asked for lately → the grammar's text, and what it does not enforce."""
        self._spares: KeptValues[str, Matcher] = KeptValues(MAX_SPARE_BYTES)
        """A grammar's text → a matcher at its start, which the next request with this grammar takes."""
        self._to_make: set[str] = set()
        """Grammars that the worker compiles again."""
        self._lock = threading.Lock()
        """Guards these four."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="jpaged-grammar")

    # What writes grammars is imported for the first request that has one.

    @cached_property
    def _structured(self) -> StructuredGrammars:
        from .structured_grammar import StructuredGrammars

        return StructuredGrammars(self._compiler)

    @cached_property
    def _calls(self) -> CallGrammars:
        from .call_grammar import CallGrammars

        return CallGrammars(self._compiler, self._structured)

    def grammar_of(
        self,
        params: StructuredOutputsParams,
        thinking: Thinking = Thinking.NONE,
        thought_budget: int | None = None,
        format: BoundFormat | None = None,
    ) -> str:
        """Return the grammar of an output, which was compiled once and can be enforced.

        `thinking` says what may stand before the answer, and `thought_budget` how many tokens that may have, None for
        any number. `format` says how the model writes thoughts; None: between <think> and </think>. Raise
        InvalidRequestError, which names the place in a schema, if the parameters cannot be enforced, or if llguidance
        is not installed.
        """
        asked = params, thinking, thought_budget
        with self._lock:
            text = self._texts.get(asked)
        if text is not None:
            return text
        from .thought_grammar import ThoughtRules, with_thought

        answer = self._structured.grammars_of(params)
        separator = "\\n{1,2}" if params.kind in JSON_KINDS else ""
        rules = ThoughtRules.of(format, thought_budget, self._compiler)
        text = grammar_text(with_thought(answer, thinking, rules, separator))
        if thinking is not Thinking.NONE:
            self._tried(self._enforceable(grammar_text(answer), params), params.kind)  # The steps behind a thought.
        self._keep(text, self._tried(self._enforceable(text, params), params.kind))
        with self._lock:
            self._texts.put(asked, text, 2 * len(text))  # Its own characters, and those of what was asked for.
        return text

    def grammar_of_calls(self, rules: CallRules) -> tuple[str, tuple[str, ...]]:
        """Return the grammar of an answer whose calls of tools have to be enforced, and what it does not enforce.

        The latter is a sentence for each tool whose schema or grammar does not hold. Raise InvalidRequestError, which
        names the place, for a strict schema or a grammar that cannot be enforced. `rules.needs_grammar` is true.
        """
        asked = repr(rules.tools), rules.format.format, rules.structured, rules.thinking, rules.thought_budget
        with self._lock:
            known = self._call_texts.get(asked)
        if known is not None:
            return known
        for write in (self._calls.grammar_of, self._calls.mended):
            written = write(rules)
            text = grammar_text(written.parts)
            start = self._compiled(text)
            if not start.failure:
                break
        else:
            got = f"some whose calls cannot be enforced together{_reason(start.failure)}"
            raise refusal("tools", got, ENFORCED, "send fewer or smaller schemas")
        self._keep(text, self._tried(start, "tools"))
        for warning in written.warnings:
            logger.warning("a request's tools: %s", warning)
        with self._lock:
            self._call_texts.put(asked, (text, written.warnings), len(text) + len(asked[0]))
        return text, written.warnings

    def thoughts_within(self, thought_budget: int, thinking: Thinking, format: BoundFormat | None = None) -> str:
        """Return the grammar of a free output whose thoughts have at most `thought_budget` tokens each."""
        from .thought_grammar import budgeted_thoughts

        return grammar_text(budgeted_thoughts(thinking, thought_budget, format, self._compiler))

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the start of a grammar, which no other request has.

        Another one is compiled soon for the next request with the same grammar, if there is room to keep it.
        """
        with self._lock:
            spare = self._spares.take(grammar)
        matcher = spare or self._compiled(grammar)
        with self._lock:
            is_wanted = matcher.num_bytes <= MAX_SPARE_BYTES and grammar not in self._to_make
            if is_wanted and len(self._to_make) < MAX_SPARES_TO_MAKE:
                self._to_make.add(grammar)
                self._worker.submit(self._make_spare, grammar)
        return matcher

    def masks(self, matchers: Sequence[Matcher | None]) -> np.ndarray:
        """Return which tokens may come next, int32 [matchers, W] with a bit for each token; None allows all.

        A matcher that cannot go on has a `failure` afterwards; its own mask then means nothing.
        """
        width = num_mask_words(self._compiler.vocab_size)
        masks = np.full((len(matchers), max(width, num_mask_words(self._compiler.num_ids))), ALL_ALLOWED, np.int32)
        jobs = [(matcher.parser, row) for row, matcher in enumerate(matchers) if matcher is not None]
        address, (num_rows, num_words) = masks.ctypes.data, masks.shape
        mask_bytes = num_words * masks.itemsize
        if NUM_THREADS > 1 and len(jobs) > 1:
            self._executor.unsafe_compute_mask_ptr(jobs, address, mask_bytes, num_rows)
        else:
            for parser, row in jobs:
                parser.unsafe_compute_mask_ptr(address + row * mask_bytes, mask_bytes)
        return masks if masks.shape[1] == width else np.ascontiguousarray(masks[:, :width])

    def _enforceable(self, text: str, params: StructuredOutputsParams) -> Matcher:
        """Return a matcher at the start of a grammar. Raise InvalidRequestError if it cannot be compiled."""
        start = self._compiled(text)
        if start.parser.is_error():
            raise self._structured.refusal(params, start.parser.get_error())
        return start

    def _tried(self, start: Matcher, name: str) -> Matcher:
        """Try the first two steps of a compiled grammar, and return the matcher.

        Raise InvalidRequestError, which names the field `name`, if they take more work than one step may, which the
        compiler does not see. The second step is that of a copy; the mask of the first one is kept.
        """
        bits = np.unpackbits(self.masks([start])[0].view(np.uint8), bitorder="little")
        bits[[token_id for token_id in self._compiler.eos_token_ids if token_id < len(bits)]] = 0
        following = start.copy()
        if not start.failure and bits.any():
            following.parser.consume_token(int(np.argmax(bits)))
            if not following.failure and not following.parser.is_stopped():
                self.masks([following])
        if failed := start.failure or following.failure:
            raise refusal(name, f"one that cannot be enforced{_reason(failed)}", ENFORCED)
        return start

    def _make_spare(self, text: str) -> None:
        """Compile a grammar again, for the next request that asks for it. Runs on the worker."""
        time.sleep(SPARE_DELAY_S)
        try:
            with self._lock:
                is_there = text in self._spares
            if not is_there:
                self._keep(text, self._compiled(text))
        finally:
            with self._lock:
                self._to_make.discard(text)

    def _keep(self, text: str, spare: Matcher) -> None:
        with self._lock:
            self._spares.put(text, spare, spare.num_bytes)

    def _compiled(self, text: str) -> Matcher:
        """Return a new matcher, which may have failed, with an estimate of its memory."""
        _ = self._compiler.ll_tokenizer  # Made before the time is taken.
        start_s = time.thread_time()
        parser = self._compiler.compiled(text)
        compile_s = time.thread_time() - start_s
        return Matcher(parser, max(MIN_SPARE_BYTES, int(BYTES_PER_COMPILE_S * compile_s)))

    @cached_property
    def _executor(self) -> Any:
        return self._compiler.llguidance.LLExecutor(NUM_THREADS)
