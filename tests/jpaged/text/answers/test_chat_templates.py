"""What chat templates write of an assistant's turn is read back."""

import json

from jpaged.messages import AnswerSpec
from jpaged.text.answers.bound_format import bind_marks
from jpaged.text.answers.format_names import answer_format, detect_calls, detect_thought
from jpaged.text.answers.whole_answer import parse_answer
from jpaged.text.chat.chat_template import render_chat_template
from jpaged.text.chat.tools import tools_of

from ..tokenizing.published_tokenizers import llama_cpp_models

NAMES = ("get_it", "f")
TYPES = {"city": ("string",), "n": ("integer",), "l": ("array",)}
ARGUMENTS = ({"city": 'Pa\n ris </x> "é"', "n": 3, "l": [1.5, 2]}, {"city": "b"})
ONE_CALL = ("llama3_json", "openai")
"""Formats whose templates write one call in a turn."""
SHOWS_NO_CALLS = ("ibm-granite-granite-3.3-2B-Instruct",)


def test_calls_that_templates_write_are_read_back():
    properties = {"city": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}
    parameters = {"type": "object", "properties": properties}
    functions = [{"name": name, "description": "It.", "parameters": parameters} for name in NAMES]
    options = {
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
        "tools": tools_of([{"type": "function", "function": function} for function in functions]),
    }
    num_read = 0
    for path in sorted((llama_cpp_models() / "templates").glob("*.jinja")):
        template = path.read_text()
        names = detect_calls(template), detect_thought(template, lambda mark: False)
        if names[0] is None or path.stem in SHOWS_NO_CALLS:
            continue
        written = list(zip(NAMES, ARGUMENTS, strict=True))[: 1 if names[0] in ONE_CALL else 2]
        calls = [
            {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(written)
        ]
        user = {"role": "user", "content": "Hi"}
        before = render_chat_template(template, [user], add_generation_prompt=False, **options)
        prompt = render_chat_template(template, [user], add_generation_prompt=True, **options)
        turn = [user, {"role": "assistant", "content": "", "tool_calls": calls}]
        text = render_chat_template(template, turn, add_generation_prompt=False, **options)
        # A prompt may begin a thought, of which the turn has none.
        head = prompt if text.startswith(prompt) else before
        assert text.startswith(head), path.stem
        spec = AnswerSpec(tools=dict.fromkeys(NAMES, TYPES), opening=head[len(before) :])
        answer = parse_answer(text[len(head) :], bind_marks(answer_format(*names), {}), spec)
        assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == written, path.stem
        num_read += 1
    assert num_read == 37
