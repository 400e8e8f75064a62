"""Names of formats, as options of `jpaged serve` take them, and which format a chat template has."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from ...checks import check_name, refusal
from ...errors import ConfigError
from ..tokenizing.tokenizer import Tokenizer
from .bound_format import BoundFormat, bind_format
from .formats import (
    COHERE_THOUGHT,
    GEMMA_4_CALLS,
    GEMMA_4_THOUGHT,
    GLM_4_CALLS,
    GRANITE_CALLS,
    GRANITE_THOUGHT,
    HARMONY,
    HERMES_CALLS,
    LLAMA_3_CALLS,
    MINIMAX_CALLS,
    MINIMAX_M2_CALLS,
    MISTRAL_CALLS,
    MISTRAL_THOUGHT,
    NEMOTRON_CALLS,
    QWEN_3_CODER_CALLS,
    SEED_CALLS,
    SEED_THOUGHT,
    THINK,
    AnswerFormat,
    CallFormat,
    Channels,
    ThoughtFormat,
)
from .response_template import UnreadableTemplateError, read_response_template

logger = logging.getLogger("jpaged")
NONE = "none"
"""The name by which thoughts or calls are not told apart."""
CALL_FORMATS: dict[str, CallFormat | Channels] = {
    "hermes": HERMES_CALLS,
    "qwen3_coder": QWEN_3_CODER_CALLS,
    "glm47": GLM_4_CALLS,
    "gemma4": GEMMA_4_CALLS,
    "llama3_json": LLAMA_3_CALLS,
    "mistral": MISTRAL_CALLS,
    "openai": HARMONY,
    "granite": GRANITE_CALLS,
    "minimax": MINIMAX_CALLS,
    "minimax_m2": MINIMAX_M2_CALLS,
    "nemotron_json": NEMOTRON_CALLS,
    "seed_oss": SEED_CALLS,
}
THOUGHT_FORMATS: dict[str, ThoughtFormat | Channels] = {
    "qwen3": THINK,
    "gemma4": GEMMA_4_THOUGHT,
    "mistral": MISTRAL_THOUGHT,
    "openai_gptoss": HARMONY,
    "granite": GRANITE_THOUGHT,
    "seed_oss": SEED_THOUGHT,
    "cohere": COHERE_THOUGHT,
}
CALL_ALIASES = {
    "glm45": "glm47", "granite4": "hermes", "harmony": "openai", "hunyuan_a13b": "minimax",
    "llama4_json": "llama3_json", "poolside_v1": "glm47", "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}  # fmt: skip
"""More names that vLLM has for these formats."""
THOUGHT_ALIASES = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "deepseek_v4", "ernie45", "glm45", "glm47", "holo2", "kimi_k2", "minimax_m2",
         "nemotron_v3", "olmo3", "poolside_v1", "qwen3_coder", "step3", "step3p5"),
        "qwen3",
    ),
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "harmony": "openai_gptoss",
}  # fmt: skip
OTHER_CALL_PARSERS = (
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4",
    "ernie45", "functiongemma", "gigachat3", "granite-20b-fc", "hy_v3", "internlm", "jamba", "kimi_k2", "lfm2",
    "llama4_pythonic", "longcat", "mimo", "minimax_m3", "olmo3", "phi4_mini_json", "pythonic", "step3", "xlam",
)  # fmt: skip
"""vLLM's parsers of formats that are not known here."""
OTHER_REASONING_PARSERS = ("hunyuan_a13b", "identity", "minimax_m2_append_think", "hy_v3")

# The texts that a chat template with the format holds, all of one entry; the first entry that fits counts.
_MARKS_OF_CALLS = (
    ("openai", ("<|channel|>", "<|call|>")),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("minimax_m2", ("<minimax:tool_call>", '<invoke name="')),
    ("seed_oss", ("<seed:tool_call>", "<function=")),
    ("granite", ("<|tool_call|>",)),
    ("nemotron_json", ("<TOOLCALL>[",)),
    ("minimax", ("<tool_calls>", "</tool_calls>", "arguments")),
    ("glm47", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("hermes", ("<tool_call></tool_call> XML tags",)),
    ("llama3_json", ('{"name": function name, "parameters": ',)),
)
_MARKS_OF_THOUGHTS = (
    ("openai_gptoss", ("<|channel|>analysis",)),
    ("gemma4", ("<|channel>thought", "<channel|>")),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("seed_oss", ("<seed:think>",)),
    ("cohere", ("<|START_THINKING|>", "<|END_THINKING|>")),
    ("granite", ("your thoughts between <think></think>", "your response between <response></response>")),
    ("qwen3", ("</think>",)),
)
_HERMES = re.compile(r"""<tool_call>(?:\s|\\n)*\{+\\?["']name\\?["']:""")


def find_format(
    template: str, tokenizer: Tokenizer, call_parser: str | None = None, reasoning_parser: str | None = None
) -> BoundFormat | None:
    """Return the format by which a model marks thoughts and calls in its answers, None if it has neither.

    The names are those of the options `--tool-call-parser` and `--reasoning-parser`; where one is None, the chat
    template tells the format, or where it does not, the tokenizer's `response_template`. Raise ConfigError for names
    that are not known or do not go together, and for a `response_template` that is broken.
    """

    def is_token(text: str) -> bool:
        return tokenizer.backend.token_to_id(text) is not None

    described = _described(tokenizer)
    calls = detect_calls(template) if call_parser is None else call_format_name(call_parser)
    thought = detect_thought(template, is_token) if reasoning_parser is None else thought_format_name(reasoning_parser)
    format = answer_format(calls, thought)
    if format.channels is None:
        if calls is None and call_parser is None:
            format = replace(format, calls=described.calls)
        if thought is None and reasoning_parser is None:
            format = replace(format, thought=described.thought)
    return bind_format(format, tokenizer) if format.calls or format.thought else None


def _described(tokenizer: Tokenizer) -> AnswerFormat:
    """Return the format that the tokenizer's `response_template` describes; an empty one if it is not understood."""
    if tokenizer.response_template is None:
        return AnswerFormat()
    tokens = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    try:
        return read_response_template(tokenizer.response_template, tokens)
    except UnreadableTemplateError as error:
        logger.info("The model's response_template is not used: %s", error)
        return AnswerFormat()


def answer_format(calls: str | None, thought: str | None) -> AnswerFormat:
    """Return the format of two formats' names, of tool calls and of thoughts; None: there are none.

    Raise ConfigError for names that do not go together.
    """
    parts = AnswerFormat(
        thought=None if thought is None else THOUGHT_FORMATS[thought],
        calls=None if calls is None else CALL_FORMATS[calls],
    )
    if parts.channels is not None and None not in (calls, thought) and parts.thought is not parts.calls:
        got = f"{calls} with the reasoning parser {thought}"
        raise refusal("tool_call_parser", got, "openai with openai_gptoss", "give both or none", error=ConfigError)
    return parts


def call_format_name(name: str) -> str | None:
    """Return the format of tool calls that the option `--tool-call-parser` names, None for "none".

    Raise ConfigError for a name that is not known.
    """
    return _format_name("--tool-call-parser", name, CALL_FORMATS, CALL_ALIASES, OTHER_CALL_PARSERS)


def thought_format_name(name: str) -> str | None:
    """Return the format of thoughts that the option `--reasoning-parser` names, None for "none".

    Raise ConfigError for a name that is not known.
    """
    return _format_name("--reasoning-parser", name, THOUGHT_FORMATS, THOUGHT_ALIASES, OTHER_REASONING_PARSERS)


def detect_calls(template: str) -> str | None:
    """Return the name of the format of tool calls that a chat template writes, None if it is none of those known."""
    return _detect(template, _MARKS_OF_CALLS) or ("hermes" if _HERMES.search(template) else None)


def detect_thought(template: str, is_token: Callable[[str], bool]) -> str | None:
    """Return the name of the format of thoughts that a chat template writes, None if it is none of those known.

    A tokenizer for which `</think>` is a token has been trained to think, even if the template does not tell.
    """
    return _detect(template, _MARKS_OF_THOUGHTS) or ("qwen3" if is_token(THINK.close) else None)


def _detect(template: str, table: tuple[tuple[str, tuple[str, ...]], ...]) -> str | None:
    return next((name for name, marks in table if all(mark in template for mark in marks)), None)


def _format_name(
    option: str, name: str, formats: Mapping[str, object], aliases: Mapping[str, str], others: tuple[str, ...]
) -> str | None:
    if name == NONE:
        return None
    name = aliases.get(name, name)
    known = (*formats, NONE)
    check_name(
        name,
        known,
        f"format, as {option} takes it",
        not_available=others,
        way_out=f"allowed: {', '.join(known)}",
        error=ConfigError,
    )
    return name
