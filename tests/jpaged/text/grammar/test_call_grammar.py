"""Answers that must call tools: whatever is drawn, the reader of answers finds calls whose arguments validate."""

import json
import random
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import tokenizers

from jpaged.errors import InvalidRequestError
from jpaged.outputs import Mark
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.answers.answer_spec import spec_of_tools
from jpaged.text.answers.bound_format import bind_format, bind_marks
from jpaged.text.answers.format_names import CALL_FORMATS, answer_format
from jpaged.text.answers.whole_answer import parse_answer
from jpaged.text.chat.thinking import Thinking
from jpaged.text.chat.tools import Tool, ToolChoice, ToolSet
from jpaged.text.grammar.call_rules import CallRules
from jpaged.text.tokenizing.tokenizer import Tokenizer

from ..tokenizing.published_tokenizers import byte_tokenizer
from .grammar_walks import grammars_of

THOUGHT_OF = {
    "hermes": "qwen3", "qwen3_coder": "qwen3", "glm47": "qwen3", "gemma4": "gemma4", "mistral": "mistral",
    "openai": "openai_gptoss", "granite": "granite", "seed_oss": "seed_oss",
}  # fmt: skip
FORMATS = tuple(CALL_FORMATS)
NUM_DRAWN = 3
"""Forced answers of each format, in the tests of every day."""


def format_of(name):
    return answer_format(name, THOUGHT_OF.get(name))


def tokenizer_of(format, *, are_tokens=True, are_special=True):
    """Return a byte tokenizer in which the marks of a format are special tokens, other tokens, or text."""
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
    if are_tokens:
        backend.add_tokens([tokenizers.AddedToken(mark, special=are_special) for mark in format.marks])
    return Tokenizer(backend, {"eos_token": "<end>"})


SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 6},
            "unit": {"enum": ["celsius", "fahr enheit", ""]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string", "pattern": "^[a-z]{1,4}/[a-z.]{1,5}$"},
            "text": {"type": "string"},
            "mode": {
                "anyOf": [{"type": "integer", "minimum": 8}, {"type": "string", "maxLength": 4}, {"type": "null"}]
            },
            "is_new": {"type": "boolean"},
            "tags": {"type": "array", "items": {"enum": ["a b", "</parameter>", 3]}, "maxItems": 2},
            "note": {"type": ["string", "null"], "maxLength": 5},
        },
        "required": ["path", "text", "is_new"],
        "additionalProperties": False,
    },
    "nested.one": {
        "type": "object",
        "properties": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "odd key": {"$ref": "#/$defs/unit"}},
                "required": ["x", "odd key"],
                "additionalProperties": False,
            },
            "kind": {"$ref": "#/$defs/unit"},
        },
        "required": ["point", "kind"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["m", "km"]}},
    },
    "get": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS = tuple(Tool(name, parameters=schema) for name, schema in SCHEMAS.items())
CLOSERS = ('"', '"}', "\n</parameter>\n", "</parameter>", "</think>", "\n")
"""What a drawn text is ended with now and then: by chance alone, an end tag would never come."""


class Walker:
    """Draws outputs of grammars over one tokenizer."""

    def __init__(self, tokenizer, format):
        self.tokenizer, self.format = tokenizer, format
        self.grammars = grammars_of(tokenizer)
        self.bound = bind_format(format, tokenizer)
        self.closers = [tokenizer.encode(text, add_special_tokens=False) for text in (*CLOSERS, *format.marks)]

    def rules(self, tools, **options):
        return CallRules(tools, self.bound, **options)

    def tokens(self, rules, seed, max_tokens=3000, first=()):
        """Return drawn token ids, and whether the grammar has ended them."""
        text, _ = self.grammars.grammar_of_calls(rules)
        matcher, rng, ids = self.grammars.matcher(text), random.Random(seed), []
        wanted = list(first)
        for _ in range(max_tokens):
            bits = np.unpackbits(self.grammars.masks([matcher])[0].view(np.uint8), bitorder="little")
            assert not matcher.failure, matcher.failure
            allowed = np.flatnonzero(bits).tolist()
            assert allowed, self.tokenizer.decode(ids, skip_special_tokens=False)
            if not wanted and rng.random() < 0.1:
                wanted = list(rng.choice(self.closers))
            if wanted and not bits[wanted[0]]:
                wanted = []
            token_id = wanted.pop(0) if wanted else rng.choice(allowed)
            if self.tokenizer.eos_token_id in allowed and rng.random() < 0.3:
                token_id = self.tokenizer.eos_token_id
            is_over = matcher.advance(token_id)
            if token_id != self.tokenizer.eos_token_id:
                ids.append(token_id)
            if is_over:
                return ids, True
        return ids, False

    def is_allowed(self, rules, text):
        """Return whether a text, in which marks are tokens, is a whole output; "prefix" if it can only begin one."""
        matcher = self.grammars.matcher(self.grammars.grammar_of_calls(rules)[0])
        for token_id in self.tokenizer.encode(text, add_special_tokens=False):
            bits = np.unpackbits(self.grammars.masks([matcher])[0].view(np.uint8), bitorder="little")
            if not bits[token_id]:
                return False
            matcher.advance(token_id)
        return matcher.parser.is_accepting() or "prefix"

    def answer(self, tools, ids, opening=""):
        """Return what the reader of answers finds in an output."""
        text, marks = "", []
        pending = b""
        for token_id in ids:
            if token_id in self.bound.mark_ids:
                marks.append(Mark(len(text), token_id))
                if token_id in self.bound.special_ids:
                    continue  # The text leaves it out.
            pending += self.tokenizer.token_bytes(token_id)
            try:
                text, pending = text + pending.decode(), b""
            except UnicodeDecodeError:
                continue
        return parse_answer(text, self.bound, spec_of_tools(tools, opening=opening), marks)


def check_calls(answer, tools):
    for call in answer.tool_calls:
        tool = next(tool for tool in tools.callable_tools if tool.name == call.name)
        jsonschema.validate(json.loads(call.arguments), tool.parameters or {"maxProperties": 0})


@pytest.fixture(scope="module")
def walkers():
    made = {}

    def walker(name, *, are_tokens=True):
        if (name, are_tokens) not in made:
            format = format_of(name)
            made[name, are_tokens] = Walker(tokenizer_of(format, are_tokens=are_tokens), format)
        return made[name, are_tokens]

    return walker


def check_forced(walker, tools, seed, **options):
    ids, is_over = walker.tokens(walker.rules(tools, **options), seed)
    if not is_over:
        return None
    answer = walker.answer(tools, ids)
    written = walker.tokenizer.decode(ids, skip_special_tokens=False)
    assert answer.tool_calls, written
    assert not answer.content.strip(), (answer, written)
    check_calls(answer, tools)
    return answer


# The marks of harmony are always tokens.
FORMS = [(name, are_tokens) for name in FORMATS for are_tokens in (True, False) if are_tokens or name != "openai"]


@pytest.mark.parametrize(("name", "are_tokens"), FORMS, ids=str)
def test_forced_calls_validate(name, are_tokens, walkers):
    walker = walkers(name, are_tokens=are_tokens)
    tools = ToolSet(TOOLS, ToolChoice("required"))
    answers = [check_forced(walker, tools, seed) for seed in range(NUM_DRAWN)]
    ended = [answer for answer in answers if answer is not None]
    assert len(ended) >= len(answers) * 0.6


CODEX_PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar of Codex's tool apply_patch."""


@pytest.mark.parametrize("name", ["mistral", "glm47"])
def test_marks_may_be_tokens_that_are_not_special(name):
    format = format_of(name)
    walker = Walker(tokenizer_of(format, are_special=False), format)
    tools = ToolSet(TOOLS, ToolChoice("required"))
    assert [check_forced(walker, tools, seed) for seed in range(3)] != [None] * 3


WEATHER, GET = (Tool(name, parameters=SCHEMAS[name]) for name in ("get_weather", "get"))
STRICT = replace(WEATHER, is_strict=True)
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
WRONG = ONE.replace('"days": 2', '"days": 99')
EMPTY = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
YES = StructuredOutputsParams(json={"enum": ["yes", "no"]})
OPEN, OPTIONAL = Thinking.OPEN, Thinking.OPTIONAL
# Tools, their choice, whether several may be called, more of the rules, and texts with whether each is a whole output.
MODES = {
    "required": (
        (WEATHER, GET), ToolChoice("required"), True, {},
        {ONE: True, EMPTY + "\n" + ONE: True, "Hi": False, "": "prefix", WRONG: False, ONE + "Hi": False},
    ),
    "required, one": (
        (WEATHER, GET), ToolChoice("required"), False, {}, {ONE: True, EMPTY: True, EMPTY + "\n" + ONE: False},
    ),
    "named": (
        (WEATHER, GET), ToolChoice("named", ("get",)), True, {}, {EMPTY: True, ONE: False, EMPTY + "\n" + EMPTY: False},
    ),
    "allowed, required": (
        (WEATHER, GET), ToolChoice("allowed", ("get",), is_required=True), True, {},
        {EMPTY: True, EMPTY + "\n" + EMPTY: True, ONE: False, "Hi": False},
    ),
    "allowed": (
        (WEATHER, GET), ToolChoice("allowed", ("get",)), True, {},
        {"Hi": True, EMPTY: True, "Hi" + EMPTY + "Hi": True, ONE: False, "Hi" + ONE: False},
    ),
    "strict": (
        (STRICT, GET), ToolChoice(), True, {},
        {
            "Hi </tool_call> {": True, "Hi " + ONE + "\n" + EMPTY + "Hi": True, WRONG: False,
            EMPTY.replace("{}}", '{"any": [1]}}'): True, "<tool_call>x": False, "": True,
            "Hi <think>a <tool_call> b": False, "<think>hm</think>" + ONE: True,
        },
    ),
    "strict, one": (
        (STRICT, GET), ToolChoice(), False, {},
        {"Hi": True, "Hi" + ONE: True, ONE + "\n" + EMPTY: False, ONE + "Hi": False},
    ),
    "one, not strict": (
        (WEATHER, GET), ToolChoice(), False, {}, {WRONG: True, EMPTY + EMPTY: False, "<tool_call>x": False},
    ),
    "behind a thought": (
        (GET,), ToolChoice("required"), True, {"thinking": OPEN},
        {"hm</think>\n\n" + EMPTY: True, EMPTY: False, "hm" * 50 + "</think>" + EMPTY: True},
    ),
    "perhaps a thought": (
        (GET,), ToolChoice("required"), True, {"thinking": OPTIONAL}, {"<think>hm</think>" + EMPTY: True, EMPTY: True},
    ),
    "behind a short thought": (
        (GET,), ToolChoice("required"), True, {"thinking": OPEN, "thought_budget": 2},
        {"hm</think>" + EMPTY: True, "hmm</think>" + EMPTY: False},
    ),
    "free, behind a short thought": (
        (STRICT,), ToolChoice(), True, {"thinking": OPTIONAL, "thought_budget": 2},
        {"<think>hm</think>Hi": True, "<think>hmm": False, "hmm <think>hm</think>" + ONE: True},
    ),
    "an answer or calls": (
        (WEATHER, GET), ToolChoice(), True, {"structured": YES},
        {'"yes"': True, ONE: True, EMPTY + EMPTY: True, '"Hi"': False, '"yes"' + ONE: False, WRONG: True},
    ),
    "an answer or calls, behind a thought": (
        (STRICT,), ToolChoice(), True, {"structured": YES, "thinking": OPEN, "thought_budget": 9},
        {'hm</think>\n"no"': True, "hm</think>" + ONE: True, "hm</think>" + WRONG: False, "hm" * 5: False},
    ),
    "calls alone": ((GET,), ToolChoice("required"), True, {"structured": YES}, {EMPTY: True, '"yes"': False}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODES)
def test_what_a_choice_of_tools_allows(name, walkers):
    tools, choice, is_parallel, options, texts = MODES[name]
    walker = walkers("hermes")
    rules = walker.rules(ToolSet(tools, choice, is_parallel), **options)
    assert rules.needs_grammar
    assert {text: walker.is_allowed(rules, text) for text in texts} == texts


def test_nothing_is_enforced_where_nothing_has_to_be():
    for tools in (ToolSet((WEATHER,)), ToolSet((STRICT,), ToolChoice("none")), ToolSet((Tool("f", kind="custom"),))):
        assert not CallRules(tools, bind_marks(format_of("hermes"), {})).needs_grammar


ALONE = '{"name": "get", "parameters": {}}'
LLAMA = {
    "required": (ToolChoice("required"), {}, {ALONE: True, f"{ALONE}; {ALONE}": True, f"<|python_tag|>{ALONE}": False}),
    "free": (
        ToolChoice("allowed", ("get",)), {},
        {ALONE: True, "Hi {": True, '{"a": 1}': False, f"Hi <|python_tag|>{ALONE}": True, "{": "prefix", " \n1": True},
    ),
    "an answer or calls": (ToolChoice(), {"structured": YES}, {'"yes"': True, f"<|python_tag|>{ALONE}": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", LLAMA)
def test_calls_without_a_mark(name, walkers):
    choice, options, texts = LLAMA[name]
    walker = walkers("llama3_json")
    rules = walker.rules(ToolSet((GET, WEATHER), choice), **options)
    assert {text: walker.is_allowed(rules, text) for text in texts} == texts


@pytest.mark.parametrize("name", FORMATS)
def test_under_auto_text_is_free_and_calls_of_strict_tools_are_not(name, walkers):
    walker, tools = walkers(name), ToolSet(tuple(replace(tool, is_strict=True) for tool in TOOLS))
    num_calls = 0
    for seed in range(4):
        first = walker.format.calls.marks[0] if name != "openai" else "<|channel|>commentary to=functions."
        first = walker.tokenizer.encode("Hi" * (name != "openai") + first, add_special_tokens=False)
        ids, is_over = walker.tokens(walker.rules(tools), seed, first=first)
        if is_over:
            answer = walker.answer(tools, ids)
            check_calls(answer, tools)
            num_calls += len(answer.tool_calls)
    assert num_calls > 0


PATCH = "*** Begin Patch\n*** Update File: a.py\n@@ def f\n-x = 1\n+x = </parameter>\n*** End Patch"
CUSTOM = {
    "qwen3_coder": "<tool_call>\n<function=NAME>\n<parameter=input>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>NAME<arg_key>input</arg_key><arg_value>{}</arg_value></tool_call>",
    "gemma4": '<|tool_call>call:NAME{{input:<|"|>{}<|"|>}}<tool_call|>',
    "openai": "<|channel|>commentary to=functions.NAME<|message|>{}",
}


@pytest.mark.parametrize("are_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", CUSTOM)
def test_the_text_of_a_custom_tool_follows_its_grammar(name, are_tokens, walkers):
    walker = walkers(name, are_tokens=are_tokens)
    patch = Tool("apply_patch", kind="custom", grammar=CODEX_PATCH)
    word = Tool("word", kind="custom", grammar="[a-z]{2,5}!", grammar_syntax="regex")
    text = Tool("text", kind="custom")
    tools = ToolSet((patch, word, text), ToolChoice("required"))
    rules = walker.rules(tools)
    assert walker.grammars.grammar_of_calls(rules)[1] == ()
    good = {"apply_patch": [PATCH, PATCH + "\n"], "word": ["ab!"], "text": [" ", "a\n<b>"]}
    bad = {"apply_patch": ["x", "*** Begin Patch\n*** End Patch"], "word": ["ab", "ab!c"], "text": []}
    for tool, inputs in good.items():
        for input in inputs:
            written = CUSTOM[name].replace("NAME", tool).format(input)
            assert walker.is_allowed(rules, written) is True, written
            (call,) = walker.answer(tools, walker.tokenizer.encode(written, add_special_tokens=False)).tool_calls
            assert (call.name, call.arguments, call.is_custom) == (tool, input, True)
        for input in bad[tool]:
            assert walker.is_allowed(rules, CUSTOM[name].replace("NAME", tool).format(input)) is not True, input
    for seed in range(2):
        ids, is_over = walker.tokens(walker.rules(ToolSet((patch,), ToolChoice("required"))), seed, first=[])
        answer = walker.answer(tools, ids)
        assert not is_over or answer.tool_calls[0].arguments.startswith("*** Begin Patch\n***")


# What cannot be enforced


NOT = {"type": "object", "properties": {"a": {"not": {"const": 1}}}, "required": ["a"]}
FAILS = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4"])
@pytest.mark.parametrize(("schema", "place"), [(NOT, "#/properties/a/not"), (FAILS, "#/properties/a")], ids=str)
def test_a_schema_that_cannot_be_enforced_is_refused_if_strict_and_else_told(name, schema, place, walkers):
    walker, choice = walkers(name), ToolChoice("required")
    loose, strict = Tool("f", parameters=schema), Tool("f", parameters=schema, is_strict=True)
    rules = walker.rules(ToolSet((GET, loose), choice))
    (warning,) = walker.grammars.grammar_of_calls(rules)[1]
    assert warning.startswith("tools[1].function.parameters is not enforced: ")
    assert place in warning
    ids, is_over = walker.tokens(rules, 1)
    assert not is_over or walker.answer(rules.tools, ids).tool_calls
    with pytest.raises(InvalidRequestError, match=place) as caught:
        walker.grammars.grammar_of_calls(walker.rules(ToolSet((GET, strict))))
    assert caught.value.param == "tools[1].function.parameters"


def test_a_grammar_where_texts_are_json_is_told(walkers):
    walker = walkers("hermes")
    patch = Tool("apply_patch", kind="custom", grammar=CODEX_PATCH)
    (warning,) = walker.grammars.grammar_of_calls(walker.rules(ToolSet((patch,))))[1]
    assert warning.startswith("tools[0].custom.format.grammar is not enforced: this model writes the texts of tools as")


@pytest.mark.parametrize(
    ("grammar", "syntax"), [('start: "a', "lark"), ("start: b", "lark"), ("(a", "regex"), ("a(?=b)", "regex")]
)
@pytest.mark.parametrize("name", ["qwen3_coder", "hermes"])
def test_a_bad_grammar_of_a_custom_tool_is_refused(name, grammar, syntax, walkers):
    walker = walkers(name)
    tool = Tool("f", kind="custom", grammar=grammar, grammar_syntax=syntax)
    with pytest.raises(InvalidRequestError) as caught:
        walker.grammars.grammar_of_calls(walker.rules(ToolSet((GET, tool))))
    assert caught.value.param == "tools[1].custom.format.grammar"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_many_large_schemas_are_enforced_up_to_a_bound_of_bytes(name, walkers):
    schema = {"type": "object", "properties": {f"p{n}": {"enum": ["x" * 80 * 60]} for n in range(12)}}
    tools = tuple(Tool(f"f{n}", parameters=schema) for n in range(128))
    walker, choice = walkers(name), ToolChoice("required")
    text, (warning,) = walker.grammars.grammar_of_calls(walker.rules(ToolSet(tools, choice)))
    assert "more are not enforced: more than 131072 bytes of schemas of all tools" in warning
    assert len(text) < 1 << 20
    ids, is_over = walker.tokens(walker.rules(ToolSet(tools, choice)), 0, first=[], max_tokens=200)
    assert not is_over or walker.answer(ToolSet(tools), ids).tool_calls
    strict = ToolSet(tuple(replace(tool, is_strict=True) for tool in tools))
    with pytest.raises(InvalidRequestError, match="more than 131072 bytes"):
        walker.grammars.grammar_of_calls(walker.rules(strict))


def test_tools_that_were_asked_for_before_are_not_compiled_again(walkers, monkeypatch):
    """As a second turn does: the same tools again, read from another body."""
    walker = walkers("hermes")
    tools = [replace(WEATHER, name=f"weather_{number}") for number in range(16)]
    text = walker.grammars.grammar_of_calls(walker.rules(ToolSet(tuple(tools), ToolChoice("required"))))[0]

    def compiled(text):
        raise AssertionError("compiled again")

    monkeypatch.setattr(walker.grammars, "_compiled", compiled)
    again = ToolSet(tuple(replace(tool, parameters=json.loads(json.dumps(tool.parameters))) for tool in tools))
    again = replace(again, choice=ToolChoice("required"))
    assert walker.grammars.grammar_of_calls(walker.rules(again))[0] == text
    assert walker.grammars.matcher(text)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "are_tokens"), FORMS, ids=str)
def test_500_forced_answers_of_each_format_validate(name, are_tokens, walkers):
    walker, tools = walkers(name, are_tokens=are_tokens), ToolSet(TOOLS, ToolChoice("required"))
    num_ended, seed = 0, 1000
    while num_ended < 500:
        num_ended += check_forced(walker, tools, seed) is not None
        seed += 1
    assert seed < 1800


@pytest.mark.parametrize(("name", "are_tokens"), [("qwen3_coder", True), ("minimax_m2", True), ("gemma4", False)])
def test_a_text_of_a_bounded_length_ends_at_its_end_mark(name, are_tokens, walkers):
    """That no text of up to 256 characters goes on behind an end mark took more work than a step may."""
    properties = {name: {"type": "string", "maxLength": 256} for name in ("query", "cursor")}
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    tools = ToolSet((Tool("list", parameters=parameters),), ToolChoice("required"))
    answers = [check_forced(walkers(name, are_tokens=are_tokens), tools, seed) for seed in range(4)]
    assert any(json.loads(call.arguments) for answer in answers if answer for call in answer.tool_calls)


def test_no_text_stands_beside_an_answer_of_a_structure_in_channels(walkers):
    walker, tools = walkers("openai"), ToolSet(TOOLS)
    answer = "<|channel|>final<|message|>{}"
    said = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    object_ = StructuredOutputsParams(json_object=True)
    assert walker.is_allowed(walker.rules(tools, structured=object_), answer)
    assert not walker.is_allowed(walker.rules(tools, structured=object_), said + answer)
    strict = ToolSet(tuple(replace(tool, is_strict=True) for tool in TOOLS))
    assert walker.is_allowed(walker.rules(strict), said + answer)
