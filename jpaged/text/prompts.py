"""Turns what a caller calls a prompt into checked token ids.

The host is the only guard: JAX clamps a bad id silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import INT64
from .errors import InvalidRequestError
from .rule_book import MAX_BAD_TOKENS, RuleBook
from .sampling_params import BeamSearchParams, SamplingParams, is_integer, shown
from .tokenizer import Tokenizer

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
PROMPT_EXTRAS = ("cache_salt", "priority")
"""What may stand beside a prompt."""
NOT_BUILT = ("multi_modal_data", "lora_request")
"""Keys of the full interface that this version refuses by name."""
MAX_SALT_CHARS = 256
MAX_CHARS_PER_TOKEN = 64
"""A text longer than this times the context is refused before anybody spends time on tokenizing it."""


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids, the text they came from if there was one, and what stood beside the prompt."""

    token_ids: list[int]
    text: str | None
    cache_salt: str | None = None
    """Prefixes are shared among prompts of the same salt only."""
    priority: int = 0
    """The lower, the sooner."""


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes and checks prompts for one model."""

    tokenizer: Tokenizer
    rule_book: RuleBook
    max_model_len: int
    chat_template: str | None = None
    max_waiting_tokens: int | None = None
    """The limit `waiting_tokens`: a longer prompt could never be queued."""
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def vocab_size(self) -> int:
        """Rows of the output head: ids at or above it would read another token's row."""
        return self.rule_book.vocab_size

    def encode(self, prompt: Any) -> EncodedPrompt:
        """Ids of a text, of a list or array of ids, or of {"prompt"}, {"prompt_token_ids"} or {"messages"}.

        A mapping may hold `cache_salt` and `priority` too; whether the engine's policy takes the latter is for
        `check_priority`. Raises InvalidRequestError, naming the field, for anything else, for an id outside the
        vocabulary, for an empty prompt and for one that leaves no room for an answer.
        """
        extras: dict[str, Any] = {}
        if isinstance(prompt, Mapping):
            extras = _extras(prompt)
            prompt = self._chosen(prompt)
            if isinstance(prompt, _Messages):
                text = self.tokenizer.render_chat(prompt.messages, template=self.chat_template)
                return EncodedPrompt(self._tokenize(text, add_special_tokens=False), text, **extras)
        if isinstance(prompt, str):
            return EncodedPrompt(self._tokenize(prompt, add_special_tokens=True), prompt, **extras)
        return EncodedPrompt(self._ids(prompt), None, **extras)

    def check_params(
        self, params: SamplingParams | BeamSearchParams, *, max_logprobs: int, max_num_seqs: int | None
    ) -> None:
        """Hold parameters against this model and the engine's caps; `max_num_seqs` None has not been chosen yet."""
        if isinstance(params, BeamSearchParams):
            self._check_beams(params, max_logprobs=max_logprobs, max_num_seqs=max_num_seqs)
            return
        if max_num_seqs is not None and params.n > max_num_seqs:
            raise InvalidRequestError(
                f"n: got {params.n}, allowed: at most max_num_seqs, {max_num_seqs}, for all samples of a prompt run "
                "together; lower n or raise max_num_seqs",
                param="n",
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                self._check_id(token_id, name)
        for name in ("logprobs", "prompt_logprobs"):
            self._check_logprobs(name, getattr(params, name), max_logprobs)
        self.rule_book.check(params)
        self._check_something_may_come(params)
        self.bad_words(params)

    def _check_something_may_come(self, params: SamplingParams) -> None:
        """Where nothing may end the output yet, a token must be allowed that ends nothing."""
        ends = self.eos_token_ids.union(params.stop_token_ids or ())
        if params.min_tokens and params.allowed_token_ids is not None and ends.issuperset(params.allowed_token_ids):
            raise InvalidRequestError(
                f"allowed_token_ids: got {shown(list(params.allowed_token_ids))}, which end the output, while "
                f"min_tokens is {params.min_tokens}, allowed: some that do not; add one or leave min_tokens out",
                param="allowed_token_ids",
            )

    def _check_beams(self, params: BeamSearchParams, *, max_logprobs: int, max_num_seqs: int | None) -> None:
        """As many beams run together, and there are logprobs for them."""
        if max_num_seqs is not None and params.beam_width > max_num_seqs:
            raise InvalidRequestError(
                f"beam_width: got {params.beam_width}, allowed: at most max_num_seqs, {max_num_seqs}, for all beams "
                "of a search run together; lower it or raise max_num_seqs",
                param="beam_width",
            )
        wanted = params.num_of_beam(len(params.end_ids(self.eos_token_ids)))
        if wanted > self.vocab_size:
            raise InvalidRequestError(
                f"beam_width: got {params.beam_width}, which chooses from {wanted} tokens, allowed: so many that "
                f"these are at most the vocabulary, {self.vocab_size}; lower it",
                param="beam_width",
            )
        if 0 <= max_logprobs < wanted:
            raise InvalidRequestError(
                f"beam_width: got {params.beam_width}, which takes the logprobs of {wanted} tokens, allowed: at most "
                f"max_logprobs, {max_logprobs}, of them; lower it or start the engine with a higher max_logprobs",
                param="beam_width",
            )

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of what may not come out: of each bad word as it is, and of the same behind a space.

        InvalidRequestError if they are too many.
        """
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words or ():
            bare = word.lstrip()
            try:
                both = [tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")]
            except InvalidRequestError as error:
                raise InvalidRequestError(f"bad_words: {shown(word)}: {error}", param="bad_words") from error
            if not both[0]:
                raise InvalidRequestError(
                    f"bad_words: got {shown(word)}, which the tokenizer makes nothing of, allowed: words that it has "
                    "tokens for; leave it out",
                    param="bad_words",
                )
            words |= dict.fromkeys(both)
        for token_id in {token_id for word in words for token_id in word}:
            self._check_id(token_id, "bad_words")
        if (num_tokens := sum(len(word) for word in words)) > MAX_BAD_TOKENS:
            raise InvalidRequestError(
                f"bad_words: got {num_tokens} tokens, counted with and without a space before each word, allowed: at "
                f"most {MAX_BAD_TOKENS}; give fewer or shorter words",
                param="bad_words",
            )
        return tuple(word for word in words if word)

    def _check_logprobs(self, name: str, wanted: int | None, max_logprobs: int) -> None:
        if wanted is None or (max_logprobs < 0 and wanted <= self.vocab_size):
            return
        most = self.vocab_size if max_logprobs < 0 else min(max_logprobs, self.vocab_size)
        if wanted < 0:
            raise InvalidRequestError(
                f"{name}: got -1, allowed: at most max_logprobs, {most}; start the engine with max_logprobs=-1 to get "
                "all",
                param=name,
            )
        if wanted > most:
            limit = "max_logprobs" if most == max_logprobs else "the size of the vocabulary"
            way_out = "; ask for fewer, or start the engine with a higher max_logprobs" if most == max_logprobs else ""
            raise InvalidRequestError(
                f"{name}: got {shown(wanted)}, allowed: at most {limit}, {most}{way_out}", param=name
            )

    def _chosen(self, prompt: Mapping[str, Any]) -> Any:
        for key in prompt:
            if key in NOT_BUILT:
                raise InvalidRequestError(f"{key}: not available in this version; leave it out", param=str(key))
            if key not in PROMPT_KEYS and key not in PROMPT_EXTRAS:
                near = difflib.get_close_matches(str(key), [*PROMPT_KEYS, *PROMPT_EXTRAS], n=1)
                wanted = f"one of {', '.join(PROMPT_KEYS)}, and any of {', '.join(PROMPT_EXTRAS)}"
                hint = f"did you mean {near[0]}?" if near else f"a prompt holds {wanted}"
                raise InvalidRequestError(f"{str(key)[:100]}: unknown key of a prompt; {hint}", param=str(key)[:100])
        keys = [key for key in PROMPT_KEYS if key in prompt]
        if len(keys) != 1:
            raise InvalidRequestError(
                f"prompt: got {' and '.join(keys) or 'no key'}, allowed: exactly one of {', '.join(PROMPT_KEYS)}",
                param="prompt",
            )
        value = prompt[keys[0]]
        if keys[0] == "messages":
            return _Messages(value)
        if isinstance(value, str) is not (keys[0] == "prompt"):
            wanted = "a string" if keys[0] == "prompt" else "a list of token ids"
            raise InvalidRequestError(f"{keys[0]}: got {shown(value)}, allowed: {wanted}", param=keys[0])
        return value

    def _tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        most = self.max_model_len * MAX_CHARS_PER_TOKEN
        if len(text) > most:
            raise InvalidRequestError(
                f"prompt: got {len(text)} characters, the maximum context length is {self.max_model_len} tokens, for "
                f"which at most {most} characters are taken; shorten the prompt",
                param="prompt",
            )
        token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self._check_len(len(token_ids))
        self._check_id(max(token_ids), "prompt")
        return token_ids

    def _ids(self, prompt: Any) -> list[int]:
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(ids, list | tuple):
            raise InvalidRequestError(
                f"prompt: got {shown(prompt)}, allowed: a string, a list of token ids, or a mapping with one of "
                f"{', '.join(PROMPT_KEYS)}",
                param="prompt",
            )
        self._check_len(len(ids))
        # As a whole: one by one, the ids of a long prompt would take as long as a step.
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:
            return list(ids)
        for token_id in ids:
            self._check_id(token_id, "prompt")
        return [int(token_id) for token_id in ids]

    def _check_id(self, token_id: Any, param: str) -> None:
        if not is_integer(token_id):
            raise InvalidRequestError(
                f"{param}: got {shown(token_id)} among the token ids, allowed: integers", param=param
            )
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                f"{param}: token id {shown(token_id)} is out of vocabulary, allowed: 0 to {self.vocab_size - 1}",
                param=param,
            )

    def _check_len(self, num_tokens: int) -> None:
        if not num_tokens:
            raise InvalidRequestError(
                "prompt: got no token, the prompt cannot be empty; give some text", param="prompt"
            )
        if num_tokens >= self.max_model_len:
            raise InvalidRequestError(
                f"prompt: the maximum context length is {self.max_model_len} tokens, your prompt has {num_tokens} and "
                "an answer needs at least one; shorten the prompt or raise max_model_len",
                param="prompt",
            )
        if self.max_waiting_tokens is not None and num_tokens > self.max_waiting_tokens:
            raise InvalidRequestError(
                f"prompt: got {num_tokens} tokens, allowed: at most waiting_tokens among the limits, "
                f"{self.max_waiting_tokens}; shorten the prompt or raise the limit",
                param="prompt",
            )


def check_priority(priority: Any, scheduling_policy: object) -> int:
    """A request's priority as a plain integer; InvalidRequestError if it is none, or nothing would come of it."""
    if not is_integer(priority) or not INT64[0] <= priority <= INT64[1]:
        raise InvalidRequestError(
            f"priority: got {shown(priority)}, allowed: an integer in [{INT64[0]}, {INT64[1]}]", param="priority"
        )
    if priority and scheduling_policy == "fcfs":
        raise InvalidRequestError(
            f"priority: got {priority} under scheduling_policy fcfs, allowed: 0; start the engine with "
            "scheduling_policy=priority",
            param="priority",
        )
    return int(priority)


def _extras(prompt: Mapping[str, Any]) -> dict[str, Any]:
    extras = {key: prompt[key] for key in PROMPT_EXTRAS if key in prompt}
    if "priority" in extras:
        extras["priority"] = check_priority(extras["priority"], None)
    salt = extras.get("cache_salt", "-")
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_CHARS or not salt.isprintable():
        raise InvalidRequestError(
            f"cache_salt: got {shown(salt)}, allowed: a string of 1 to {MAX_SALT_CHARS} printable characters; "
            "change it or leave it out",
            param="cache_salt",
        )
    return extras


@dataclass(frozen=True)
class _Messages:
    messages: Any
