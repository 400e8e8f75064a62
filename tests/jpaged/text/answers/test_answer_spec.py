"""What a scanner is told of a request's tools."""

from jpaged.text.answers.answer_spec import parameter_types, spec_of_tools
from jpaged.text.chat.tools import tools_of

SCHEMAS = {
    "text": ({"type": "string"}, ("string",)),
    "any": ({}, ()),
    "several": ({"type": ["integer", "null"]}, ("integer", "null")),
    "optional": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ("string", "null")),
    "nullable": ({"type": "string", "nullable": True}, ("string", "null")),
    "referred": ({"$ref": "#/$defs/point"}, ("object",)),
    "nested": ({"allOf": [{"oneOf": [{"$ref": "#/$defs/colour"}, {"type": "number"}]}]}, ("string", "number")),
    "constant": ({"const": 1}, ("integer",)),
    "circular": ({"$ref": "#/$defs/circle"}, ()),
    "nowhere": ({"$ref": "#/$defs/nothing"}, ()),
    "true": (True, ()),
}
DEFINITIONS = {
    "point": {"type": "object"},
    "colour": {"enum": ["red", "green"]},
    "circle": {"anyOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/circle"}]},
}


def test_types_of_parameters():
    properties = {name: schema for name, (schema, _) in SCHEMAS.items()}
    expected = {name: types for name, (_, types) in SCHEMAS.items()}
    schema = {"type": "object", "properties": properties, "$defs": DEFINITIONS}
    assert parameter_types(schema) == expected
    assert parameter_types({"$ref": "#/$defs/all", "$defs": {**DEFINITIONS, "all": schema}}) == expected
    assert parameter_types({"type": "object"}) == {}


def test_tools_that_may_be_called_are_told():
    functions = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    custom = {"type": "custom", "custom": {"name": "patch"}}
    spec = spec_of_tools(tools_of([*functions, custom]), opening="<think>", skip_special_tokens=False)
    assert spec.tools == {"f": {}, "g": {}, "patch": {"input": ("string",)}}
    assert (spec.custom_tools, spec.opening, spec.skip_special_tokens) == ({"patch"}, "<think>", False)
    named = {"type": "function", "function": {"name": "g"}}
    assert set(spec_of_tools(tools_of([*functions, custom], named)).tools) == {"g"}
    assert spec_of_tools(tools_of(functions, "none")).tools == {}
    assert spec_of_tools(None).tools == {}
