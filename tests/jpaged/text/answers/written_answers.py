"""Answers as models write them, drawn by hypothesis: thoughts, texts and calls, whole, broken and cut."""

import itertools
import json
import re
from dataclasses import dataclass

from hypothesis import assume
from hypothesis import strategies as st

from jpaged.outputs import Mark
from jpaged.text.answers.bound_format import BoundFormat, bind_marks
from jpaged.text.answers.format_names import answer_format
from jpaged.text.answers.formats import AnswerFormat
from jpaged.text.answers.whole_answer import ToolCall

NAMES = {
    "hermes": "qwen3", "qwen3_coder": "qwen3", "glm47": "qwen3", "gemma4": "gemma4", "llama3_json": None,
    "mistral": "mistral", "openai": "openai_gptoss",
}  # fmt: skip
"""Format of calls → format of thoughts."""
TYPES = {"text": ("string",), "n": ("integer",), "o": ("object",), "l": ("array",), "on": ("boolean",)}
TOOLS = {"f": TYPES, "get_it": TYPES}
MARKS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "</function>", "</parameter>", "<parameter=", "<arg_key>",
    "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", "<|channel|>", "<|call|>", "<|end|>",
    "<|python_tag|>", "<function=",
)  # fmt: skip
PIECES = st.sampled_from(
    ["a", "b c", " ", "\n", "\n\n", "<", "</", "[", "{", "}", '"', "\\", "é", "😀", "to=", ":", ","]
)
TEXTS = st.lists(PIECES, max_size=6).map("".join)
STRINGS = st.lists(st.one_of(PIECES, st.sampled_from(MARKS)), max_size=6).map("".join)
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-99, 10**20), st.floats(-9, 9), STRINGS),
    lambda values: st.one_of(st.lists(values, max_size=3), st.dictionaries(STRINGS, values, max_size=3)),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": STRINGS,
        "n": st.integers(-5, 10**18),
        "on": st.booleans(),
        "o": st.dictionaries(st.sampled_from(["k", "k 2", "ü"]), JSON_VALUES, max_size=2),
        "l": st.lists(JSON_VALUES, max_size=2),
    },
)
CALLS = st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS)


def _gemma(value: object) -> str:
    """Return a value as Gemma 4's template writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_gemma(key)}:{_gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


_AMBIGUOUS = re.compile(
    r"</(parameter|arg_value)>\s*(<parameter=|<arg_key>|</function>|</?tool_call>)|</function>\s*</?tool_call>"
)
"""A value that holds the end of a call by tags cannot be told from that end."""


def _tag(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_calls(name: str, calls: list[tuple[str, dict[str, object]]], *, as_list: bool) -> str:
    """Return calls as the template of a format writes them; `as_list`: by its other way, if it has two."""
    if name == "hermes":
        objects = [json.dumps({"name": tool, "arguments": arguments}) for tool, arguments in calls]
        if as_list:
            return "<tool_call>\n" + "\n".join(objects) + "\n</tool_call>"
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
    if name == "qwen3_coder":
        return "\n".join(
            f"<tool_call>\n<function={tool}>\n"
            + "".join(f"<parameter={key}>\n{_tag(value)}\n</parameter>\n" for key, value in arguments.items())
            + "</function>\n</tool_call>"
            for tool, arguments in calls
        )
    if name == "glm47":
        line = "\n" if as_list else ""
        return line.join(
            f"<tool_call>{tool}{line}"
            + "".join(
                f"<arg_key>{key}</arg_key>{line}<arg_value>{_tag(value)}</arg_value>{line}"
                for key, value in arguments.items()
            )
            + "</tool_call>"
            for tool, arguments in calls
        )
    if name == "gemma4":
        return "".join(
            f"<|tool_call>call:{tool}{{" + ",".join(f"{key}:{_gemma(one)}" for key, one in arguments.items())
            + "}<tool_call|>"
            for tool, arguments in calls
        )  # fmt: skip
    if name == "llama3_json":
        return "; ".join(json.dumps({"name": tool, "parameters": arguments}) for tool, arguments in calls)
    if name == "mistral" and as_list:
        return "[TOOL_CALLS]" + json.dumps([
            {"name": tool, "arguments": arguments, "id": "abcdefghi"} for tool, arguments in calls
        ])  # fmt: skip
    if name == "mistral":
        return "".join(f"[TOOL_CALLS]{tool}[ARGS]{json.dumps(arguments)}" for tool, arguments in calls)
    return "<|start|>assistant".join(
        (f" to=functions.{tool}<|channel|>commentary json" if as_list
         else f"<|channel|>commentary to=functions.{tool} <|constrain|>json")
        + f"<|message|>{json.dumps(arguments)}<|call|>"
        for tool, arguments in calls
    )  # fmt: skip


def write_answer(name: str, thought: str | None, text: str, calls: str) -> str:
    """Return an answer as the template of a format writes it, behind its generation prompt."""
    if name == "openai":
        messages = [f"<|channel|>analysis<|message|>{thought}<|end|>"] if thought is not None else []
        messages += [f"<|channel|>{'commentary' if calls else 'final'}<|message|>{text}<|end|>"] if text else []
        return "<|start|>assistant".join(messages + [calls] * bool(calls))
    before = ""
    if thought is not None and NAMES[name] is not None:
        opened, closed = {
            "qwen3": ("<think>\n", "\n</think>\n\n"),
            "gemma4": ("<|channel>thought\n", "\n<channel|>"),
            "mistral": ("[THINK]", "[/THINK]"),
        }[NAMES[name]]
        before = f"{opened}{thought}{closed}"
    return before + text + ("\n" if text and calls and name in ("hermes", "qwen3_coder") else "") + calls


@dataclass(frozen=True)
class Written:
    """An answer and what it holds."""

    text: str
    thought: str
    content: str
    calls: tuple[tuple[str, dict[str, object]], ...]


@st.composite
def whole_answers(draw: st.DrawFn, name: str) -> Written:
    """Draw an answer as a model should write it."""
    thought = draw(st.one_of(st.none(), TEXTS)) if NAMES[name] else None
    content = draw(TEXTS)
    calls = draw(st.lists(CALLS, max_size=3))
    if name == "llama3_json":  # A call is one at the beginning of an answer alone.
        content = "" if calls else content
    if name == "gemma4":
        calls = json.loads(json.dumps(calls).replace('<|\\"|>', ""))
    assume(not any(_AMBIGUOUS.search(_tag(value)) for _, arguments in calls for value in arguments.values()))
    written = write_calls(name, calls, as_list=draw(st.booleans())) if calls else ""
    return Written(write_answer(name, thought, content, written), thought or "", content, tuple(map(tuple, calls)))


@st.composite
def broken_answers(draw: st.DrawFn, name: str) -> str:
    """Draw parts of answers in any order, with missing tags, unknown tools and half marks, cut anywhere."""
    parts = draw(st.lists(whole_answers(name).map(lambda one: one.text), min_size=1, max_size=3))
    text = "".join(parts)
    for _ in range(draw(st.integers(0, 3))):
        mark = draw(st.sampled_from([*MARKS, '"', "}", "\n", "get_it", "name", "<|message|>", "<|start|>"]))
        if draw(st.booleans()):
            text = text.replace(mark, draw(st.sampled_from(["", "x", mark[:-1]])), 1)
        else:
            place = draw(st.integers(0, len(text)))
            text = text[:place] + mark + text[place:]
    return text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


def as_tokens(text: str, name: str, num_hidden: int) -> tuple[BoundFormat, str, list[Mark]]:
    """Return a format of which each mark is a token, the first ones special, and a text of these tokens with marks."""
    format: AnswerFormat = answer_format(name, NAMES[name])
    ids = {mark: 1000 + index for index, mark in enumerate(format.marks)}
    hidden = set(format.marks[:num_hidden])
    longest_first = sorted(ids, key=len, reverse=True)
    shown, marks = "", []
    for piece in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text):
        if piece in ids:
            marks.append(Mark(len(shown), ids[piece]))
            piece = "" if piece in hidden else piece
        shown += piece
    return bind_marks(format, ids, [ids[mark] for mark in hidden]), shown, marks


def pieces_of(text: str, marks: list[Mark], cuts: list[int], hidden: frozenset[int]) -> list[tuple[str, list[Mark]]]:
    """Cut a text with its marks; a mark without characters comes with the text before it."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces, rest = [], list(marks)
    for start, end in itertools.pairwise(places):
        own = []
        while rest and (rest[0].place < end or (rest[0].place == end and rest[0].token_id in hidden)):
            mark = rest.pop(0)
            own.append(Mark(mark.place - start, mark.token_id))
        pieces.append((text[start:end], own))
    return pieces or [("", rest)]


def loaded(calls: tuple[ToolCall, ...]) -> tuple[tuple[str, object], ...]:
    """Return calls with their arguments as Python values."""
    return tuple((call.name, json.loads(call.arguments)) for call in calls)
