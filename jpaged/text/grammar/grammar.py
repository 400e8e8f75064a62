"""Compiles what an output must look like, and says after each token which ones may come next.

The package llguidance does the work: an Earley parser over lexemes, whose masks are bits by token id. Every request has
a parser of its own, since copies of one share its automaton and its limits: what one request reached would end another.
The samples of one request do share it. Nothing here knows steps or devices; masks are numpy.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...checks import check, refusal, sent_as
from ...errors import JpagedError
from ...sampling.sample_columns import num_mask_words
from ...structured_outputs import StructuredOutputsParams, parsed_json
from ..chat.thinking import BEGIN, END, Thinking
from ..tokenizing.tokenizer import Tokenizer
from .closed_names import with_closed_objects
from .ecma_regex import literal_regex, portable_regex
from .json_schema import enforced_schema, located, unknown_formats
from .lark_grammar import is_gbnf, joined_texts, num_rules, readable_gbnf
from .schema_grammar import schema_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("jpaged")
MAX_PREPARED = 64
"""Grammars that are remembered, each with a parser for the next request that asks for it."""
MAX_SPARE_S = 0.01
"""A parser that took more seconds to compile is not made again before a request asks for it, since it is large."""
SPARE_DELAY_S = 0.05
"""Seconds before the next parser is compiled: the request that took the last one has its first token by then, which
compiling would have delayed."""
MAX_SPARES_TO_MAKE = 8
"""Grammars that wait to be compiled again; beyond them none is added."""
WHITE_SPACE = r"[ ]|\n{1,2}[ \t]{0,20}"
"""Between two tokens of JSON, at most once. Without a bound, small models fill their output with it."""
NUM_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2 - 1))
"""Threads that compute masks. With one, the thread of the step does it: on few cores, which compute the model too, it
waited longer for another thread (2.4 ms for 16 masks) than the masks take (0.5 ms)."""
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 70_000,
    "step_max_items": 100_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""The work and the memory that one parser may take, in llguidance's units: some tens of milliseconds to compile it,
five to fifteen for a mask, and about 100 MB. A string of JSON with a maximum length has about four states for each
character."""
ESCAPES = 'nrbtf\\"'
"""Escapes in texts of JSON. Without those of numbers (\\u0061), a name has one spelling: another one would pass for a
further property, and then replace the value of the first."""
MAX_RULES = 500
"""Rules of one grammar in Lark or GBNF."""
ANSWER = "answer"
"""The grammar of the answer behind a thought."""
NAME = "structured_outputs"
"""The field that a refusal names."""
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\):?\s*")
"""Where in a Lark grammar the compiler found a fault: "at 1(14): …"."""
_GBNF_PLACE = re.compile(r"\s+at line (\d+), .*")
"""Where in a GBNF grammar its converter found a fault, and what stands there: "… at line 1, 'root ' ^ '= x'"."""
_INNER_SCHEMA = re.compile(r"%json\s*")
"""What stands before a JSON schema in a Lark grammar."""
_TOLD = {
    "Unable to determine if regex is empty": "its patterns are too complex together",
    "too many": "it takes more work than a request may",
    "Too many": "it takes more work than a request may",
    "Current row has": "it takes more work than a request may",
    "NoExtensionBias": "no text satisfies it",
    "panic": "its compiler failed",
    "lookarounds not supported": "^ or $ stands within an expression",
    "too large": "it takes more work than a request may",
    "fuel": "it takes more work than a request may",
    "too complex": "it takes more work than a request may",
    "too big": "it takes more work than a request may",
    "Unsatisfiable schema": "nothing satisfies it",
    "oneOf constraints": "several options of a oneOf may hold at once: give anyOf",
    "min/maxProperties": "minProperties and maxProperties need that every named property is required",
    "not disjoint": "patterns of patternProperties overlap",
    "satisfy the grammar": "the tokenizer has no token for what must come next",
    "Invalid escape sequence": "an escape that GBNF does not have",
    "circular": "a $ref that leads back to itself has other keywords beside it",
}
"""What a message of llguidance holds → what is said of it."""


class GrammarFailure(Exception):  # noqa: N818
    """A request cannot go on because of its grammar. The message is the request's error, and none of its text."""


def unenforced(params: StructuredOutputsParams) -> list[str]:
    """Return what the JSON schema of parameters says without effect: formats that are not known, with their places.

    The parameters are some that `Grammars.grammar_of` takes.
    """
    if params.json is None or '"format"' not in str(params.json):
        return []
    return unknown_formats(parsed_json(str(params.json)))


class Matcher:
    """Where in a grammar one sample is."""

    def __init__(self, parser: LLMatcher):
        self.parser = parser

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
        return f"its grammar cannot go on: {_told(self.parser.get_error())}"


class Grammars:
    """The grammars of all requests of one model. Threads may share it.

    llguidance is imported, and its tables of the vocabulary are made, when the first grammar is compiled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        """`vocab_size` is the width of the model's logits, and a model's `eos_token_ids` end an output."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._texts: OrderedDict[tuple[StructuredOutputsParams, Thinking], str] = OrderedDict()
        """What requests asked for lately → the grammar's text."""
        self._spares: OrderedDict[str, Matcher] = OrderedDict()
        """A grammar's text → a matcher at its start, which the next request with this grammar takes."""
        self._to_make: set[str] = set()
        """Grammars that the worker compiles again."""
        self._lock = threading.RLock()
        """Guards these three, and the first use of llguidance."""
        self._told_formats: set[str] = set()
        """Formats that are not known, of which the log has a line."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="jpaged-grammar")

    def grammar_of(self, params: StructuredOutputsParams, thinking: Thinking = Thinking.NONE) -> str:
        """Return the grammar of an output, compiled and ready for a request.

        `thinking` says what may stand before the answer. Raise InvalidRequestError, which names the place in a schema,
        if the parameters cannot be enforced, or if llguidance is not installed.
        """
        asked = params, thinking
        with self._lock:
            text = self._texts.get(asked)
            if text is not None and text in self._spares:
                return text
        if text is None and thinking is not Thinking.NONE:
            self._tried(self._text_of(params, Thinking.NONE), params)  # The steps behind a thought.
        text = self._text_of(params, thinking) if text is None else text
        self._keep(text, self._tried(text, params))
        with self._lock:
            self._texts[asked] = text
            while len(self._texts) > MAX_PREPARED:
                self._texts.popitem(last=False)
        return text

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the start of a grammar of `grammar_of`, which no other request has."""
        with self._lock:
            spare = self._spares.pop(grammar, None)
            if grammar not in self._to_make and len(self._to_make) < MAX_SPARES_TO_MAKE:
                self._to_make.add(grammar)
                self._worker.submit(self._make_spare, grammar)
        return spare or Matcher(self._compiled(grammar))

    def masks(self, matchers: Sequence[Matcher | None]) -> np.ndarray:
        """Return which tokens may come next, int32 [matchers, W] with a bit for each token; None allows all.

        A matcher that cannot go on has a `failure` afterwards; its own mask then means nothing.
        """
        width = num_mask_words(self._vocab_size)
        masks = np.full((len(matchers), max(width, num_mask_words(self._num_ids))), -1, np.int32)
        jobs = [(matcher.parser, row) for row, matcher in enumerate(matchers) if matcher is not None]
        address, (num_rows, num_words) = masks.ctypes.data, masks.shape
        mask_bytes = num_words * masks.itemsize
        if NUM_THREADS > 1 and len(jobs) > 1:
            self._executor.unsafe_compute_mask_ptr(jobs, address, mask_bytes, num_rows)
        else:
            for parser, row in jobs:
                parser.unsafe_compute_mask_ptr(address + row * mask_bytes, mask_bytes)
        return masks if masks.shape[1] == width else np.ascontiguousarray(masks[:, :width])

    def _tried(self, text: str, params: StructuredOutputsParams) -> Matcher:
        """Return a matcher at the start of a grammar, of which the first two steps were tried.

        Raise InvalidRequestError if the grammar cannot be compiled, or if these steps take more work than one step may,
        which the compiler does not see. The second step is that of a copy; the mask of the first one is kept.
        """
        start = Matcher(self._compiled(text))
        if start.parser.is_error():
            raise self._refusal(params, start.parser.get_error())
        bits = np.unpackbits(self.masks([start])[0].view(np.uint8), bitorder="little")
        bits[[token_id for token_id in self._eos_token_ids if token_id < len(bits)]] = 0
        following = start.copy()
        if not start.failure and bits.any():
            following.parser.consume_token(int(np.argmax(bits)))
            if not following.failure and not following.parser.is_stopped():
                self.masks([following])
        if failed := start.failure or following.failure:
            got = f"one that cannot be enforced{failed.removeprefix('its grammar cannot go on')}"
            raise refusal(params.kind, got, "what docs/structured_outputs.md lists")
        return start

    def _make_spare(self, text: str) -> None:
        """Compile a grammar again, for the next request that asks for it. Runs on the worker."""
        time.sleep(SPARE_DELAY_S)
        try:
            start_s = time.perf_counter()
            spare = None if text in self._spares else Matcher(self._compiled(text))
            if spare is not None and time.perf_counter() - start_s < MAX_SPARE_S:
                self._keep(text, spare)
        finally:
            with self._lock:
                self._to_make.discard(text)

    def _keep(self, text: str, spare: Matcher) -> None:
        with self._lock:
            self._spares[text] = spare
            while len(self._spares) > MAX_PREPARED:
                self._spares.popitem(last=False)

    def _compiled(self, text: str) -> LLMatcher:
        """Return a new parser, which may be in an error. Other threads run meanwhile."""
        llguidance, tokenizer = self._llguidance, self._ll_tokenizer
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        return llguidance.LLMatcher(tokenizer, text, limits=limits, log_level=0)

    def _text_of(self, params: StructuredOutputsParams, thinking: Thinking) -> str:
        """Return a grammar as the JSON that llguidance reads: a list of grammars, of which the first one begins."""
        llguidance = self._llguidance
        match params.kind:
            case "json" | "json_object":
                text = self._json_grammar(self._enforced(self._schema_of(params), params), params)
            case "regex":
                text = llguidance.LLMatcher.grammar_from_regex(check("regex", params.regex, portable_regex))
            case "choice":
                # One expression: as alternatives of a rule, each would be a lexeme, and an item of the parser.
                expression = "|".join(map(literal_regex, params.choice or ()))
                text = llguidance.LLMatcher.grammar_from_regex(expression)
            case _:
                text = self._lark_grammar(params)
        prefix = self._thought(thinking, "\\n{1,2}" if params.kind.startswith("json") else "")
        if not prefix:
            return text
        grammars = json.loads(text)["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": prefix}, {**grammars[0], "name": ANSWER}, *grammars[1:]]})

    def _lark_grammar(self, params: StructuredOutputsParams) -> str:
        """Return a request's grammar in Lark, with what is enforced of the schemas within it.

        A schema that llguidance would not compile right is a grammar of its own, to which the request's one refers.
        """
        lark = str(params.grammar)
        if is_gbnf(lark):
            try:
                lark = self._llguidance.gbnf_to_lark.gbnf_to_lark(readable_gbnf(lark))
            except Exception as error:  # The converter raises errors of many kinds.
                raise self._refusal(params, str(error)) from None
        # The compiler follows a chain of rules by recursion, and its stack would overflow.
        if (num := num_rules(lark)) > MAX_RULES:
            raise refusal("grammar", f"{num} rules", f"at most {MAX_RULES}")
        lark = joined_texts(lark)
        parts: list[str] = []
        inner: list[dict[str, str]] = []
        end = 0
        for found in _INNER_SCHEMA.finditer(lark):
            if found.start() < end:
                continue
            try:
                schema, after = json.JSONDecoder().raw_decode(lark, found.end())
            except (ValueError, RecursionError):
                continue  # The compiler says where.
            with sent_as({"json": "grammar"}):
                enforced = self._enforced(schema, params)
            options = self._json_options(params)
            own = schema_grammar(enforced, options)
            if own:
                inner.append({"name": f"json{len(inner)}", "lark_grammar": own})
                parts += [lark[end : found.start()], f"@json{len(inner) - 1}"]
            else:
                schema = {**enforced, "x-guidance": options}
                parts += [lark[end : found.end()], json.dumps(schema, ensure_ascii=False)]
            end = after
        return json.dumps({"grammars": [{"lark_grammar": "".join([*parts, lark[end:]])}, *inner]})

    def _schema_of(self, params: StructuredOutputsParams) -> Any:
        return {"type": "object"} if params.json is None else parsed_json(str(params.json))

    def _enforced(self, schema: Any, params: StructuredOutputsParams) -> dict[str, Any]:
        """Return a schema of the keywords that are enforced. Raise InvalidRequestError if that cannot be."""
        unknown: list[str] = []
        enforced = enforced_schema(schema, closes_objects=params.disable_additional_properties, unknown=unknown)
        for told in unknown:
            if len(self._told_formats) < MAX_PREPARED and told.partition(" at ")[0] not in self._told_formats:
                self._told_formats.add(told.partition(" at ")[0])
                logger.warning("a schema has a format that is not known and not enforced: %s", told)
        compact = StructuredOutputsParams(json={}, disable_any_whitespace=True)

        def has_other_names(part: dict[str, Any]) -> bool:
            # Where no name is left, the empty object is all that can be written.
            return bool(self._compiled(self._json_grammar(part, compact)).compute_ff_bytes() != b"{}")

        def matches(pattern: str, name: str) -> bool:
            part = {"type": "string", "pattern": pattern, "enum": [name]}
            return not self._compiled(self._json_grammar(part, compact)).is_error()

        return with_closed_objects(enforced, has_other_names, matches)  # type: ignore[no-any-return]

    def _json_grammar(self, schema: Any, params: StructuredOutputsParams) -> str:
        """Return the grammar of an enforced schema."""
        options = self._json_options(params)
        if lark := schema_grammar(schema, options):
            return json.dumps({"grammars": [{"lark_grammar": lark}]})
        text: str = self._llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        return text

    def _error_of(self, schema: dict[str, Any], params: StructuredOutputsParams) -> str:
        """Return what is said of an enforced schema that cannot be compiled; empty if it can."""
        try:
            return _told(self._compiled(self._json_grammar(schema, params)).get_error(), is_from_grammar=False)
        except JpagedError as error:
            return str(error)

    def _json_options(self, params: StructuredOutputsParams) -> dict[str, Any]:
        """Return how JSON is written, and that nothing is loosened, as llguidance names it."""
        options: dict[str, Any] = {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": ESCAPES}
        if params.disable_any_whitespace:
            return options | {"whitespace_flexible": False}
        pattern = params.whitespace_pattern
        return options | {
            "whitespace_pattern": WHITE_SPACE
            if pattern is None
            else check("whitespace_pattern", pattern, portable_regex)
        }

    def _thought(self, thinking: Thinking, separator: str) -> str:
        """Return a Lark grammar of a thought and the answer behind it; empty if the answer comes at once.

        The thought is any text up to its end, then `separator`, an expression, may stand before the answer.
        """
        if thinking is Thinking.NONE:
            return ""
        begin, end, blank = self._mark(BEGIN), self._mark(END), f" (/{separator}/)?" if separator else ""
        if end.startswith("<["):
            thought = f"thought: TEXT {end}\nTEXT: /(?s:.*)/"
        else:  # Several tokens may write the end, so the text itself is searched for it.
            thought = "thought[lazy]: /(?s:.*)" + END.replace("/", r"\/") + "/"
        start = f"thought{blank}" if thinking is Thinking.OPEN else f"({begin} thought{blank})?"
        return f"start: {start} @{ANSWER}\n{thought}"

    def _mark(self, text: str) -> str:
        """Return how a grammar names a mark of thinking: by its id if it is a token apart from text, else as text.

        llguidance decides which tokens are apart: Qwen3's </think> is one for it, though the tokenizer shows it.
        """
        token_id = self._tokenizer.backend.token_to_id(text)
        is_apart = token_id is not None and self._ll_tokenizer.is_special_token(token_id)
        return f"<[{token_id}]>" if is_apart else json.dumps(text)

    def _refusal(self, params: StructuredOutputsParams, message: str) -> JpagedError:
        """Return the error for parameters that llguidance refuses with this message."""
        place = ""
        if params.kind == "json":
            schema = self._enforced(self._schema_of(params), params)
            place = located(schema, lambda part: self._error_of(part, params))
        told = _told(message, is_from_grammar=params.kind == "grammar")
        got = f"one that cannot be enforced{f', at {place}' if place else ''}: {told}"
        return refusal(params.kind, got, "what docs/structured_outputs.md lists")

    @cached_property
    def _llguidance(self) -> Any:
        try:
            import llguidance
        except ImportError:
            way_out = "install it: pip install 'jpaged[structured]'"
            raise refusal(NAME, "a request with them", "none without the package llguidance", way_out) from None
        return llguidance

    @cached_property
    def _executor(self) -> Any:
        return self._llguidance.LLExecutor(NUM_THREADS)

    @property
    def _num_ids(self) -> int:
        """Return the ids that a mask has bits for: those of the tokenizer and of the logits."""
        return max(self._vocab_size, self._tokenizer.vocab_size)

    @property
    def _ll_tokenizer(self) -> LLTokenizer:
        with self._lock:
            return self._made_tokenizer

    @cached_property
    def _made_tokenizer(self) -> LLTokenizer:
        """Return llguidance's tables of the vocabulary, which take up to some seconds to make.

        The package `tokenizers` is asked first. What llguidance cannot read of it, it gets as the bytes of each token.
        """
        make = self._llguidance.LLTokenizer
        options: dict[str, Any] = {"n_vocab": self._num_ids}
        if self._eos_token_ids:
            options["eos_token"] = self._eos_token_ids
        if self._tokenizer.sentence_pieces is None:
            with suppress(Exception):  # llguidance has no class of errors of its own.
                return make(self._tokenizer.to_json(), **options)
        try:
            return make(
                self._llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._num_ids, self._eos_token_ids)),
                **options,
            )
        except Exception as error:
            allowed = f"a tokenizer that llguidance can read ({_told(str(error))})"
            raise refusal(NAME, "a request with them", allowed, "leave them out") from None


class _Vocabulary:
    """A tokenizer as llguidance asks for one: the bytes of each token, and the tokens of text that must come next."""

    def __init__(self, tokenizer: Tokenizer, num_ids: int, eos_token_ids: Sequence[int]):
        # Also those of ids without a token, b"": llguidance counts them here, whatever its n_vocab says.
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_ids)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else tokenizer.eos_token_id or 0
        self.bos_token_id = tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def __call__(self, data: bytes) -> list[int]:
        """Return tokens with the bytes `data`, which stand behind others: llguidance allows the first of them alone.

        They are the tokenizer's own, unless it would change the text (a normalizer does, and it is a part of a
        character at its end). Then the longest token that fits is taken at each place, up to one where none does.
        """
        token_ids = self._tokenizer.encode_behind(data.decode(errors="replace"))
        if b"".join([self.tokens[token_id] for token_id in token_ids]) == data:
            return token_ids
        start, token_ids = 0, []
        while start < len(data):
            ends = range(min(len(data), start + self._max_token_len), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            token_ids.append(self._ids[data[start:end]])
            start = end
        return token_ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Bytes → the last token of them, since the tokens of single bytes come before those of characters."""
        special = set(self.special_token_ids)
        return {data: token_id for token_id, data in enumerate(self.tokens) if data and token_id not in special}

    @cached_property
    def _max_token_len(self) -> int:
        return max(map(len, self._ids), default=0)


def _told(message: str, *, is_from_grammar: bool = True) -> str:
    """Return an error of llguidance in words of its own, without what it quotes of a request.

    Its messages hold expressions and names of a schema, which a caller's error must not repeat. A line and a column are
    told only if the request gave a grammar: else they are those of a grammar that was written for its schema.
    """
    if "regex parse error" in message:
        message = message.rpartition("error:")[2] or message
    line = message.strip().partition("\n")[0]
    place = ""
    if (at := _PLACE.match(line)) is not None:
        place, line = f"line {at[1]}, column {at[2]}: " if is_from_grammar else "", line[at.end() :]
    elif (at := _GBNF_PLACE.search(line)) is not None:
        place, line = f"line {at[1]}: ", line[: at.start()]
    line = re.sub(r"(['\"`/]).*?\1|@\S+", "…", line)
    bare = re.sub(r"\(.*|:\s.*", "…", line).strip()
    told = next((told for part, told in _TOLD.items() if part in line), bare or "it is no grammar")
    return (place + told)[:200]
