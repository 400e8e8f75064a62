"""Messages that mean the same render alike in published templates, whatever empty fields they have."""

import contextlib
import json

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.text.chat.chat_messages import normalize_messages
from jpaged.text.chat.chat_template import render_chat_template
from jpaged.text.chat.template_environment import render

from ..tokenizing.published_tokenizers import FAMILIES, llama_cpp_models, load_family

TEMPLATES = [
    *("cl100k", "deepseek", "mistral", "qwen"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct", "Qwen-Qwen3-0.6B", "Qwen-QwQ-32B",
            "HuggingFaceTB-SmolLM3-3B", "google-gemma-2-2b-it", "ibm-granite-granite-3.3-2B-Instruct",
            "microsoft-Phi-3.5-mini-instruct", "mistralai-Mistral-Nemo-Instruct-2407", "openai-gpt-oss-120b",
            "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "meetkai-functionary-medium-v3.2", "GLM-4.6", "Qwen3.5-4B",
        )
    ),
]  # fmt: skip
ARGUMENTS = {"city": "Köln", "days": 2, "unit": "C", "tags": [], "at": {"lat": 50.9}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
USER = {"role": "user", "content": "Hi"}
RESULT = {"role": "tool", "content": "18", "tool_call_id": "abcdefghi"}
EMPTY = {
    "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None, "name": None,
    "reasoning_content": None, "reasoning": None, "thinking": None,
}  # fmt: skip
"""Fields that `model_dump()` of the package openai, and servers' own extensions of it, write into a message."""
CHATS = {
    "user": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "assistant with text": [USER, {"role": "assistant", "content": "Hello!"}, USER],
    "assistant with calls": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
    "assistant with text and calls": [USER, {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}, RESULT],
    "assistant with refusal": [USER, {"role": "assistant", "refusal": "I cannot."}, USER],
    "assistant with reasoning": [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, USER],
    "assistant with reasoning alone": [USER, {"role": "assistant", "reasoning_content": "Hm."}, USER],
    "function": [
        USER,
        {"role": "assistant", "function_call": CALL["function"]},
        {"role": "function", "name": "weather", "content": "18"},
    ],
}


def render_in(name, messages):
    """Return the chat in a published template, or its refusal."""
    if name in FAMILIES:
        template, names = load_family(name).chat_template, load_family(name).special_tokens
    else:
        template, names = (llama_cpp_models() / "templates" / f"{name}.jinja").read_text(), {}
    names = {"bos_token": "<s>", "eos_token": "</s>", **names}
    try:
        return render_chat_template(template, messages, special_tokens=names, add_generation_prompt=True)
    except InvalidRequestError as error:
        return f"refused: {error}"


def dumped(message):
    """Return the message with every field that it lacks, null or empty, as a client dumps it."""
    calls = message.get("tool_calls")
    with_nulls = [{**call, "index": None, "function": {**call["function"], "strict": None}} for call in calls or ()]
    return {**EMPTY, "content": None, **message, **({"tool_calls": with_nulls} if calls else {})}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())
def test_empty_fields_render_as_if_they_were_absent(template, chat):
    text = render_in(template, chat)
    assert "None" not in text
    assert render_in(template, [dumped(message) for message in chat]) == text
    for name in (*EMPTY, "content"):
        for empty in (None, []):
            given = [{name: empty, **message} for message in chat]
            assert render_in(template, given) == text, (name, empty)


@pytest.mark.parametrize("template", TEMPLATES)
def test_arguments_of_a_call_render_alike_as_json_and_as_a_mapping(template):
    def with_arguments(arguments):
        call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
        return render_in(template, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT])

    text = with_arguments(ARGUMENTS)
    assert "{'" not in text, "Python's own form of a mapping"
    assert with_arguments(json.dumps(ARGUMENTS)) == text
    assert with_arguments(json.dumps(ARGUMENTS, indent=1, ensure_ascii=False)) == text
    assert with_arguments("") == with_arguments({}) == with_arguments(None)


@pytest.mark.parametrize("template", ["deepseek", "qwen"])
def test_a_call_without_content_shows_its_name_and_arguments(template):
    """DeepSeek's template joins the arguments to text and tests the content for None; Qwen's puts them into JSON."""
    text = render_in(template, CHATS["assistant with calls"])
    assert "weather" in text
    assert '"city": "Köln", "days": 2, "unit": "C"' in text


def test_the_content_of_a_message_without_one_is_empty_text_and_none():
    (message,) = normalize_messages([{"role": "assistant", "tool_calls": [CALL]}])
    tests = "{{ m.content is none }} {{ m.content is not none }} {{ m.content == none }} {{ m.content != none }} "
    tests += "{{ m.content is string }} {{ not m.content }} {{ 'a' + m.content ~ 'b' }} {{ m.content == '' }} "
    tests += (
        "{{ m.content is defined }} {{ 'x' in m.content }} {{ m.content | tojson }} {{ none is none }} {{ '' is none }}"
    )
    assert render(tests, {"m": message}) == 'True False True False True True ab True True False "" True False'


def test_arguments_of_a_call_that_is_the_function_itself_are_a_mapping_too():
    """Qwen's templates take such calls."""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        chat = [USER, {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": arguments}]}, RESULT]
        assert render_in("qwen", chat) == render_in("qwen", CHATS["assistant with calls"])


def test_a_function_call_is_a_tool_call_and_a_refusal_is_content():
    call, result = normalize_messages(CHATS["function"][1:])
    assert call["tool_calls"] == [{"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}]
    assert "function_call" not in call
    assert result == {"role": "tool", "name": "weather", "content": "18"}
    (said,) = normalize_messages([{"role": "assistant", "content": None, "refusal": "I cannot."}])
    assert said["content"] == "I cannot."
    assert normalize_messages([{"role": "assistant", "content": "", "refusal": "No."}])[0]["content"] == "No."
    parts = [{"type": "refusal", "refusal": "I cannot."}]
    assert normalize_messages([{"role": "assistant", "content": parts}])[0]["content"] == "I cannot."


def test_empty_values_among_a_calls_arguments_are_kept():
    arguments = {"unit": None, "tags": [], "at": {"lat": None}}
    (message,) = normalize_messages(with_call(arguments=json.dumps(arguments))[1:])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def with_call(**function):
    return [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", **function}}]}]


REFUSED = {
    "cut JSON": (with_call(arguments='{"a": '), r"messages\[1\].tool_calls\[0\].function.arguments is no JSON"),
    "a list": (with_call(arguments="[1]"), "function.arguments is a string of 3 characters, allowed is a JSON object"),
    "a number": (with_call(arguments=5), "function.arguments is 5, allowed is a JSON object"),
    "an assistant who says nothing": ([USER, {"role": "assistant", **EMPTY}], r"messages\[1\].content is null"),
    "a user who says nothing": ([{**EMPTY, "role": "user", "content": None}], r"messages\[0\].content is null"),
    "no name": (with_call(name=None), r"messages\[1\].tool_calls\[0\].function.name is null, allowed is the name"),
    "a number as name": (with_call(name=5), r"tool_calls\[0\].function.name is 5"),
    "calls that are no list": (
        [USER, {"role": "assistant", "tool_calls": CALL}],
        "tool_calls is an object of 3 keys, allowed is a list",
    ),
    "a hosted tool": (
        [USER, {"role": "assistant", "tool_calls": [{"type": "web_search", "id": "x"}]}],
        r"messages\[1\].tool_calls\[0\] is an object of 2 keys, allowed is \{\"type\": \"function\"",
    ),
    "a custom tool without its text": (
        [USER, {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}],
        r"messages\[1\].tool_calls\[0\].custom is an object of 1 key, allowed is \{\"name\"",
    ),
    "half a character": (with_call(arguments='{"a": ["\\ud83d"]}'), r"function.arguments holds a lone surrogate"),
    "no number": (with_call(arguments='{"a": NaN}'), r"tool_calls\[0\].function.arguments is no JSON"),
    "a result without a call": ([USER, RESULT], r"messages\[1\] has a tool_call_id that no call before it has"),
    "a result of another call": (
        [USER, {"role": "assistant", "tool_calls": [CALL]}, {**RESULT, "tool_call_id": "other"}],
        r"messages\[2\] has a tool_call_id that no call before it has",
    ),
    "a result before its call": (
        [USER, RESULT, {"role": "assistant", "tool_calls": [CALL]}],
        r"messages\[1\] has a tool_call_id that no call before it has",
    ),
    "a result too many": (
        [*CHATS["function"], {"role": "function", "name": "weather", "content": "19"}],
        r"messages\[3\] has no tool_call_id, and no call before it waits",
    ),
    "an empty call": ([USER, {"role": "assistant", "function_call": {}}], r"messages\[1\].content is null"),
    "no calls": ([USER, {"role": "assistant", "tool_calls": []}], r"messages\[1\].content is null"),
}


@pytest.mark.parametrize(("messages", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_messages_that_mean_nothing_are_refused_by_their_index(messages, message):
    with pytest.raises(InvalidRequestError, match=message):
        normalize_messages(messages)


def test_the_callers_messages_are_not_changed():
    chat = [USER, dumped({"role": "assistant", "tool_calls": [CALL]}), RESULT]
    before = json.dumps(chat)
    normalize_messages(chat)
    assert json.dumps(chat) == before


@pytest.mark.slow
def test_a_call_without_content_renders_in_every_published_template_as_one_that_it_was_written_for():
    """As with content None or with an empty one, whichever the template takes, in Jinja2 without any of our changes."""
    names = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None, "add_generation_prompt": True}

    def chat_with(content, arguments):
        call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
        return [USER, {"role": "assistant", "content": content, "tool_calls": [call]}, RESULT, USER]

    num_compared = 0
    for path in sorted((llama_cpp_models() / "templates").glob("*.jinja")):
        found = []
        for content in (None, ""):
            for arguments in ({"city": "Oslo"}, '{"city": "Oslo"}'):
                with contextlib.suppress(Exception):
                    found.append(render(path.read_text(), {"messages": chat_with(content, arguments), **names}))
        wanted = [text for text in found if "None" not in text and "{'" not in text]
        if wanted:
            text = render_in(path.stem, chat_with(None, {"city": "Oslo"}))
            if "does not show calls" in text:
                assert not any("weather" in one and "Oslo" in one for one in wanted), path.stem
                continue
            assert text in wanted, path.stem
            assert ("weather" in text) == any("weather" in one for one in wanted), path.stem
            num_compared += 1
    assert num_compared > 45
