"""Checks the parameters of requests against one model: its vocabulary, its tokenizer and the engine's limits.

What parameters say by themselves was checked when they were made. Knows no prompts but the token ids that stand before
an output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..checks import fields_of, is_integer, refusal, sent_as, told
from ..messages import Params
from ..sampling.logit_rules_spec import MAX_BAD_TOKENS, LogitRulesSpec
from ..sampling.sampling_params import BeamSearchParams, SamplingParams
from ..structured_outputs import StructuredOutputsParams
from .answers.bound_format import BoundFormat
from .chat.thinking import BEGIN, END, Thinking, may_think, thinking_after, thinking_in
from .chat.tools import ToolSet
from .grammar.call_rules import CallRules
from .grammar.grammar import Grammars
from .tokenizing.tokenizer import Tokenizer


@dataclass(frozen=True)
class CheckedParams:
    """Parameters that were checked against a model, and what was made of them with its tokenizer."""

    params: Params
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The tokens of each bad word, without and with a space before it."""
    grammar: str = ""
    """The grammar of `structured_outputs` where nothing stands before the answer; empty without them."""


@dataclass(frozen=True)
class OutputGrammar:
    """The grammar of a request's output, and what it does not enforce."""

    text: str = ""
    """Empty if the output is free."""
    unenforced: tuple[str, ...] = ()
    """A sentence for each reason why the schemas or grammars of some tools are not enforced."""


@dataclass(frozen=True)
class ParamsChecker:
    """Checks parameters for one model, and makes of them what only its tokenizer can."""

    tokenizer: Tokenizer | None
    """None for an engine without one: its requests want no text."""
    rules_spec: LogitRulesSpec
    chat_template: str | None = None
    """A Jinja template that replaces the model's own."""
    eos_token_ids: frozenset[int] = frozenset()
    grammars: Grammars | None = None
    """Compiles what `structured_outputs` ask for; None for an engine without a tokenizer."""
    answer_format: BoundFormat | None = None
    """How the model marks thoughts and calls; None if that is not known."""

    @property
    def vocab_size(self) -> int:
        """Return the rows of the output head."""
        return self.rules_spec.vocab_size

    @property
    def may_think(self) -> bool:
        """Return whether the model may write a thought: its format has one, or its template or tokenizer the mark."""
        if self.tokenizer is None:
            return False
        has_format = self.answer_format is not None and self.answer_format.format.thought is not None
        return has_format or may_think(self.tokenizer, self.chat_template or self.tokenizer.chat_template or "")

    def check(self, params: Params, *, max_logprobs: int, max_num_seqs: int | None) -> CheckedParams:
        """Check parameters against this model and the engine's limits; return them with the tokens of their bad words.

        `max_logprobs` is the engine's option, −1 for no limit. `max_num_seqs` bounds the samples; None if it is not
        chosen yet. Checked are the number of samples, token ids, numbers of logprobs, whether there is a tokenizer for
        text, the logit rules, and the structure of the output; of a beam search only its width. Raise
        InvalidRequestError, which names the field.
        """
        if max_num_seqs is not None:
            check_num_samples(params, max_num_seqs)
        if isinstance(params, BeamSearchParams):
            self._check_beams(params, max_logprobs)
            return CheckedParams(params)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                check_token_id(token_id, name, self.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name), max_logprobs)
        if params.detokenize:
            tokenizer_for(self.tokenizer, "detokenize", "true", "false")
        self.rules_spec.check(params)
        # Before `min_tokens`, all tokens that end the output are forbidden: some other token must be allowed.
        ends = self.eos_token_ids.union(params.stop_token_ids or ())
        if params.min_tokens and params.allowed_token_ids is not None and ends.issuperset(params.allowed_token_ids):
            got = f"{told(list(params.allowed_token_ids))}, which all end the output"
            allowed = f"some that do not while min_tokens is {params.min_tokens}"
            raise refusal("allowed_token_ids", got, allowed, "add one or leave min_tokens out")
        if params.thinking_token_budget is not None:
            self._check_thoughts(params.thinking_token_budget)
        grammar = ""
        if (wanted := params.structured_outputs) is not None:
            assert isinstance(wanted, StructuredOutputsParams)
            grammars = self._grammars_for("structured_outputs")
            with fields_of("structured_outputs"):
                grammar = grammars.grammar_of(wanted)
        return CheckedParams(params, self._bad_words(params), grammar)

    def grammar_after(
        self, token_ids: list[int], checked: CheckedParams, tools: ToolSet | None = None, opening: str | None = None
    ) -> OutputGrammar:
        """Return the grammar of the output after a prompt, ready for a request.

        `opening` is the text by which a chat's prompt has opened the answer, None for another prompt, and `tools` are
        those of the chat. The output begins with a thought where the model may think before it answers. Raise
        InvalidRequestError for tools whose calls have to be enforced and cannot.
        """
        params, format = checked.params, self.answer_format
        if not isinstance(params, SamplingParams):
            if tools is not None and tools.choice.kind != "none":
                raise refusal("tools", "tools with a beam search", "tools with samples", "leave one of them out")
            return OutputGrammar()
        wanted, budget = params.structured_outputs, params.thinking_token_budget
        assert wanted is None or isinstance(wanted, StructuredOutputsParams)
        rules = None if format is None else CallRules(tools, format, wanted, thought_budget=budget)
        needs_calls = rules is not None and opening is not None and rules.needs_grammar
        if wanted is None and budget is None and not needs_calls:
            return OutputGrammar()
        name = "tools" if needs_calls else "thinking_token_budget" if wanted is None else "structured_outputs"
        grammars = self._grammars_for(name)
        thinking = self._thinking(token_ids, opening)
        with sent_as({"structured_outputs": name}):
            if rules is not None and needs_calls:
                return OutputGrammar(*grammars.grammar_of_calls(replace(rules, thinking=thinking)))
            if wanted is None:
                assert budget is not None
                return OutputGrammar(grammars.thoughts_within(budget, thinking, format))
        if thinking is Thinking.NONE:
            return OutputGrammar(checked.grammar)
        with fields_of("structured_outputs"):
            return OutputGrammar(grammars.grammar_of(wanted, thinking, budget, format))

    def _thinking(self, token_ids: list[int], opening: str | None) -> Thinking:
        """Return what may stand before the answer to a prompt; `opening` is that of a chat."""
        format, tokenizer = self.answer_format, self.tokenizer
        assert tokenizer is not None
        if opening is not None and format is not None and format.format.thought is not None:
            marks = format.thought_marks
            if marks != (BEGIN, END):
                return thinking_in(opening, *marks)
        # The tokens of a long prompt would take milliseconds to decode; a chat's end is known as text.
        end = opening or tokenizer.decode(token_ids, skip_special_tokens=False)
        return thinking_after(tokenizer, end, self.chat_template)

    def _grammars_for(self, name: str) -> Grammars:
        """Return what compiles grammars; without a tokenizer there is none, and the field `name` is refused."""
        if self.grammars is None:
            allowed = "none, since the engine has no tokenizer"
            way_out = "start the engine with one: its files beside config.json, or --tokenizer DIR"
            raise refusal(name, "a request with them", allowed, way_out)
        return self.grammars

    def _check_thoughts(self, budget: int) -> None:
        """Refuse a budget of thoughts for a model that writes none."""
        tokenizer_for(self.tokenizer, "thinking_token_budget", str(budget), "none")
        if not self.may_think:
            raise refusal("thinking_token_budget", budget, "none, since the model writes no thoughts", "leave it out")

    def _check_beams(self, params: BeamSearchParams, max_logprobs: int) -> None:
        """Raise InvalidRequestError if a beam search needs the logprobs of more tokens per beam than the engine gives.

        A search needs those of its width plus the number of its end tokens. The engine gives at most those of the whole
        vocabulary, and at most `max_logprobs`, its option, unless that is negative.
        """
        # In the worst case, the end tokens are the likeliest of a beam; `beam_width` others must be left to go on.
        needed = params.num_top_tokens(len(params.end_ids(self.eos_token_ids)))
        got = f"{params.beam_width}, which needs the logprobs of {needed} tokens"
        if needed > self.vocab_size:
            allowed = f"as many as need at most the vocabulary, {self.vocab_size}"
            raise refusal("beam_width", got, allowed, "lower it")
        if 0 <= max_logprobs < needed:
            way_out = "lower it or start the engine with a higher max_logprobs"
            raise refusal("beam_width", got, f"as many as need at most max_logprobs, {max_logprobs}", way_out)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each bad word, once without and once with a space before it, each sequence once.

        A word within a text has a space before it, and other tokens than at the start: "never" gives the tokens of
        "never" and of " never". Spaces that the word begins with are dropped first. Raise InvalidRequestError for a
        word without tokens or with a token outside the vocabulary, and for more than MAX_BAD_TOKENS tokens in all.
        """
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            bare, tokenizer = word.lstrip(), tokenizer_for(self.tokenizer, "bad_words", told(params.bad_words), "none")
            with sent_as({"prompt": "bad_words"}):
                both = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")]
            if not both[0]:
                got = f"{told(word)}, for which the tokenizer has no tokens"
                raise refusal("bad_words", got, "words that it has tokens for", "leave it out")
            words |= dict.fromkeys(both)  # A dict keeps the order and drops repeated sequences.
        for token_id in {token_id for word in words for token_id in word}:
            check_token_id(token_id, "bad_words", self.vocab_size)
        if (num_tokens := sum(len(word) for word in words)) > MAX_BAD_TOKENS:
            got = f"{num_tokens} tokens, counted with and without a space before each word"
            raise refusal("bad_words", got, f"at most {MAX_BAD_TOKENS}", "give fewer or shorter words")
        return tuple(word for word in words if word)

    def _check_logprobs(self, name: str, wanted: int | None, max_logprobs: int) -> None:
        """Raise InvalidRequestError if a request wants more logprobs per token than the engine gives.

        `name` is the parameter and `wanted` its value: None asks for none, −1 for all of the vocabulary. `max_logprobs`
        is the engine's option, where a negative value allows all of the vocabulary. The message names the smaller of
        the two limits, this option or the size of the vocabulary.
        """
        if wanted is None or (max_logprobs < 0 and wanted <= self.vocab_size):  # −1 passes here too.
            return
        limit = self.vocab_size if max_logprobs < 0 else min(max_logprobs, self.vocab_size)
        if wanted < 0:  # All of the vocabulary, under an engine with a limit.
            way_out = "start the engine with max_logprobs=-1 to get all"
            raise refusal(name, told(wanted), f"at most max_logprobs, {max_logprobs}", way_out)
        if wanted > limit == max_logprobs:
            way_out = "ask for fewer, or start the engine with a higher max_logprobs"
            raise refusal(name, told(wanted), f"at most max_logprobs, {limit}", way_out)
        if wanted > limit:
            raise refusal(name, told(wanted), f"at most the size of the vocabulary, {limit}")


def check_num_samples(params: Params, max_num_seqs: int) -> None:
    """Refuse more samples or beams of a prompt than an engine computes together."""
    name = "n" if isinstance(params, SamplingParams) else "beam_width"
    if params.n > max_num_seqs:
        allowed = f"at most max_num_seqs, {max_num_seqs}, since all samples or beams of a prompt run together"
        raise refusal(name, params.n, allowed, "lower it or raise max_num_seqs")


def check_token_id(token_id: Any, name: str, vocab_size: int) -> None:
    """Refuse an id among those of the field `name` that is no integer, or that the vocabulary does not have."""
    if not is_integer(token_id):
        raise refusal(name, f"{told(token_id)} among the token ids", "integers")
    if not 0 <= token_id < vocab_size:
        raise refusal(name, f"token id {told(token_id)}, out of vocabulary", f"0 to {vocab_size - 1}")


def tokenizer_for(tokenizer: Tokenizer | None, name: str, got: str, allowed: str = "token ids") -> Tokenizer:
    """Return the tokenizer; if there is none, refuse `got` of the field `name`, which needs one."""
    if tokenizer is None:
        way_out = "start the engine with one: its files beside config.json, or --tokenizer DIR"
        raise refusal(name, got, f"{allowed}, since the engine has no tokenizer", f"give that, or {way_out}")
    return tokenizer
