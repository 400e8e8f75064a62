"""What stands beside a prompt in its mapping: how it becomes tokens, by text, ids or messages."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from jpaged import Engine, InvalidRequestError, SamplingParams
from jpaged.text.chat.chat_template import render_chat

from ..tiny_model import SIZES

USER = [{"role": "user", "content": "Hi"}]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def engine(tiny: str) -> Any:
    with Engine(tiny, **SIZES) as engine:
        yield engine


def text_of(engine: Engine, prompt: Any) -> str:
    """Return the text that a prompt's tokens spell."""
    return engine.tokenizer.decode(engine.builder.encoder.encode(prompt).token_ids, skip_special_tokens=False)


def test_a_chat_ends_where_the_options_say(engine: Engine):
    whole = "<|start|>user: Hi\n<|start|>assistant: "
    assert text_of(engine, {"messages": USER}) == whole
    assert text_of(engine, {"messages": USER, "add_generation_prompt": True}) == whole
    begun = [*USER, {"role": "assistant", "content": "Hello th"}]
    continued = {"messages": begun, "continue_final_message": True}
    assert text_of(engine, continued) == "<|start|>user: Hi\n<|start|>assistant: Hello th"


@pytest.mark.parametrize("text", ["end", "n", "<|end|>", "  two\n\n", "user: Hi", "Hi"])
def test_an_answer_goes_on_behind_its_last_character_whatever_the_template_writes_there(engine: Engine, text: str):
    template = "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    encoder = replace(engine.builder.encoder, chat_template=template)
    begun = {"messages": [*USER, {"role": "assistant", "content": text}], "continue_final_message": True}
    assert encoder.encode(begun).text == f"<|start|>user: Hi<|end|>\n<|start|>assistant: {text.rstrip()}"


def test_tools_are_refused_by_what_the_model_lacks_first(engine: Engine):
    """A format of calls alone would not help a model whose template does not show tools."""
    asked = {"messages": USER, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    with pytest.raises(InvalidRequestError, match=r"^tools: .*--chat-template FILE"):
        engine.builder.encoder.encode(asked)
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match=r"^tools: .*start the engine with --tool-call-parser$"):
        replace(engine.builder.encoder, chat_template=template).encode(asked)


def test_only_the_last_tokens_are_kept_if_asked(engine: Engine):
    for prompt in ({"prompt": "abcdef"}, {"prompt_token_ids": [67, 68, 69, 70, 71, 72]}):
        whole = engine.builder.encoder.encode(prompt).token_ids
        assert engine.builder.encoder.encode({**prompt, "truncate_prompt_tokens": 4}).token_ids == whole[-4:]
    long = {"prompt": "x" * 500, "truncate_prompt_tokens": -1}
    assert len(engine.builder.encoder.encode(long).token_ids) == SIZES["max_model_len"] - 1


def test_variables_that_the_template_reads_are_passed_and_others_refused(tiny: str):
    template = "{% if shout %}{{ messages[0].content | upper }}{% else %}{{ messages[0].content }}{% endif %}"
    with Engine(tiny, **SIZES) as engine:
        render = partial(render_chat, engine.tokenizer)
        assert render(USER, template=template) == "Hi"
        assert render(USER, template=template, arguments={"shout": True}) == "HI"
        for name in ("whisper", "messages", "bos_token", "raise_exception"):
            with pytest.raises(
                InvalidRequestError, match=r"^chat_template_kwargs: .* what the chat template reads: shout"
            ):
                render(USER, template=template, arguments={name: 1})


def test_a_variable_that_the_template_does_not_read_is_told_once_and_left_out(
    engine: Engine, caplog: pytest.LogCaptureFixture
):
    whole = text_of(engine, {"messages": USER})
    for _ in range(2):
        assert text_of(engine, {"messages": USER, "chat_template_kwargs": {"whisper": 1, "messages": []}}) == whole
    (record,) = caplog.records
    assert "the chat template does not read whisper, messages" in record.message
    assert text_of(engine, {"messages": USER, "chat_template_kwargs": {"shout": 1}}) == whole
    assert "does not read shout" in caplog.records[1].message


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "prompt"),
        ({"prompt": "a", "truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
        ({"messages": USER, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": USER, "chat_template_kwargs": 5}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "assistant", "content": " "}], "continue_final_message": True},
            "continue_final_message",
        ),
        (
            {
                "messages": [*USER, {"role": "assistant", "content": "I ask.", "tool_calls": [CALL]}],
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(engine: Engine, prompt: Any, param: str):
    with pytest.raises(InvalidRequestError) as caught:
        engine.add_request("wrong", prompt, ONE)
    assert caught.value.param == param
    assert not engine.requests
