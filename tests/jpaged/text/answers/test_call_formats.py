"""What the scanner makes of answers in each format of calls."""

import pytest

from jpaged.text.answers.format_names import answer_format
from jpaged.text.answers.whole_answer import Answer, ToolCall

from .whole_and_cut import answer

QWEN_CASES = {
    "two calls and a text": (
        (
            "Hi\n\n<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=n>\n12\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
            "<function=g>\n</function>\n</tool_call>"
        ),
        Answer(None, "Hi", (ToolCall("f", '{"city": "Paris", "n": 12}'), ToolCall("g", "{}"))),
    ),
    "values by type": (
        (
            "<tool_call>\n<function=f>\n<parameter=n>\n3.5\n</parameter>\n<parameter=x>\n"
            "1e400\n</parameter>\n<parameter=on>\nTrue\n</parameter>\n<parameter=o>\n"
            '{"a": 1.50}\n</parameter>\n<parameter=l>\n[1,\n</parameter>\n<parameter=note>\n'
            "None\n</parameter>\n<parameter=any>\n7\n</parameter>\n<parameter=new>\n7\n"
            "</parameter>\n</function>\n</tool_call>"
        ),
        Answer(
            None,
            "",
            (
                ToolCall(
                    "f",
                    (
                        '{"n": "3.5", "x": 1e400, "on": true, "o": {"a": 1.50}, "l": "[1,", "note": nul'
                        'l, "any": 7, "new": "7"}'
                    ),
                ),
            ),
        ),
    ),
    "indents and empty lines belong to a string": (
        ("<tool_call>\n<function=f>\n<parameter=city>\n\n  a\n\n</parameter>\n</function>\n</tool_call>"),
        Answer(None, "", (ToolCall("f", '{"city": "\\n  a\\n"}'),)),
    ),
    "tags within a string": (
        (
            "<tool_call>\n<function=f>\n<parameter=city>\na</parameter>b\n</function>\n"
            "<function=g>\n</tool_call>\n<tool_call>\n<parameter=\n</parameter> \n"
            "</parameter>\n</function>\n</tool_call>"
        ),
        Answer(
            None,
            "",
            (
                ToolCall(
                    "f",
                    (
                        '{"city": "a</parameter>b\\n</function>\\n<function=g>\\n</tool_call>\\n<tool_call>'
                        '\\n<parameter=\\n</parameter> "}'
                    ),
                ),
            ),
        ),
    ),
    "no end tag of a parameter": (
        ("<tool_call>\n<function=f>\n<parameter=city>\nParis\n<parameter=n>\n1\n</function>\n</tool_call>"),
        Answer(None, "", (ToolCall("f", '{"city": "Paris", "n": 1}'),)),
    ),
    "the next tag does not fit": (
        (
            "<tool_call>\n<function=f>\n<parameter=city>\n"
            "<parameter=city> <parameter=day> <parameter=n\n</parameter>\n</function>\n"
            "</tool_call>"
        ),
        Answer(None, "", (ToolCall("f", '{"city": "<parameter=city> <parameter=day> <parameter=n"}'),)),
    ),
    "no end tags at all": (
        "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</tool_call>\n",
        Answer(None, "", (ToolCall("f", '{"city": "Paris"}'),)),
    ),
    "no end tags but of values": (
        ("<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<tool_call>\n<function=g>\n</tool_call>"),
        Answer(None, "", (ToolCall("f", '{"city": "Paris"}'), ToolCall("g", "{}"))),
    ),
    "no mark before the call": (
        "Hi\n<function=g>\n</function>\n</tool_call>",
        Answer(None, "Hi", (ToolCall("g", "{}"),)),
    ),
    "two functions under one mark": (
        "<tool_call>\n<function=g>\n</function>\n<function=f>\n</function>\n</tool_call>",
        Answer(None, "", (ToolCall("g", "{}"), ToolCall("f", "{}"))),
    ),
    "an unknown tool": (
        ("<tool_call>\n<function=h>\n<parameter=a>\n<tool_call>\n</parameter>\n</function>\n</tool_call>"),
        Answer(
            None, ("<tool_call>\n<function=h>\n<parameter=a>\n<tool_call>\n</parameter>\n</function>\n</tool_call>"), ()
        ),
    ),
    "text amid a call": (
        ("<tool_call>\n<function=f>\nso <parameter=city>\nParis\n</parameter>\n</function>\n</tool_call> x"),
        Answer(None, "so <parameter=city>\nParis\n</parameter>\n</function>\nx", (ToolCall("f", "{}"),)),
    ),
    "cut in a number": (
        ("<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n>\n12"),
        Answer(None, "", (ToolCall("f", '{"city": "Paris"}'),)),
    ),
    "cut in a string": (
        "<tool_call>\n<function=f>\n<parameter=note>\nnul or\n",
        Answer(None, "", (ToolCall("f", '{"note": "nul or"}'),)),
    ),
    "cut in an end tag": (
        "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n</func",
        Answer(None, "", (ToolCall("f", '{"city": "Paris"}'),)),
    ),
    "cut in the next key": (
        "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n<parameter=n",
        Answer(None, "", (ToolCall("f", '{"city": "Paris"}'),)),
    ),
    "cut in a key": ("<tool_call>\n<function=f>\n<parameter=ci", Answer(None, "", (ToolCall("f", "{}"),))),
    "cut in the name": ("<tool_call>\n<function=f", Answer(None, "<tool_call>\n<function=f", ())),
}

GLM_CASES = {
    "two calls": (
        (
            "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Paris\n</arg_value>\n"
            "<arg_key>l</arg_key>\n<arg_value>[1, 2]</arg_value>\n</tool_call>\n"
            "<tool_call>g</tool_call>"
        ),
        Answer(None, "", (ToolCall("f", '{"city": "Paris\\n", "l": [1, 2]}'), ToolCall("g", "{}"))),
    ),
    "tags within a string": (
        ("<tool_call>f<arg_key>city</arg_key><arg_value>a</arg_value>b<arg_key>c</tool_call>d</arg_value></tool_call>"),
        Answer(None, "", (ToolCall("f", '{"city": "a</arg_value>b<arg_key>c</tool_call>d"}'),)),
    ),
    "cut behind a key": (
        "<tool_call>f<arg_key>city</arg_key><arg_value>a</arg_value><arg_key>n</arg_k",
        Answer(None, "</arg_k", (ToolCall("f", '{"city": "a"}'),)),
    ),
    "no end tag of a value": (
        (
            "<tool_call>f<arg_key>city</arg_key><arg_value>a<arg_key>n</arg_key><arg_value>"
            "3</tool_call>\n<tool_call>g</tool_call>"
        ),
        Answer(None, "", (ToolCall("f", '{"city": "a", "n": 3}'), ToolCall("g", "{}"))),
    ),
    "an unknown tool": (
        "<tool_call>h<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
        Answer(None, "<tool_call>h<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>", ()),
    ),
}

GEMMA_CASES = {
    "a thought and two calls": (
        (
            '<|channel>thought\nhm\n<channel|>Hi<|tool_call>call:f{city:<|"|>a"b\n'
            '<|"|>,n:1,o:{<|"|>k y<|"|>:[true,null,"x"]}}<tool_call|><|tool_call>call:g{}<t'
            "ool_call|>"
        ),
        Answer(
            "hm", "Hi", (ToolCall("f", '{"city":"a\\"b\\n","n":1,"o":{"k y":[true,null,"x"]}}'), ToolCall("g", "{}"))
        ),
    ),
    "quotation marks within a string": (
        (
            '<|tool_call>call:f{city:<|"|>say <|"|>a, b<|"|> or <|"|>c<|"|>, d <|"|>,l:[<|"'
            '|>x<|"|>y<|"|>,<|"|>z<|"|>]}<tool_call|>'
        ),
        Answer(None, "", (ToolCall("f", '{"city":"say \\"a, b\\" or \\"c\\", d ","l":["x\\"y","z"]}'),)),
    ),
    "Python amid it": (
        "<|tool_call>call:f{city='it\\'s \"a\"', l: [\"b\", 'c']}<tool_call|>",
        Answer(None, "", (ToolCall("f", '{"city":"it\'s \\"a\\"", "l": ["b", "c"]}'),)),
    ),
    "another channel": ("<|channel>x<channel|>", Answer(None, "<|channel>x<channel|>", ())),
    "an unknown tool": ("<|tool_call>call:h{a:1}<tool_call|>", Answer(None, "<|tool_call>call:h{a:1}<tool_call|>", ())),
    "cut in a string": ('<|tool_call>call:f{city:<|"|>a', Answer(None, "", (ToolCall("f", '{"city":"a"}'),))),
}

LLAMA_CASES = {
    "two calls": (
        '{"name": "f", "parameters": {"n": 1}}; {"name": "g", "parameters": {}}',
        Answer(None, "", (ToolCall("f", '{"n": 1}'), ToolCall("g", "{}"))),
    ),
    "behind the mark": (
        '<|python_tag|>{"type": "function", "function": "f", "parameters": {"n": 1}}',
        Answer(None, "", (ToolCall("f", '{"n": 1}'),)),
    ),
    "an answer in JSON": ('{"name": "f", "age": 1}', Answer(None, '{"name": "f", "age": 1}', ())),
    "a name without arguments": ('{"name": "f"}', Answer(None, '{"name": "f"}', ())),
    "another answer in JSON": ('\n{"title": 1}\n', Answer(None, '\n{"title": 1}\n', ())),
    "not at the beginning": (
        'So {"name": "f", "parameters": {}}',
        Answer(None, 'So {"name": "f", "parameters": {}}', ()),
    ),
    "code for a built-in tool": (
        '<|python_tag|>brave_search.call(query="x")',
        Answer(None, '<|python_tag|>brave_search.call(query="x")', ()),
    ),
    "text behind": ('{"name": "f", "parameters": {}} done', Answer(None, "done", (ToolCall("f", "{}"),))),
}

MISTRAL_CASES = {
    "a list": (
        (
            '[THINK]a[/THINK]b[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}, "id": "abcd'
            'efghi"}, {"name": "g", "arguments": {}}]'
        ),
        Answer("a", "b", (ToolCall("f", '{"n": 1}'), ToolCall("g", "{}"))),
    ),
    "names": (
        '[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"n": 1}[TOOL_CALLS]g[ARGS]{}',
        Answer(None, "", (ToolCall("f", '{"n": 1}'), ToolCall("g", "{}"))),
    ),
    "names alone": (
        'a[TOOL_CALLS]f{"n": 1}[TOOL_CALLS]g{} x',
        Answer(None, "a x", (ToolCall("f", '{"n": 1}'), ToolCall("g", "{}"))),
    ),
    "an unknown tool amid a list": (
        '[TOOL_CALLS][{"name": "h"}, {"name": "g", "arguments": {}}]',
        Answer(None, '[TOOL_CALLS][{"name": "h"}', (ToolCall("g", "{}"),)),
    ),
    "an unknown tool": ('[TOOL_CALLS]h[ARGS]{"n": 1}', Answer(None, '[TOOL_CALLS]h[ARGS]{"n": 1}', ())),
    "arguments that are no object": ("[TOOL_CALLS]f[ARGS]nope", Answer(None, "nope", (ToolCall("f", "{}"),))),
    "a list of one unknown tool": ('[TOOL_CALLS] [{"name": "h"}]', Answer(None, '[TOOL_CALLS] [{"name": "h"}]', ())),
}

HARMONY_CASES = {
    "a thought, a preamble, a call": (
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>Let me.<|end|><|start|>assistant<|channel|>commentary to=functions."
            'f <|constrain|>json<|message|>{"n": 1}<|call|>'
        ),
        Answer("hm", "Let me.", (ToolCall("f", '{"n": 1}'),)),
    ),
    "the recipient before the channel": (
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|chan"
            'nel|>commentary json<|message|>{"n": 1}<|call|><|start|>assistant<|channel|>fi'
            "nal<|message|>Done<|return|>"
        ),
        Answer("hm", "Done", (ToolCall("f", '{"n": 1}'),)),
    ),
    "a call amid thoughts": (
        '<|channel|>analysis to=functions.f code<|message|>{"city": "a<|call|>',
        Answer(None, "", (ToolCall("f", '{"city": "a<|call|>"}'),)),
    ),
    "no arguments": (
        "<|channel|>commentary to=functions.g<|message|><|call|>",
        Answer(None, "", (ToolCall("g", "{}"),)),
    ),
    "an unknown tool": (
        "<|channel|>commentary to=python<|message|>print()<|call|>",
        Answer(None, "<|channel|>commentary to=python<|message|>print()<|call|>", ()),
    ),
    "no header": ("plain", Answer(None, "plain", ())),
    "half a header": ("<|channel|>fin", Answer(None, "<|channel|>fin", ())),
    "no end mark": (
        "<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b",
        Answer(None, "a\nb", ()),
    ),
    "two thoughts": (
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"),
        Answer("a\nb", "", ()),
    ),
}

CASES = {
    ("qwen3_coder", "qwen3"): QWEN_CASES,
    ("glm47", "qwen3"): GLM_CASES,
    ("gemma4", "gemma4"): GEMMA_CASES,
    ("llama3_json", None): LLAMA_CASES,
    ("mistral", "mistral"): MISTRAL_CASES,
    ("openai", "openai_gptoss"): HARMONY_CASES,
}


@pytest.mark.parametrize(
    ("names", "label"), [(names, label) for names, cases in CASES.items() for label in cases], ids=str
)
def test_calls(names, label):
    text, expected = CASES[names][label]
    opening = "<|start|>assistant" if names[0] == "openai" else ""
    assert answer(text, answer_format(*names), opening=opening) == expected
