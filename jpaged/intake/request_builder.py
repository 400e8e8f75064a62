"""Checks every argument of a new request, and makes the message by which the request is queued."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from ..checks import is_integer, is_number, refusal, sent_as, shown
from ..config.engine_config import EngineConfig
from ..messages import INT32_BYTES, AnswerSpec, NewRequest, Params, ResultForm, Scoring
from ..request import CacheKey, Request
from ..sampling.sampling_params import SamplingParams
from ..step.step_sizes import StepSizes
from ..text.answers.answer_spec import spec_of_tools
from ..text.answers.bound_format import bind_format
from ..text.answers.formats import AnswerFormat
from ..text.parsed_outputs import OutputParser
from ..text.prompt_params import CheckedParams, check_num_samples, tokenizer_for
from ..text.prompts import EncodedPrompt, PromptEncoder, check_priority
from .limit_checks import check_limits


class RequestBuilder:
    """Checks prompts and parameters against one engine's model and sizes, and makes messages of them."""

    def __init__(
        self, config: EngineConfig, encoder: PromptEncoder, sizes: StepSizes, sampling_defaults: Mapping[str, Any]
    ):
        """Start with a count of 0 requests.

        `encoder` checks and encodes prompts for the engine's model, `sizes` are the engine's limits, and
        `sampling_defaults` are the fields of SamplingParams that the model's generation config sets.
        """
        self.config, self.encoder, self.sizes = config, encoder, sizes
        self.sampling_defaults = sampling_defaults
        self.num_requests = 0
        """Requests so far that have got their number from this count."""
        self._count_lock = Lock()

    def default_params(self) -> SamplingParams:
        """Return what the model's generation config recommends, with output up to the end of the context."""
        return SamplingParams(**{"max_tokens": None, **self.sampling_defaults})

    def output_parser(self) -> OutputParser:
        """Return what reads the outputs of this model; raise InvalidRequestError without a tokenizer."""
        tokenizer = tokenizer_for(self.encoder.tokenizer, "output", "an output", "none")
        answer_format = self.encoder.answer_format or bind_format(AnswerFormat(), tokenizer)
        return OutputParser(tokenizer, answer_format, self.encoder.template)

    def take_numbers(self, count: int) -> int:
        """Count so many requests, and return the number of the first of them. Any thread may call."""
        with self._count_lock:
            self.num_requests += count
            return self.num_requests - count

    def build(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        number: Any,
        priority: Any = None,
        arrival_time: Any = None,
        form: ResultForm = ResultForm.ENTRIES,
    ) -> NewRequest:
        """Check the arguments, encode the prompt, and return the request's message; it is not queued.

        `prompt` is a text, token ids or a mapping, and `params` of None are `default_params`. Without a tokenizer there
        is no text, whatever they say of `detokenize`. `number` is part of the seed of a request without one. `priority`
        overrides that of the prompt's mapping. `arrival_time` is in seconds of `time.monotonic()`; None is now. `form`
        is the form of the results. Raise InvalidRequestError if an argument is wrong.
        """
        if not (is_integer(number) and number >= 0):
            raise refusal("number", shown(number), "an integer ≥ 0")
        if isinstance(prompt, Params):
            raise refusal(
                "prompt", type(prompt).__name__, "a prompt", "the arguments are: request id, prompt, parameters"
            )
        arrival_time = _as_arrival_time(arrival_time)
        params = self.default_params() if params is None else params
        if not isinstance(params, Params):
            raise refusal("sampling_params", type(params).__name__, "SamplingParams, BeamSearchParams")
        if self.encoder.tokenizer is None and isinstance(params, SamplingParams) and not params.stop:
            params = replace(params, detokenize=False)  # Nothing can make text of the tokens, and nothing looks for it.
        checked = self.check(params)
        encoded = self.encoder.encode(prompt)
        priority = encoded.priority if priority is None else priority
        encoded = replace(encoded, priority=check_priority(priority, self.config.scheduling_policy))
        return self._message(request_id, encoded, checked, number=number, arrival_time=arrival_time, form=form)

    def check(self, params: Params) -> CheckedParams:
        """Return parameters after a check against the model and the engine's sizes, whatever the prompt is.

        Raise InvalidRequestError for those that are wrong or that this engine does not serve.
        """
        max_num_seqs = self.sizes.max_num_seqs
        return self.encoder.params_checker.check(
            params, max_logprobs=self.config.max_logprobs, max_num_seqs=max_num_seqs
        )

    def build_encoded(
        self, request_id: str, encoded: EncodedPrompt, checked: CheckedParams, *, number: int
    ) -> NewRequest:
        """Return the message of a request whose prompt and parameters were checked before the engine had its sizes.

        Only what depends on the sizes is checked here. `number` is part of the seed of a request without one. Raise
        InvalidRequestError if the prompt is too long for this engine's `max_model_len`, or if the parameters ask for
        more samples than `max_num_seqs`.
        """
        with sent_as({"prompt": encoded.name}):
            self.encoder.check_len(len(encoded.token_ids))
        check_num_samples(checked.params, self.sizes.max_num_seqs)
        return self._message(request_id, encoded, checked, number=number)

    def check_scored(self, context: Sequence[int], continuation: Sequence[int]) -> None:
        """Raise InvalidRequestError for a token outside the vocabulary, and for more tokens than a context has."""
        self.encoder.check_len(len(context) + len(continuation), 0)  # Before a list of any length is copied.
        self.encoder.encode([*context, *continuation], has_answer=False)

    def build_scored(self, context: Sequence[int], scoring: Scoring) -> NewRequest:
        """Return the message of a request that scores continuations of one context, all of which were checked."""
        num_tokens = max(len(packed) // INT32_BYTES for packed in scoring.continuations)
        params = SamplingParams(n=len(scoring.continuations), max_tokens=num_tokens, logprobs=0, detokenize=False)
        encoded = EncodedPrompt(list(context), None)
        return self._message("", encoded, CheckedParams(params), number=0, form=ResultForm.ARRAYS, scoring=scoring)

    def _message(
        self,
        request_id: str,
        encoded: EncodedPrompt,
        checked: CheckedParams,
        *,
        number: int,
        arrival_time: float | None = None,
        form: ResultForm = ResultForm.ENTRIES,
        scoring: Scoring | None = None,
    ) -> NewRequest:
        """Return the message of a request from a checked prompt and checked parameters.

        An `arrival_time` of None is now. A sample may have as many output tokens as the parameters ask for, but not
        more than the context has room for; a `max_tokens` of None asks for all of that room. Token ids are packed as
        int32.
        """
        if scoring is None:
            check_limits(checked, self.config.limits)
        params, token_ids = checked.params, encoded.token_ids
        if encoded.tools is not None and not isinstance(params, SamplingParams):
            raise refusal("tools", "it and a beam search", "one of the two", "leave one out")
        answer = self._answer(encoded, params)
        format = self.encoder.answer_format
        is_chat = encoded.name == "messages"
        opening = encoded.opening if is_chat else None
        grammar = self.encoder.params_checker.grammar_after(token_ids, checked, encoded.tools, opening)
        room = self.sizes.max_model_len - len(token_ids)
        return NewRequest(
            request_id=request_id,
            number=number,
            prompt_token_ids=array("i", token_ids).tobytes(),
            prompt=encoded.text,
            params=params,
            max_tokens=min(room, params.max_tokens or room),
            stop_ids=params.end_ids(self.encoder.eos_token_ids),
            bad_words=checked.bad_words,
            mark_ids=frozenset() if answer is None or format is None else format.mark_ids,
            answer=answer,
            grammar=grammar.text,
            unenforced=grammar.unenforced,
            cache_salt=encoded.cache_salt,
            priority=encoded.priority,
            arrival_time=time.monotonic() if arrival_time is None else arrival_time,
            form=form,
            scoring=scoring,
            tempers_scores=self.config.logprobs_mode == "tempered_logprobs",
            sent_names={} if encoded.name == "prompt" else {"prompt": encoded.name},
        )

    def _answer(self, encoded: EncodedPrompt, params: Params) -> AnswerSpec | None:
        """Return how the answer to a chat is told apart; None for other prompts, for text alone, and for beams."""
        is_chat = encoded.name == "messages" and isinstance(params, SamplingParams) and params.detokenize
        if not is_chat or self.encoder.answer_format is None:
            return None
        assert isinstance(params, SamplingParams)
        return spec_of_tools(encoded.tools, opening=encoded.opening, skip_special_tokens=params.skip_special_tokens)

    def prefix(self, prompt: Any, cache_salt: str | None) -> tuple[list[int], CacheKey]:
        """Return the token ids and the cache key of a prompt to pin.

        The cache key holds the salt: only requests with the same salt find the pages. `cache_salt` overrides the salt
        of the prompt's mapping, and None leaves that. Raise InvalidRequestError if prefix caching is off, the prompt is
        invalid, or it has fewer tokens than a page.
        """
        if not self.config.enable_prefix_caching:
            got = "a prompt to pin while enable_prefix_caching is off"
            raise refusal("prompt", got, "none", "start the engine with it on")
        if cache_salt is not None:
            if not isinstance(prompt, Mapping):  # A salt needs the form of a mapping.
                prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
            prompt = {**prompt, "cache_salt": cache_salt}
        encoded = self.encoder.encode(prompt)
        num_tokens, page_len = len(encoded.token_ids), self.sizes.block_size
        if num_tokens < page_len:
            raise refusal("prompt", f"{num_tokens} tokens to pin", f"at least {page_len}, a full page")
        return encoded.token_ids, CacheKey(cache_salt=encoded.cache_salt)


def check_new_id(request_id: Any, used: Mapping[str, Request]) -> None:
    """Raise InvalidRequestError for an id that is no string, empty, or among the `used` ones."""
    if not isinstance(request_id, str) or not request_id:
        raise refusal("request_id", shown(request_id), "a non-empty string")
    if request_id in used:
        raise refusal("request_id", f"{shown(request_id)}, which is in use", "an id that no unfinished request has")


def _as_arrival_time(arrival_time: Any) -> float | None:
    """Return an arrival time, in seconds of `time.monotonic()`, as a float; None, which means now, stays None.

    Raise InvalidRequestError for a time in the future and for a value that is no finite number: NaN, for example, is
    not at most now.
    """
    if arrival_time is None:
        return None
    now = time.monotonic()
    if not (is_number(arrival_time) and -math.inf < arrival_time <= now):
        allowed = f"seconds of time.monotonic(), at most now, {now:.3f}"
        raise refusal("arrival_time", shown(arrival_time), allowed, "leave it out to take the present")
    return float(arrival_time)
