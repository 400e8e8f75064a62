"""A conversation sent to /v1/messages is the same prompt as in a chat, under the templates of published models."""

import json
from dataclasses import replace
from typing import Any

import pytest

from jpaged.intake.request_builder import RequestBuilder
from jpaged.serving.protocols.chat.parser import parse_chat
from jpaged.serving.protocols.messages.parser import parse_messages
from jpaged.serving.protocols.request_parser import RequestParser

from ..text.tokenizing.published_tokenizers import llama_cpp_models

MOVES_TOOLS = "Mistral-Small-3.2-24B-Instruct-2506"
"""Writes the tools before the last user message, so that a turn repeats less of the one before."""
TEMPLATES = (
    "Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B", "GLM-4.7-Flash", "google-gemma-4-31B-it", "openai-gpt-oss-120b",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "meta-llama-Llama-3.1-8B-Instruct",
    MOVES_TOOLS, "ibm-granite-granite-4.0",
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = {"city": "Oslo", "x": [1, None]}
RULES = "Be brief. " * 50
MARK = {"cache_control": {"type": "ephemeral"}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def messages_body(num_turns: int) -> dict[str, Any]:
    """Return a body of so many turns in Anthropic's form.

    A header changes, the mark of the cached prefix moves, and a system message that is a list is a text afterwards.
    """
    messages: list[Any] = []
    for turn in range(num_turns):
        call_id, late = f"toolu_{turn}", f"It is {turn} o'clock."
        use = {"type": "tool_use", "id": call_id, "name": "weather", "input": ARGUMENTS}
        thought = {"type": "thinking", "thinking": f"I think {turn}.", "signature": "x"}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": [text("sunny")]}
        messages += [
            *([{"role": "assistant", "content": [text(f"Any time {turn}.")]}] if turn else []),
            {"role": "user", "content": f"Turn {turn}?"},
            {"role": "assistant", "content": [thought, use]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": [text(f"Sun {turn}.")]},
            {"role": "user", "content": "Thanks."},
            {"role": "system", "content": late if turn < num_turns - 1 else [text(late, **MARK)]},
        ]
    system = [text(f"x-anthropic-billing-header: cc_version=2.1.{num_turns};"), text(RULES, **MARK)]
    tools = [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}]
    return {"max_tokens": 20, "system": system, "messages": messages, "tools": tools}


def chat_body(num_turns: int) -> dict[str, Any]:
    """Return the same turns as OpenAI's clients send them."""
    messages: list[Any] = [{"role": "system", "content": RULES}]
    for turn in range(num_turns):
        call_id, function = f"call_{turn}", {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
        call = {"id": call_id, "type": "function", "function": function}
        messages += [
            *([{"role": "assistant", "content": f"Any time {turn}."}] if turn else []),
            {"role": "user", "content": f"Turn {turn}?"},
            {"role": "assistant", "content": None, "reasoning": f"I think {turn}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "sunny"},
            {"role": "assistant", "content": f"Sun {turn}."},
            {"role": "user", "content": "Thanks."},
            {"role": "system", "content": f"It is {turn} o'clock."},
        ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}]
    return {"messages": messages, "tools": tools}


def token_ids(request: Any) -> list[int]:
    (new,) = request.new_requests
    return memoryview(new.prompt_token_ids).cast("i").tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_three_turns_are_the_same_prompts_and_begin_with_those_before(thinker: RequestParser, name: str):
    builder = thinker.builder
    template = (llama_cpp_models() / "templates" / f"{name}.jinja").read_text()
    encoder = replace(builder.encoder, chat_template=template)
    parser = RequestParser(RequestBuilder(builder.config, encoder, builder.sizes, {}), ("tiny",))
    before = []
    for num_turns in (1, 2, 3):
        body = bytearray(json.dumps(messages_body(num_turns)).encode())
        ids = token_ids(parse_messages(parser, body))
        assert ids == token_ids(parse_chat(parser, bytearray(json.dumps(chat_body(num_turns)).encode())))
        num_shared = next((i for i, one in enumerate(before) if one != ids[i]), len(before))
        assert num_shared >= (0.7 if name == MOVES_TOOLS else 0.9) * len(before)
        before = ids
