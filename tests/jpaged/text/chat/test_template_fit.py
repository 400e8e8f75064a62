"""Conversations in published templates: nothing is lost without a word, and what cannot be shown is refused by name."""

import json
import time
from dataclasses import replace

import pytest

from jpaged.errors import InvalidRequestError
from jpaged.text.chat.chat_messages import normalize_messages
from jpaged.text.chat.chat_template import render_chat_template
from jpaged.text.chat.template_fit import fit_to_template
from jpaged.text.chat.template_traits import TemplateTraits, traits_of
from jpaged.text.chat.tools import tools_of

from ..tokenizing.published_tokenizers import llama_cpp_models

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
QWEN_3, QWEN_35, QWEN_CODER = "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen3-Coder"
LLAMA, NEMO, MINISTRAL = (
    "meta-llama-Llama-3.1-8B-Instruct",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "mistralai-Ministral-3-14B-Reasoning-2512",
)
GEMMA_2, GEMMA_4, GRANITE = "google-gemma-2-2b-it", "google-gemma-4-31B-it", "ibm-granite-granite-3.3-2B-Instruct"
GPT_OSS, R1 = "openai-gpt-oss-120b", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"
USER, ANSWER, MORE = (
    {"role": role, "content": content} for role, content in (("user", "Hi"), ("assistant", "Yes?"), ("user", "More"))
)
RESULT = {"role": "tool", "content": "18 degrees", "tool_call_id": "call_123456789"}
TOOLS = tools_of([{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {}}}])


def template(name):
    return (llama_cpp_models() / "templates" / f"{name}.jinja").read_text()


def render(name, messages, tools=None):
    return render_chat_template(
        template(name), messages, special_tokens=TOKENS, tools=tools, add_generation_prompt=True
    )


def system(text):
    return {"role": "system", "content": text}


def calling(*cities, content=None, **fields):
    """Return an assistant's message that asks for the weather of these cities."""
    calls = [
        {
            "id": f"call_{index or ''}123456789",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps({"city": city})},
        }
        for index, city in enumerate(cities)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **fields}


def test_a_late_system_message_joins_the_users_turn_where_the_template_has_none_there():
    """Qwen3.5's template raises for one, DeepSeek's would move it to the start: every cached page would be lost."""
    for name in (QWEN_35, R1):
        before = render(name, [system("A"), USER])
        for late in (system("Be brief."), {"role": "developer", "content": "Be brief."}):
            text = render(name, [system("A"), USER, ANSWER, late, MORE])
            assert text.startswith(before.split("Hi")[0] + "Hi"), "what stands before it stays"
            joined = [system("A"), USER, ANSWER, {"role": "user", "content": "Be brief.\n\nMore"}]
            assert text == render(name, joined)
        behind = render(name, [system("A"), USER, system("Be brief.")])
        assert behind == render(name, [system("A"), {"role": "user", "content": "Hi\n\nBe brief."}])
        assert render(name, [system("A"), USER, system("Be brief."), ANSWER, MORE]).startswith(
            behind.split("Be brief.")[0] + "Be brief."
        )


def test_a_late_system_message_stays_where_the_template_shows_it():
    text = render(QWEN_3, [USER, ANSWER, system("Be brief."), MORE])
    assert "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nMore" in text


def test_a_late_system_message_joins_a_result_where_no_user_may_follow_one():
    chat = [USER, calling("Rome"), RESULT]
    assert "18 degrees\n\nBe brief." in render(NEMO, [*chat, system("Be brief.")])
    assert "<|im_start|>user\nBe brief.<|im_end|>" in render(QWEN_35, [*chat, system("Be brief.")])


def test_a_users_message_joins_the_one_before_where_the_template_takes_none_behind_it():
    """Codex sends two before the first answer, Claude Code one behind a result; Mistral's templates raise an error."""
    for name in (NEMO, MINISTRAL, GEMMA_2):
        joined = {"role": "user", "content": "Hi\n\nMore"}
        assert render(name, [USER, MORE, ANSWER, USER]) == render(name, [joined, ANSWER, USER])
    chat = [USER, calling("Rome"), RESULT]
    result = {**RESULT, "content": "18 degrees\n\nMore\n\nBe brief."}
    assert render(NEMO, [*chat, MORE, system("Be brief.")], TOOLS) == render(NEMO, [*chat[:2], result], TOOLS)
    assert render(QWEN_3, [USER, MORE]).count("<|im_start|>user") == 2


def test_a_thought_stands_before_the_text_of_a_call_where_the_template_takes_one_of_them():
    text = render(GPT_OSS, [USER, calling("Rome", content="I look.", reasoning="They mean Rome."), RESULT])
    assert "<|channel|>analysis<|message|>They mean Rome.\n\nI look.<|end|>" in text
    assert "<think>\nThey mean Rome.\n</think>\n\nI look." in render(
        QWEN_3, [USER, calling("Rome", content="I look.", reasoning="They mean Rome."), RESULT]
    )


def test_a_tool_without_a_description_is_shown_where_the_template_needs_one():
    """The templates of gpt-oss and Hermes raise an error without one, Seed's without properties; others show none."""
    bare = tools_of([{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}])
    for name in (GPT_OSS, "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "ByteDance-Seed-OSS"):
        assert "now" in render(name, [USER], bare)
    assert '{"name": "now", "parameters": {"type": "object"}}' in render(QWEN_3, [USER], bare)


def test_a_result_stays_at_its_call():
    """Gemma 4's template drops a result behind any other message; Mistral's raises an error."""
    chat, late = [USER, calling("Rome"), RESULT], system("Be brief.")
    for name in (GEMMA_4, NEMO, QWEN_3):
        text = render(name, [*chat[:2], late, chat[2]])
        assert text == render(name, [*chat, late])
        assert "18 degrees" in text
        assert "Be brief." in text


def test_several_system_messages_at_the_start_are_one_where_the_template_shows_one():
    several = [system("A"), {"role": "developer", "content": "B"}, system("C"), USER]
    for name in (QWEN_35, R1, GPT_OSS):
        assert render(name, several) == render(name, [system("A\n\nB\n\nC"), USER])


def test_a_developers_message_is_a_system_message_where_the_template_does_not_know_the_role():
    developer = {"role": "developer", "content": "Be brief."}
    for name in (QWEN_3, QWEN_CODER, LLAMA):
        assert render(name, [developer, USER]) == render(name, [system("Be brief."), USER])
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in render(GPT_OSS, [developer, USER])


def test_ids_of_calls_get_nine_characters_where_the_template_demands_them():
    chat = [USER, calling("Rome", "Oslo"), RESULT, {**RESULT, "content": "5", "tool_call_id": "call_1123456789"}]
    text = render(NEMO, chat, TOOLS)
    assert '"id": "call00000"' in text
    assert '"content": 18 degrees, "call_id": "call00000"' in text
    assert '"content": 5, "call_id": "call00001"' in text
    short = json.loads(json.dumps(chat).replace("call_1123456789", "bbbbbbbbb").replace("call_123456789", "aaaaaaaaa"))
    assert render(NEMO, short, TOOLS) == text.replace("call00000", "aaaaaaaaa").replace("call00001", "bbbbbbbbb")
    without = json.loads(json.dumps(chat))
    for message in without:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            del call["id"]
    assert render(NEMO, without, TOOLS) == text


def test_a_custom_call_is_one_of_a_function_and_a_result_has_the_name_of_its_call():
    custom = {"id": "call_123456789", "type": "custom", "custom": {"name": "patch", "input": "*** Begin\n+é"}}
    chat = [USER, {"role": "assistant", "tool_calls": [custom]}, RESULT]
    assert "<function=patch>\n<parameter=input>\n*** Begin\n+é\n</parameter>" in render(QWEN_CODER, chat)
    assert "response:patch{" in render(GEMMA_4, chat)
    assert 'tool name="patch"' in render_chat_template(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        '{{ c.function.arguments | tojson }}{% endfor %}{% if m.role == "tool" %}tool name="{{ m.name }}"'
        "{% endif %}{% endfor %}",
        chat,
        special_tokens={},
        add_generation_prompt=False,
    )


def test_mistrals_thoughts_are_parts_of_the_content():
    chat = [USER, calling("Rome", reasoning_content="They mean Rome."), RESULT]
    assert '[THINK]They mean Rome.[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Rome"}' in render(MINISTRAL, chat)
    parts = [{"type": "thinking", "thinking": "They greet."}, {"type": "text", "text": "Hello!"}]
    given = [USER, {"role": "assistant", "content": parts}, MORE]
    field = [USER, {"role": "assistant", "content": "Hello!", "reasoning": "They greet."}, MORE]
    assert "[THINK]They greet.[/THINK]Hello!</s>" in render(MINISTRAL, given)
    assert render(MINISTRAL, given) == render(MINISTRAL, field)
    assert render(QWEN_3, given) == render(QWEN_3, field), "other templates see a text"


def test_a_blank_text_beside_a_call_is_none_where_it_would_cost_the_call():
    assert "Rome" in render(R1, [USER, calling("Rome", content="\n\n"), RESULT])


def test_a_number_without_a_float_is_shown_as_it_was_written():
    huge = {"id": "a", "function": {"name": "f", "arguments": '{"n": 1e400, "m": 123456789012345678901234567890}'}}
    text = render(QWEN_3, [USER, {"role": "assistant", "tool_calls": [huge]}])
    assert '"n": "1e400", "m": 123456789012345678901234567890' in text


DROPPED = {
    "tools": ((GEMMA_2, [USER], TOOLS), "tools", "^tools: got an array of 1 item, allowed: none, since this model's"),
    "tools of R1": ((R1, [USER], TOOLS), "tools", "^tools: got an array of 1 item"),
    "a call": ((GRANITE, [USER, calling("Rome"), RESULT]), "messages", r"^messages\[1\].tool_calls: got an array of 1"),
    "the second call": (
        (LLAMA, [USER, calling("Rome"), RESULT, calling("Rome", "Oslo")]),
        "messages",
        r"^messages\[3\].tool_calls: got 2 calls, allowed: one call",
    ),
    "the second call of gpt-oss": (
        (GPT_OSS, [USER, calling("Rome", "Oslo")]),
        "messages",
        r"^messages\[1\].tool_calls: got 2 calls, allowed: one call",
    ),
    "the text beside a call": (
        (LLAMA, [USER, calling("Rome", content="I look."), RESULT]),
        "messages",
        r"^messages\[1\].content: got a text, allowed: none",
    ),
    "a system message alone": (
        (NEMO, [system("A")]),
        "messages",
        r"^messages\[0\]: got a system message alone, allowed: one before",
    ),
    "a system message": ((GEMMA_2, [system("A"), USER]), "messages", r"^messages\[0\]: got a system message"),
}


@pytest.mark.parametrize(("chat", "param", "message"), DROPPED.values(), ids=DROPPED.keys())
def test_what_a_template_would_drop_is_refused_by_its_place_in_one_line(chat, param, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        render(*chat)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_of_a_template_that_shows_no_question_nothing_is_known():
    assert traits_of("{{ functions }}{% if functions is not defined %}{{ raise_exception('') }}{% endif %}", {}) == (
        TemplateTraits()
    )
    assert traits_of("{{ 'fixed' }}", {}) == traits_of("{% for %}", {}) == TemplateTraits()


def test_the_work_is_linear_in_the_number_of_messages():
    """Texts joined one by one, and calls looked for from the first one on, would take a minute."""
    traits = replace(TemplateTraits(), shows_several_systems=False, shows_late_system=False, needs_short_ids=True)
    num_systems, num_calls, text = 3000, 20_000, "x" * 5000
    ids = [{"id": f"c{index}"} if index % 2 else {} for index in range(num_calls)]
    calls = [{**one, "function": {"name": "f"}} for one in ids]
    results = [{"role": "tool", "content": "", "tool_call_id": one.get("id")} for one in ids]
    many = [system(text)] * num_systems
    chat = [*many, USER, *many, {"role": "assistant", "tool_calls": calls}, *results]
    start = time.process_time()
    fitted = fit_to_template(normalize_messages(chat), traits, None)
    assert time.process_time() - start < 5
    joined = "\n\n".join([text] * num_systems)
    assert [one["content"] for one in fitted[:2]] == [joined, f"Hi\n\n{joined}"]
    assert [one["tool_call_id"] for one in fitted[3:]] == [one["id"] for one in fitted[2]["tool_calls"]]
