"""Tools in Python: `Engine.chat(tools=)`, what the model sees of them, and calls in its answers."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jpaged import LLM, BeamSearchParams, Engine, InvalidRequestError, SamplingParams
from jpaged.outputs import RequestOutput
from jpaged.text.answers.whole_answer import Answer, ToolCall

from .commands.command_line import ROOT, generate, records
from .serving.scripted import SIZES, write_scripted_model

TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
PATCH = {"type": "custom", "custom": {"name": "patch"}}
USER = [{"role": "user", "content": "Hi <think>"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "n": 1.50}}\n</tool_call>'


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model: Path = write_scripted_model(tmp_path_factory.mktemp("model"))
    with LLM(str(model), load_format="dummy", **SIZES) as llm:
        yield llm


def written(llm: Engine, text: str, **options: Any) -> RequestOutput:
    """Return the output of a chat as if the model had written `text`, up to its end token."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    (output,) = llm.chat(USER, params, use_tqdm=False, **options)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    sample = dataclasses.replace(
        output.outputs[0], text=llm.tokenizer.decode(ids), token_ids=(*ids, 0), finish_reason="stop", marks=()
    )
    return dataclasses.replace(output, outputs=(sample,))


def test_a_chat_shows_its_tools_to_the_model(llm: Engine) -> None:
    output = written(llm, "", tools=[TOOL, PATCH], tool_choice="none", chat_template_kwargs={"enable_thinking": False})
    assert output.prompt == llm.render_chat(
        USER, tools=[TOOL, PATCH], chat_template_kwargs={"enable_thinking": False}
    ), "no choice changes the prompt"
    assert '{"type": "function", "function": {"name": "weather", "parameters"' in output.prompt
    assert '"name": "patch"' in output.prompt
    assert output.prompt.endswith("<|start|>assistant: <think>\n\n</think>\n\n")
    assert llm.render_chat(USER, add_generation_prompt=False) == "<|start|>user: Hi <think><|end|>\n"


def test_the_answer_of_an_output_has_thoughts_content_and_calls(llm: Engine) -> None:
    output = written(llm, f"<think>\nHm.\n</think>\n\nI look.\n{CALL}", tools=[TOOL])
    call = ToolCall("weather", '{"city": "Köln", "n": 1.50}')
    assert llm.parse_answer(output, tools=[TOOL]) == Answer("Hm.", "I look.", (call,))
    assert llm.parse_answer(output).tool_calls == (call,), "without tools every name is one"
    other = {"type": "function", "function": {"name": "clock"}}
    assert llm.parse_answer(output, tools=[other]) == Answer("Hm.", f"I look.\n{CALL}", ())
    cut = written(llm, CALL[:60], tools=[TOOL])
    assert json.loads(llm.parse_answer(cut, tools=[TOOL]).tool_calls[0].arguments)["city"] == "Köln"
    custom = written(
        llm, '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>', tools=[PATCH]
    )
    assert llm.parse_answer(custom, tools=[PATCH]).tool_calls == (ToolCall("patch", "a\nb", is_custom=True),)


def test_an_answer_begins_where_the_prompt_has_left_it(llm: Engine) -> None:
    """The user's own <think> opens nothing; the empty thought of the template is closed."""
    off = written(llm, "Hello", chat_template_kwargs={"enable_thinking": False})
    assert llm.parse_answer(off) == Answer(None, "Hello", ())
    assert llm.parse_answer(written(llm, "Hello")) == Answer(None, "Hello", ())
    rendered = {"prompt": llm.render_chat(USER) + "<think>\nSo", "add_special_tokens": False}
    (output,) = llm.generate(rendered, SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    answer = written(llm, " be it.</think>Yes")
    answer = dataclasses.replace(answer, prompt_token_ids=output.prompt_token_ids)
    assert llm.parse_answer(answer) == Answer("be it.", "Yes", ())


def test_a_required_call_follows_its_schema_in_python_and_in_lines_of_a_file(llm: Engine, tmp_path: Path) -> None:
    """The model is random: only the grammar makes it call."""
    chat: dict[str, Any] = {
        "tools": [TOOL, PATCH],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    params = SamplingParams(max_tokens=300, temperature=1, seed=5)
    (output,) = llm.chat(USER, params, use_tqdm=False, **chat)
    answer = llm.parse_answer(output, tools=chat["tools"])
    (call,) = answer.tool_calls
    assert (answer.content, call.name) == ("", "weather")
    assert set(json.loads(call.arguments)) <= {"city"}
    prompts, results = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [{"messages": USER, **chat, "seed": 5}, {"messages": USER, "max_tokens": 1}]
    prompts.write_text("".join(json.dumps({"max_tokens": 300, "temperature": 1, **line}) + "\n" for line in lines))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    run = generate("-m", llm.config.model, "--load-format=dummy", *flags, "--prompt-file", prompts, "-o", results)
    assert run.returncode == 0, run.stderr
    called, plain = records(results)
    assert "answer" not in plain["outputs"][0]
    found = called["outputs"][0]["answer"]
    assert (found["content"], found["tool_calls"][0]["name"]) == ("", "weather")
    assert set(json.loads(found["tool_calls"][0]["arguments"])) <= {"city"}


def test_a_tool_turn_goes_back_to_the_model(llm: Engine) -> None:
    answer = llm.parse_answer(written(llm, CALL, tools=[TOOL]), tools=[TOOL])
    calls = [{"id": "c", "function": {"name": one.name, "arguments": one.arguments}} for one in answer.tool_calls]
    turn = [*USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": "18"}]
    text = llm.render_chat(turn, tools=[TOOL])
    assert text.endswith(f"{CALL.replace('1.50', '1.5')}<|end|>\n<|start|>tool: 18<|end|>\n<|start|>assistant: ")


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(llm: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tools.md").read_text(), re.DOTALL)
    engine = f"Engine({llm.config.model!r}, load_format='dummy', **{SIZES})"
    exec(code.replace('Engine("Qwen/Qwen3-0.6B")', engine).replace("max_tokens=500", "max_tokens=5"), {})
    assert capsys.readouterr().out.endswith("\n")


def test_what_cannot_be_is_refused_by_name(llm: Engine) -> None:
    for options, message in (
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function: got none"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice: got .* without tools"),
        ({"toolz": [TOOL]}, "toolz: unknown key of a prompt; did you mean tools"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            llm.chat(USER, SamplingParams(max_tokens=1), use_tqdm=False, **options)
    with pytest.raises(InvalidRequestError, match="toolz: unknown argument; did you mean tools"):
        llm.render_chat(USER, toolz=[TOOL])  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="tools: got it and a beam search"):
        llm.beam_search(
            {"messages": USER, "tools": [TOOL]}, BeamSearchParams(beam_width=2, max_tokens=1), use_tqdm=False
        )
    with pytest.raises(InvalidRequestError, match=r"^index: got 1, allowed: 0 to 0"):
        llm.parse_answer(written(llm, "a"), index=1)
    with pytest.raises(InvalidRequestError, match=r"^output: got an array of 1 item, allowed: one RequestOutput"):
        llm.parse_answer([written(llm, "a")])  # type: ignore[arg-type]


def test_tools_are_refused_where_the_format_of_calls_is_not_known(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ tools }}"
    model = write_scripted_model(tmp_path / "model", template=template)
    with Engine(str(model), load_format="dummy", **SIZES) as engine:
        with pytest.raises(
            InvalidRequestError, match=r"tools: got an array of 1 item, .* start the engine with --tool-"
        ):
            engine.render_chat(USER, tools=[TOOL])
        with pytest.raises(InvalidRequestError, match=r"^prompt 0: tools: got an array of 1 item"):
            engine.chat(USER, SamplingParams(max_tokens=1), use_tqdm=False, tools=[TOOL])
