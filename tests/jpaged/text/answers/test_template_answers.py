"""Chats with tools render as transformers' templates do, and what they make of an answer parses back into it."""

import json
import time
from functools import cache

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.text.answers.answer_spec import spec_of_tools
from jpaged.text.answers.bound_format import bind_marks
from jpaged.text.answers.format_names import answer_format, detect_calls, detect_thought
from jpaged.text.answers.whole_answer import Answer, ToolCall, parse_answer
from jpaged.text.chat.chat_template import render_chat_template
from jpaged.text.chat.template_environment import compile_template
from jpaged.text.chat.template_traits import traits_of
from jpaged.text.chat.tools import tools_of

from ..tokenizing.published_tokenizers import llama_cpp_models

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ENDS = {
    "Qwen-Qwen3-0.6B": "<|im_end|>",
    "Qwen-Qwen2.5-7B-Instruct": "<|im_end|>",
    "Qwen-QwQ-32B": "<|im_end|>",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "<|im_end|>",
    "Qwen3-Coder": "<|im_end|>",
    "Qwen3.5-4B": "<|im_end|>",
    "GLM-4.6": "<|user|>",
    "GLM-4.7-Flash": "<|user|>",
    "google-gemma-4-31B-it": "<|tool_response>",
    "meta-llama-Llama-3.1-8B-Instruct": "<|eot_id|>",
    "meta-llama-Llama-3.2-3B-Instruct": "<|eot_id|>",
    "mistralai-Mistral-Nemo-Instruct-2407": "</s>",
    "mistralai-Ministral-3-14B-Reasoning-2512": "</s>",
    "openai-gpt-oss-120b": "<|call|>",
}
"""Template → what ends an answer."""
ONE_CALL, NO_TEXT = "one call, since", "a text, allowed: none"
REFUSED = {
    ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "a text and a call"): NO_TEXT,
    ("meta-llama-Llama-3.1-8B-Instruct", "a text and a call"): NO_TEXT,
    ("meta-llama-Llama-3.1-8B-Instruct", "two calls"): ONE_CALL,
    ("meta-llama-Llama-3.2-3B-Instruct", "a text and a call"): NO_TEXT,
    ("meta-llama-Llama-3.2-3B-Instruct", "two calls"): ONE_CALL,
    ("mistralai-Mistral-Nemo-Instruct-2407", "a text and a call"): NO_TEXT,
    ("openai-gpt-oss-120b", "two calls"): ONE_CALL,
}
"""Every refusal: template and chat → its reason. transformers raises an error there, or drops a part of the chat."""
ARGUMENTS = {"city": "Köln <b>", "days": 2, "at": {"lat": 50.9, "tags": ["a", "b"]}, "fast": True}
OTHER_ARGUMENTS = {"city": "Bergen"}
PROPERTIES = {
    "city": {"type": "string", "description": "Its name", "default": None},
    "days": {"type": "integer", "enum": [1, 2]},
    "at": {"type": "object", "properties": {"lat": {"type": "number"}}},
    "fast": {"type": "boolean"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Tells the {name}.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
    for name in ("weather", "tides")
]
USER, MORE = {"role": "user", "content": "Shall I go?"}, {"role": "user", "content": "Thanks."}
THOUGHT = "They mean it."


def call(name, arguments, call_id):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content="", calls=(), thought=None):
    """Return an assistant's message in the form that templates take."""
    thoughts = {} if thought is None else {"reasoning_content": thought, "thinking": thought}
    return {"role": "assistant", "content": content, **thoughts, **({"tool_calls": list(calls)} if calls else {})}


ONE = call("weather", ARGUMENTS, "abcdefgh1")
TWO = call("tides", OTHER_ARGUMENTS, "abcdefgh2")
RESULTS = [
    {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}
    for name, call_id, content in (("weather", "abcdefgh1", "18 °C"), ("tides", "abcdefgh2", "low"))
]
CHATS = {
    "tools": [{"role": "system", "content": "Be brief."}, USER],
    "a call": [USER, answer(calls=[ONE])],
    "a text and a call": [USER, answer("I look.", [ONE]), RESULTS[0]],
    "a result": [USER, answer(calls=[ONE]), RESULTS[0]],
    "two calls": [USER, answer(calls=[ONE, TWO]), *RESULTS],
    "two rounds": [USER, answer(calls=[ONE]), RESULTS[0], answer(calls=[TWO]), RESULTS[1]],
    "an answer": [USER, answer(calls=[ONE]), RESULTS[0], answer("Go!"), MORE],
    "a thought and a call": [USER, answer(calls=[ONE], thought=THOUGHT), RESULTS[0]],
    "a thought of an earlier turn": [USER, answer("Go!", thought=THOUGHT), MORE],
}


@cache
def template_of(name):
    return (llama_cpp_models() / "templates" / f"{name}.jinja").read_text()


def by_transformers(name, messages):
    """Return the text that transformers makes of a chat with tools; None if its template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if "[THINK]" in template_of(name):  # Ministral's template takes a thought as a part of the content.
        messages = [_with_parts(message) for message in messages]
    try:
        chats, _ = render_jinja_template(
            [messages], tools=TOOLS, chat_template=template_of(name), add_generation_prompt=True, **TOKENS
        )
    except Exception:  # A template raises what it likes.
        return None
    return chats[0]


def _with_parts(message):
    if "thinking" not in message:
        return message
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return {**message, "content": [{"type": "thinking", "thinking": message["thinking"]}, *text]}


def by_jpaged(name, messages, *, add_generation_prompt=True, tools=TOOLS):
    return render_chat_template(
        template_of(name),
        messages,
        special_tokens=TOKENS,
        tools=tools_of(tools),
        add_generation_prompt=add_generation_prompt,
    )


def lost(messages, text):
    """Return whether a call, a text or a result of the chat is missing in the text; thoughts are left to templates."""
    words = []
    for message in messages:
        words += [message["content"]] if message["content"] else []
        for one in message.get("tool_calls", ()):
            words.append(one["function"]["arguments"]["city"].removesuffix(" <b>"))
    return not all(word in text or json.dumps(word)[1:-1] in text for word in words)


@pytest.mark.parametrize("name", ENDS)
def test_chats_with_tools_render_as_in_transformers(name):
    for label, messages in CHATS.items():
        expected = by_transformers(name, messages)
        # A client sends arguments as text, a thought under one name, and null where there is no content.
        sent = json.loads(json.dumps(messages))
        for message in sent:
            message["content"] = message["content"] or None
            message["reasoning"] = message.pop("reasoning_content", None)
            message.pop("thinking", None)
            for one in message.get("tool_calls", ()):
                one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
        if (name, label) in REFUSED:
            assert expected is None or lost(messages, expected), label
            with pytest.raises(InvalidRequestError, match=REFUSED[name, label]):
                by_jpaged(name, sent)
            continue
        assert expected is not None, label
        assert by_jpaged(name, sent) == expected, label


@pytest.mark.slow
def test_no_published_template_loses_a_part_of_a_chat_without_a_word():
    num_shown = 0
    for path in sorted((llama_cpp_models() / "templates").glob("*.jinja")):
        compile_template(template_of(path.stem))
        start = time.process_time()
        traits = traits_of(template_of(path.stem), TOKENS)
        assert time.process_time() - start < 0.2, "about 40 ms on a free machine"
        for label, messages in CHATS.items():
            for tools in (TOOLS, None):
                try:
                    text = by_jpaged(path.stem, messages, tools=tools)
                except InvalidRequestError:
                    continue
                # Nemotron Nano's template drops an assistant's last message behind which an answer is to begin.
                assert not lost(messages, text) or label == "a call", (path.stem, label)
                assert tools is None or all(one["function"]["name"] in text for one in tools), (path.stem, label)
                assert THOUGHT in text or traits.thoughts != "parts" or "thought" not in label, (path.stem, label)
                num_shown += 1
    assert num_shown > 800


ANSWERS = {
    "a call": answer(calls=[ONE]),
    "a text and a call": answer("I look.", [ONE]),
    "two calls": answer(calls=[ONE, TWO]),
    "a thought and a call": answer(calls=[ONE], thought=THOUGHT),
    "an answer": answer("Go!"),
}
SHOWN_AS_THOUGHT = {("openai-gpt-oss-120b", "a text and a call")}
"""The template writes the text beside a call into the channel of thoughts."""
BEHIND = {("google-gemma-4-31B-it", "a text and a call")}
"""The template writes the text behind the call and its results, where no answer has it."""


@pytest.mark.parametrize("name", ENDS)
def test_what_a_template_makes_of_an_answer_parses_back(name):
    template = template_of(name)
    format = bind_marks(answer_format(detect_calls(template), detect_thought(template, lambda text: False)), {})
    before = by_jpaged(name, [USER], add_generation_prompt=False)
    head = by_jpaged(name, [USER]).removeprefix(before).partition("<think>")[0].partition("<|channel>")[0]
    for label, message in ANSWERS.items():
        if (name, label) in REFUSED or (name, label) in BEHIND:
            continue
        text = by_jpaged(name, [USER, message], add_generation_prompt=False)
        assert text.startswith(before), label
        text = text.removeprefix(before).removeprefix(head).partition(ENDS[name])[0].removesuffix("<turn|>\n")
        # GLM-4.7's template opens a thought at the end of a prompt, and closes an empty one without opening it.
        opening = head + "<think>" * text.startswith("</think>")
        found = parse_answer(text, format, spec_of_tools(tools_of(TOOLS), opening=opening))
        content, thought = message["content"], THOUGHT if THOUGHT in text else None
        if (name, label) in SHOWN_AS_THOUGHT:
            content, thought = "", content
        calls = tuple(
            ToolCall(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())
        )
        parsed = tuple(ToolCall(one.name, json.loads(one.arguments)) for one in found.tool_calls)
        assert Answer(found.reasoning or None, found.content.strip(), parsed) == Answer(thought, content, calls), label
