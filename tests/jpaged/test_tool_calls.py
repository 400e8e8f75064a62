"""Forced tool calls of a random model at temperature 1: each that ends is a call whose arguments validate."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jpaged import Engine, InvalidRequestError, SamplingParams
from jpaged.outputs import RequestOutput

from .test_structured_outputs import SIZES
from .text.grammar.test_call_grammar import CODEX_PATCH
from .tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("shared_executables", "few_buckets")
TEMPLATE = """{# <think> </think>, and calls within FORMAT #}
{%- for tool in tools or [] %}{{ tool.function.name }}({{ tool.function.parameters.properties | join }}) {% endfor %}
{%- for m in messages %}<|start|>{{ m.role }}: {{ m.content }}
{% endfor %}<|start|>assistant: """
FORMATS = {
    "hermes": "<tool_call></tool_call> XML tags",
    "qwen3_coder": "<tool_call> <function= <parameter=",
    "glm47": "<tool_call> <arg_key> <arg_value>",
    "gemma4": "<|tool_call> <tool_call|>",
    "mistral": "[TOOL_CALLS]",
    "llama3_json": '{"name": function name, "parameters": ',
    "openai": "<|channel|>analysis <|call|>",
}
EVERY_DAY = ("hermes", "qwen3_coder")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW: dict[str, Any] = {"type": "object", "properties": {"utc": {"type": "boolean"}}, "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "now": NOW}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]  # fmt: skip
ASKED = [{"role": "user", "content": "What is the weather?"}]


def engine_of(directory: Path, name: str) -> Engine:
    write_tiny_model(directory)
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "chat_template": TEMPLATE.replace("FORMAT", FORMATS[name])}))
    return Engine(str(directory), **SIZES, num_blocks=1025)


def check(engine: Engine, output: RequestOutput) -> int:
    """Check the calls of all samples but those that `max_tokens` has cut; return how many samples have ended."""
    num_ended = 0
    for index, sample in enumerate(output.outputs):
        answer = engine.parse_answer(output, index=index, tools=TOOLS)
        has_ended = sample.finish_reason == "stop"
        num_ended += has_ended
        assert answer.tool_calls or not has_ended, sample.text
        assert not answer.content.strip() or not has_ended, sample.text
        for call in answer.tool_calls if has_ended else answer.tool_calls[:-1]:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    return num_ended


def params(budget: int = 5, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=1, thinking_token_budget=budget, **options)


@pytest.mark.parametrize(
    ("name", "num_answers"),
    [*((name, 20) for name in EVERY_DAY), *(pytest.param(name, 500, marks=pytest.mark.slow) for name in FORMATS)],
)
def test_forced_calls_of_a_random_model_validate(name: str, num_answers: int, tmp_path: Path) -> None:
    with engine_of(tmp_path, name) as engine:
        num_ended = number = 0
        budget = 0 if name == "openai" else 5  # The end of harmony's thoughts is the tiny model's EOS.
        while num_ended < num_answers:
            asked = [{"role": "user", "content": f"Weather {number}?"}]
            forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": number % 5 == 4}
            (output,) = engine.chat(asked, params(budget, n=20, max_tokens=170), use_tqdm=False, **forced)
            num_ended += check(engine, output)
            number += 1
            assert num_ended >= 5 * number


@pytest.mark.slow
def test_what_a_custom_tool_gets_follows_its_grammar(tmp_path: Path) -> None:
    custom = {"name": "apply_patch", "format": {"type": "grammar", "grammar": {
        "syntax": "lark", "definition": CODEX_PATCH}}}  # fmt: skip
    tools = [{"type": "custom", "custom": custom}]
    for name in ("qwen3_coder", "gemma4", "openai"):
        with engine_of(tmp_path / name, name) as engine:
            asked: dict[str, Any] = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
            (output,) = engine.chat(ASKED, params(0, n=20, max_tokens=170), use_tqdm=False, **asked)
            num_calls = 0
            for index in range(20):
                for call in engine.parse_answer(output, index=index, tools=tools).tool_calls:
                    num_calls += 1
                    assert "*** Begin Patch\n".startswith(call.arguments[:16])
                    if output.outputs[index].finish_reason == "stop":
                        assert call.arguments.rstrip("\n").endswith("\n*** End Patch")
            assert num_calls == 20


def test_what_no_tool_can_be_is_refused_by_its_place_and_a_neighbour_goes_on(tmp_path: Path) -> None:
    bad = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"not": {"const": 1}}}}}}  # fmt: skip
    with engine_of(tmp_path, "hermes") as engine:
        with pytest.raises(InvalidRequestError, match="#/properties/a/not") as caught:
            engine.chat(ASKED, params(max_tokens=5), use_tqdm=False, tools=[TOOLS[0], bad])
        assert caught.value.param == "tools[1].function.parameters"
        (output,) = engine.chat(ASKED, params(max_tokens=40), use_tqdm=False, tools=TOOLS)
        assert len(output.outputs[0].token_ids) > 0
