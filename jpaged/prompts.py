"""Turns what a caller calls a prompt into checked token ids.

The host is the only guard: JAX clamps a bad id silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequestError
from .sampling_params import SamplingParams, is_integer, shown
from .tokenizer import Tokenizer

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
NOT_BUILT = ("multi_modal_data", "cache_salt", "priority", "lora_request")
"""Keys of the full interface that this version refuses by name."""
MAX_CHARS_PER_TOKEN = 64
"""A text longer than this times the context is refused before anybody spends time on tokenizing it."""


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids, and the text they came from if there was one."""

    token_ids: list[int]
    text: str | None


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes and checks prompts for one model."""

    tokenizer: Tokenizer
    vocab_size: int
    """Rows of the output head: ids at or above it would read another token's row."""
    max_model_len: int
    chat_template: str | None = None

    def encode(self, prompt: Any) -> EncodedPrompt:
        """Ids of a text, of a list or array of ids, or of {"prompt"}, {"prompt_token_ids"} or {"messages"}.

        Raises InvalidRequestError, naming the field, for anything else, for an id outside the vocabulary, for
        an empty prompt and for one that leaves no room for an answer.
        """
        if isinstance(prompt, Mapping):
            prompt = self._chosen(prompt)
            if isinstance(prompt, _Messages):
                text = self.tokenizer.render_chat(prompt.messages, template=self.chat_template)
                return EncodedPrompt(self._tokenize(text, add_special_tokens=False), text)
        if isinstance(prompt, str):
            return EncodedPrompt(self._tokenize(prompt, add_special_tokens=True), prompt)
        return EncodedPrompt(self._ids(prompt), None)

    def check_params(self, params: SamplingParams, *, max_logprobs: int) -> None:
        """Hold parameters against this model: token ids in every field, and the engine's cap on logprobs."""
        for token_id in params.stop_token_ids or ():
            self._check_id(token_id, "stop_token_ids")
        most = min(max_logprobs, self.vocab_size)
        if params.logprobs is not None and params.logprobs > most:
            limit = "max_logprobs" if max_logprobs <= self.vocab_size else "the size of the vocabulary"
            raise InvalidRequestError(
                f"logprobs: got {shown(params.logprobs)}, allowed: at most {limit}, {most}", param="logprobs"
            )

    def _chosen(self, prompt: Mapping[str, Any]) -> Any:
        for key in prompt:
            if key in NOT_BUILT:
                raise InvalidRequestError(f"{key}: not available in this version; leave it out", param=str(key))
            if key not in PROMPT_KEYS:
                near = difflib.get_close_matches(str(key), PROMPT_KEYS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"a prompt holds one of {', '.join(PROMPT_KEYS)}"
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
        # Whole-list checks first: one by one, the ids of a long prompt would take as long as a step.
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= self.vocab_size:
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


@dataclass(frozen=True)
class _Messages:
    messages: Any
