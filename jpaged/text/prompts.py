"""Turns what a caller gives as a prompt into checked token ids.

Only these checks keep out ids that are not in the vocabulary: JAX would clamp them silently.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict

from .. import not_available
from ..checks import (
    INT64,
    Rule,
    Unfit,
    boolean,
    check,
    check_name,
    integer,
    refusal,
    scalar,
    sent_as,
    shown_name,
    told,
)
from ..errors import ContextLengthError, InvalidRequestError
from ..limits import DEFAULT_LIMITS
from ..sampling.logit_rules_spec import LogitRulesSpec
from .answers.bound_format import BoundFormat
from .answers.format_names import find_format
from .chat.chat_messages import normalize_messages
from .chat.chat_template import has_exceeded_limits, readable_arguments, render_chat
from .chat.tools import ToolSet, tools_of
from .grammar.grammar import Grammars
from .prompt_params import ParamsChecker, check_token_id, tokenizer_for
from .tokenizing.tokenizer import Tokenizer

logger = logging.getLogger("jpaged")

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
"""Keys of a prompt's mapping, of which it has exactly one."""
PROMPT_EXTRAS = ("cache_salt", "priority")
CHAT_OPTIONS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")
TEXT_OPTIONS = ("add_special_tokens", "truncate_prompt_tokens")
PROMPT_OPTIONS = (*PROMPT_EXTRAS, *TEXT_OPTIONS, *CHAT_OPTIONS, *TOOL_OPTIONS)
"""Keys that may stand beside it: those of `PromptOptions` too, of which some belong to messages alone."""
MAX_SALT_CHARS = 256


class ChatOptions(TypedDict, total=False):
    """What may stand beside the messages of a chat, as keyword arguments; `PromptOptions` says what they mean."""

    tools: Sequence[Mapping[str, Any]] | None
    """OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}, or of the type custom."""
    tool_choice: str | Mapping[str, Any] | None
    """"auto" (the default), "none", "required", or one of OpenAI's objects with the tools that may be called."""
    parallel_tool_calls: bool | None
    """Whether an answer may call several tools; true by default."""
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


END_MARK = "[the answer goes on here]"
"""What a chat is rendered with behind the message that the output continues."""
MAX_OPENING_CHARS = 64
"""Templates open an answer by a role and at most an empty thought."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt's token ids, its text if it was given as one, and what stood beside it."""

    token_ids: list[int]
    text: str | None
    cache_salt: str | None = None
    """Only prompts of the same salt share cached prefixes."""
    priority: int = 0
    """Lower values are scheduled sooner."""
    name: str = "prompt"
    """What errors call it: "messages" if it was given as a chat."""
    tools: ToolSet | None = None
    """The tools that a chat offers to the model."""
    opening: str = ""
    """The end of a chat behind its last message, by which it has opened the answer; with that message if the answer
    continues it."""


@dataclass(frozen=True)
class PromptOptions:
    """How a prompt becomes token ids, as keys beside it in its mapping say."""

    add_special_tokens: bool | None = None
    """Whether the tokenizer adds tokens such as BOS; None: to a plain text, and not to a chat."""
    truncate_prompt_tokens: int | None = None
    """Keep so many of the last tokens; −1: as many as the context has room for; None: all."""
    add_generation_prompt: bool | None = None
    """Whether a chat ends where an answer begins; None: unless its last message is continued."""
    continue_final_message: bool = False
    """Whether the output continues the last message of a chat."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template; those that it does not read are left out, and the log is told."""
    tools: ToolSet | None = None
    """The tools that a chat offers, by `tools`, `tool_choice` and `parallel_tool_calls`."""

    @classmethod
    def of(
        cls, prompt: Mapping[str, Any], key: str, *, limits: Mapping[str, int | None] = DEFAULT_LIMITS
    ) -> PromptOptions:
        """Return the options in the mapping of a prompt whose form is `key`, checked.

        An option that is None counts as left out. `limits` are the engine's, for tools. Raise InvalidRequestError for a
        value of the wrong type, for an option of chats beside another form, and for two options that exclude each
        other.
        """
        names = (*TEXT_OPTIONS, *CHAT_OPTIONS, *TOOL_OPTIONS)
        given = {name: prompt[name] for name in names if prompt.get(name) is not None}
        for name, value in given.items():
            if name not in TEXT_OPTIONS and key != "messages":
                raise refusal(name, told(value), "nothing beside a prompt that is no chat", "leave it out")
            if name not in TOOL_OPTIONS:
                given[name] = check(name, value, _OPTION_RULES[name])
        tools = tools_of(*(given.pop(name, None) for name in TOOL_OPTIONS), limits=limits)
        options = cls(**given, tools=tools)
        if options.continue_final_message and options.add_generation_prompt:
            way_out = "give one of them"
            raise refusal("continue_final_message", "it and add_generation_prompt", "one of the two", way_out)
        return options


def template_kwargs(value: Any) -> dict[str, Any]:
    """Take an object of variables of a chat template, as a dict of its own."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise Unfit("an object of the chat template's variables")
    return dict(value)


_OPTION_RULES: dict[str, Rule] = {
    "add_special_tokens": boolean,
    "truncate_prompt_tokens": integer(-1, INT64[1]),
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
    "chat_template_kwargs": template_kwargs,
}


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes and checks prompts for one model."""

    tokenizer: Tokenizer | None
    """None for an engine without one: its requests have token ids and want no text."""
    rules_spec: LogitRulesSpec
    max_model_len: int
    """Longest sequence in tokens, prompt and output."""
    chat_template: str | None = None
    """A Jinja template that replaces the model's own."""
    limits: Mapping[str, int | None] = field(default_factory=lambda: DEFAULT_LIMITS)
    """The engine's limits."""
    eos_token_ids: frozenset[int] = frozenset()
    grammars: Grammars | None = None
    """Compiles what `structured_outputs` ask for; None for an engine without a tokenizer."""
    tool_call_parser: str | None = None
    """The name of the format of tool calls; None: the one that the template has."""
    reasoning_parser: str | None = None
    """The name of the format of thoughts; None: the one that the template has."""
    is_counting: bool = False
    """Whether prompts are only counted, so that they may have more tokens than the context, but no more characters."""
    _bos_warning: threading.Lock = field(default_factory=threading.Lock, init=False, compare=False, repr=False)
    """Acquired by the first prompt with two BOS tokens, which is the only one that is warned of."""
    _unread_arguments: set[str] = field(default_factory=set, init=False, compare=False, repr=False)
    """Variables that the chat template does not read, of which the log has been told."""

    @property
    def vocab_size(self) -> int:
        """Return the rows of the output head; an id at or above it would read another token's row."""
        return self.rules_spec.vocab_size

    @cached_property
    def params_checker(self) -> ParamsChecker:
        """Return what checks the parameters of requests for the same model."""
        return ParamsChecker(
            self.tokenizer,
            self.rules_spec,
            self.chat_template,
            self.eos_token_ids,
            self.grammars,
            self.answer_format,
        )

    @property
    def template(self) -> str:
        """Return the template that renders chats: the one that replaces the model's, or the model's; "" without any."""
        own = None if self.tokenizer is None else self.tokenizer.chat_template
        return self.chat_template or own or ""

    @cached_property
    def answer_format(self) -> BoundFormat | None:
        """Return how the model marks thoughts and calls; None if it has neither, or there is no tokenizer."""
        if self.tokenizer is None:
            return None
        template = self.template + ("" if self.chat_template else self.tokenizer.tool_template or "")
        return find_format(template, self.tokenizer, self.tool_call_parser, self.reasoning_parser)

    def encode(self, prompt: Any, *, has_answer: bool = True) -> EncodedPrompt:
        """Return the checked token ids of a prompt, its text if it was given as one, and its extras.

        A prompt is a text, a list or an array of token ids, or a mapping with one of `prompt`, `prompt_token_ids` and
        `messages`, and optionally of PROMPT_OPTIONS; whether the policy takes the priority is not checked here. Only a
        plain text gets special tokens such as BOS: a chat's text has them by its template. The text of the result is
        None for token ids, and the rendered chat for messages.

        Raise InvalidRequestError, which names the field, for anything else, an id outside the vocabulary, an empty
        prompt, and a prompt longer than the context. With `has_answer` one output token must fit beside the prompt.
        """
        num_room = int(has_answer)  # Output tokens that must fit: 1 for an answer, 0 for a prompt that is only scored.
        extras: dict[str, Any] = {}
        key, options, opening = "prompt", PromptOptions(), ""
        if isinstance(prompt, Mapping):
            extras, mapping = _extras(prompt), prompt
            key, prompt = _only_form(mapping)
            options = PromptOptions.of(mapping, key, limits=self.limits)
            if key == "messages":
                messages, prompt = prompt, self._render(prompt, options)
                opening = _opening(messages, prompt, continues=options.continue_final_message)
        num_kept = options.truncate_prompt_tokens
        num_kept = self.max_model_len - num_room if num_kept == -1 else num_kept
        name = "messages" if key == "messages" else "prompt"
        with sent_as({"prompt": name}):
            if not isinstance(prompt, str):
                return EncodedPrompt(self._ids(prompt, num_room, num_kept, name=key), None, **extras)
            adds = key != "messages" if options.add_special_tokens is None else options.add_special_tokens
            ids = self._tokenize(prompt, num_room, add_special_tokens=adds, num_kept=num_kept)
            return EncodedPrompt(ids, prompt, **extras, name=name, tools=options.tools, opening=opening)

    def render(self, messages: Any, options: ChatOptions) -> str:
        """Return the text of a conversation as its prompt has it.

        Raise InvalidRequestError for an unknown option, and for what the chat template cannot show.
        """
        for name in options:
            check_name(name, ChatOptions.__annotations__, "argument")
        return self._render(messages, PromptOptions.of(options, "messages", limits=self.limits))

    def _render(self, messages: Any, options: PromptOptions) -> str:
        """Return a chat as text. With `continue_final_message` it ends with the text of the last message.

        Raise InvalidRequestError for tools if the template does not show them, else if the model's calls could not be
        read.
        """
        continues = options.continue_final_message
        adds = not continues if options.add_generation_prompt is None else options.add_generation_prompt
        tokenizer = tokenizer_for(self.tokenizer, "messages", "messages")
        shown = _with_end_mark(messages) if continues else messages
        try:
            text = render_chat(
                tokenizer,
                shown,
                template=self.chat_template,
                add_generation_prompt=adds,
                tools=options.tools,
                arguments=self._read_arguments(options.chat_template_kwargs),
                max_s=self.limits["template_s"],
                max_chars=self.limits["template_chars"],
            )
        except InvalidRequestError as error:
            if has_exceeded_limits(error):  # Perhaps only because the chat is far too long.
                with sent_as({"prompt": "messages"}):
                    self._check_chars(sum(len(message["content"]) for message in normalize_messages(messages)))
            raise
        if options.tools is not None and (self.answer_format is None or self.answer_format.format.calls is None):
            allowed = "none, since it is not known how this model writes calls"
            raise refusal("tools", told(options.tools.tools), allowed, "start the engine with --tool-call-parser")
        if not continues:
            return text
        end = text.rfind(END_MARK)
        if end < 0:
            got, allowed = "a last message that the template changes", "one whose text the template writes out"
            raise refusal("continue_final_message", got, allowed, "leave it out")
        return text[:end]

    def _read_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return those variables that the chat template reads. Of each other one the log is told once."""
        if not arguments or not (template := self.template):
            return dict(arguments)
        known = readable_arguments(template)
        if unread := [name for name in arguments if name not in known and name not in self._unread_arguments]:
            self._unread_arguments.update(unread)
            names, readable = ", ".join(map(shown_name, unread)), ", ".join(sorted(known)) or "nothing"
            logger.warning(
                "chat_template_kwargs: the chat template does not read %s, which is left out; it reads %s (this is "
                "said once)",
                names,
                readable,
            )
        return {name: value for name, value in arguments.items() if name in known}

    def _tokenize(
        self, text: str, num_room: int, *, add_special_tokens: bool, num_kept: int | None = None
    ) -> list[int]:
        """Return the token ids of a text, checked for length and vocabulary.

        `num_room` is the number of output tokens that must fit beside them. Only the `num_kept` last tokens are
        returned, unless it is None. Raise InvalidRequestError if they do not fit, and if the engine has no tokenizer. A
        text of more characters per token of the context than the limit is refused before it is tokenized. A
        warning is logged, once, if the text got a second BOS token in front.
        """
        self._check_chars(len(text))
        tokenizer = tokenizer_for(self.tokenizer, "prompt", told(text))
        is_bounded = num_kept is None and not self.is_counting
        if is_bounded and (num_tokens := tokenizer.num_tokens_at_least(text, self.max_model_len)):
            self.check_len(num_tokens, num_room, "at least ")
        encoding = tokenizer.encoding(text, add_special_tokens=add_special_tokens)
        if num_kept is not None:
            encoding.truncate(num_kept, direction="left")
        self.check_len(len(encoding), num_room)
        token_ids: list[int] = encoding.ids
        check_token_id(max(token_ids), "prompt", self.vocab_size)
        if add_special_tokens and token_ids[:2] == [tokenizer.bos_token_id] * 2:
            self._warn_of_two_bos(tokenizer.special_tokens["bos_token"])
        return token_ids

    def _check_chars(self, num_chars: int) -> None:
        """Raise ContextLengthError for a text of more characters than are tokenized for this context."""
        chars_per_token = self.limits["chars_per_token"] or 1
        if num_chars > (max_chars := self.max_model_len * chars_per_token):
            got = f"your prompt has {num_chars} characters, and at most {max_chars} are tokenized"
            num_tokens = -(-num_chars // chars_per_token)
            raise ContextLengthError.of(self.max_model_len, got, "shorten it", num_prompt_tokens=num_tokens)

    def _warn_of_two_bos(self, bos: str) -> None:
        """Log, once for this encoder, that a text which begins with the token `bos` gets another one in front.

        Only the first caller acquires the lock, which is never released; threads may share the encoder.
        """
        if self._bos_warning.acquire(blocking=False):
            logger.warning(
                "prompt: a text begins with %s, and the tokenizer puts another one in front, so that there are two, "
                "as in vLLM; give a rendered chat as {'messages': …} or as token ids (this is said once)",
                bos,
            )

    def _ids(self, prompt: Any, num_room: int, num_kept: int | None = None, *, name: str) -> list[int]:
        """Return the token ids of a list, a tuple or an array as a list of Python integers.

        `num_room` is the number of output tokens that must fit beside them. Only the `num_kept` last ids are checked
        and returned, unless it is None. An array is anything with a method `tolist`, such as numpy's and JAX's. Raise
        InvalidRequestError for another type, for a wrong length, and for an id that is no integer or outside the
        vocabulary. `name` is what errors call the ids.
        """
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(ids, list | tuple):
            allowed = f"a string, a list of token ids, or a mapping with one of {', '.join(PROMPT_KEYS)}"
            raise refusal(name, told(prompt), allowed)
        if num_kept is not None:
            ids = _last(ids, num_kept)
        self.check_len(len(ids), num_room)
        # All at once: checked one by one, the ids of a long prompt would take as long as a step.
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:
            return list(ids)
        # One id is wrong, or has another type of integer, such as numpy's or JAX's.
        ids = list(map(scalar, ids))
        for token_id in ids:
            check_token_id(token_id, name, self.vocab_size)
        return [int(token_id) for token_id in ids]

    def check_len(self, num_tokens: int, num_room: int = 1, counted: str = "") -> None:
        """Raise InvalidRequestError unless a prompt of `num_tokens` tokens can be served.

        It must have a token, leave room for `num_room` output tokens in the context, and not exceed the engine's limit
        on waiting tokens, if there is one; a prompt that is only counted must have a token. `num_room` is 1 for a
        prompt that gets an answer, and 0 for one that is only scored. `counted` stands before the number, such as "at
        least ".
        """
        if not num_tokens:
            raise refusal("prompt", "no token", "at least one, since a prompt cannot be empty", "give some text")
        if self.is_counting:
            return
        if num_tokens + num_room > self.max_model_len:
            answer = ", and an answer needs at least one" if num_room else ""
            got = f"your prompt has {counted}{num_tokens} tokens{answer}"
            way_out = "shorten it or raise max_model_len"
            raise ContextLengthError.of(self.max_model_len, got, way_out, num_prompt_tokens=num_tokens)
        if (most := self.limits["waiting_tokens"]) is not None and num_tokens > most:
            allowed = f"at most waiting_tokens among the limits, {most}"
            raise refusal("prompt", f"{counted}{num_tokens} tokens", allowed, "shorten the prompt or raise the limit")


def _with_end_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with END_MARK behind the text of the last one, whose end it shows.

    The text itself may stand in what the template writes behind it: "end" is a part of <|end|>. Whitespace at its end
    is dropped, as most templates do. Raise InvalidRequestError if there is no text, and for calls, which would be cut
    off with what stands behind the text.
    """
    last = normalize_messages(messages)[-1]
    if last.get("tool_calls"):
        got, allowed = "a last message with tool_calls", "one of text alone"
        raise refusal("continue_final_message", got, allowed, "send the results of the calls, or leave it out")
    if not (text := last["content"].rstrip()):
        got, allowed = "a last message without text", "one whose text the template writes out"
        raise refusal("continue_final_message", got, allowed, "leave it out")
    return [*messages[:-1], {**last, "content": text + END_MARK}]


def _opening(messages: Any, text: str, *, continues: bool) -> str:
    """Return the end of a rendered chat behind the text of its last message, with it where that is continued.

    Where the template has changed that text, it is the end of the chat of at most MAX_OPENING_CHARS characters.
    """
    content = normalize_messages(messages)[-1]["content"].strip()
    place = text.rfind(content) if content else -1
    if place < 0:
        return text[-MAX_OPENING_CHARS:]
    return text[place if continues else place + len(content) :]


def _last(ids: Sequence[Any], num_kept: int) -> list[Any]:
    """Return the `num_kept` last items; none for 0."""
    return list(ids[-num_kept:]) if num_kept else []


def check_priority(priority: Any, scheduling_policy: object) -> int:
    """Return a priority as a plain integer; refuse one that is not an integer, or that the policy would ignore."""
    priority = check("priority", priority, integer(*INT64))
    if priority and scheduling_policy == "fcfs":
        way_out = "start the engine with scheduling_policy=priority"
        raise refusal("priority", f"{priority} under scheduling_policy fcfs", "0", way_out)
    return priority


def _only_form(prompt: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the one of PROMPT_KEYS that a prompt's mapping has, and its value.

    Raise InvalidRequestError for an unknown key, and for none or several of PROMPT_KEYS. Raise it too if `prompt` is no
    string, or if `prompt_token_ids` is a string. Other types are checked later. PROMPT_OPTIONS may stand beside it.
    """
    for key in prompt:
        check_name(key, (*PROMPT_KEYS, *PROMPT_OPTIONS), "key of a prompt", not_available=not_available.PROMPT_KEYS)
    keys = [key for key in PROMPT_KEYS if key in prompt]
    if len(keys) != 1:
        raise refusal("prompt", " and ".join(keys) or "no key", f"exactly one of {', '.join(PROMPT_KEYS)}")
    key, value = keys[0], prompt[keys[0]]
    if key != "messages" and isinstance(value, str) is not (key == "prompt"):
        raise refusal(key, told(value), "a string" if key == "prompt" else "a list of token ids")
    return key, value


def _extras(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `cache_salt` and `priority` that a prompt's mapping has, checked.

    Raise InvalidRequestError for a priority that is no integer, and for a salt that is not a string of 1 to
    MAX_SALT_CHARS printable characters.
    """
    extras = {key: prompt[key] for key in PROMPT_EXTRAS if key in prompt}
    if "priority" in extras:
        extras["priority"] = check_priority(extras["priority"], None)
    salt = extras.get("cache_salt", "-")  # A missing salt is replaced by any valid one.
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT_CHARS or not salt.isprintable():
        allowed = f"a string of 1 to {MAX_SALT_CHARS} printable characters"
        raise refusal("cache_salt", told(salt), allowed, "change it or leave it out")
    return extras
