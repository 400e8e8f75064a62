"""Writes the grammar of a JSON schema where llguidance's own compiler of schemas cannot.

The grammar is Lark. Only what leads to such a part is written here: a number of a range that llguidance gets wrong, an
integer beyond 2^53, an array with unique items, an object with a schema of its names, and the objects, arrays and
references around them. All other parts stand in it as schemas (`%json`), which llguidance compiles as it compiles a
whole one. White space may stand between the lexemes of both alike. Knows schemas of the keywords that `json_schema.py`
has checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...checks import refusal
from .lark_text import COMMA, NAME, json_text, listed, literal, repeated, within_slashes
from .number_texts import multiple_regex, range_regex
from .schema_analysis import (
    SCHEMA_LISTS,
    SCHEMAS,
    SCHEMAS_BY_NAME,
    TYPES,
    SchemaAnalysis,
    direct_schemas,
    escaped,
    inner_schemas,
    values_of,
)
from .schema_merging import UnmergeableError, merged
from .schema_numbers import (
    NUMBERS,
    allowed_values,
    has_multiple_regex,
    needs_own_numbers,
    number_range,
    safe_numbers,
    written_multiples,
)
from .unique_items import unique_values

MAX_RULE_CHAIN = 300
"""Properties of an object that is written here. llguidance follows a chain of rules by recursion."""
MAX_MERGES = 20_000
"""Schemas that are looked at to merge them, in one grammar: some tenths of a second."""
TYPE_OF_KEYWORD = {
    **dict.fromkeys(NUMBERS, "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(
        (
            "properties",
            "patternProperties",
            "additionalProperties",
            "required",
            "minProperties",
            "maxProperties",
            "propertyNames",
        ),
        "object",
    ),
}


def schema_grammar(schema: dict[str, Any], json_options: dict[str, Any]) -> str:
    """Return the Lark grammar of a checked schema; empty if llguidance's compiler writes all of it right.

    `json_options` are those of llguidance for each part that it compiles. Raise InvalidRequestError, with the place,
    for a part that neither can write.
    """
    writer = SchemaWriter(schema, json_options)
    try:
        return writer.grammar() if writer.is_own(schema) else ""
    except RecursionError:
        raise _refused("#", "references that lead from one to the next too often", "a chain of some hundred") from None


class NotWrittenError(Exception):
    """A part that is not written here, such as an object with a pattern of names that a listed name matches."""


class SchemaWriter:
    """The rules of one schema. A subclass may write values in another form than JSON's."""

    def __init__(self, root: dict[str, Any], json_options: dict[str, Any]):
        self._root, self._json_options = root, json_options
        self._analysis = SchemaAnalysis(root)
        self.lines: list[str] = []
        self._rules: dict[str, str] = {}
        """A reference, the JSON of a schema, or the text of a rule → the rule's name."""
        self._own_references = self._find_own_references()
        self._num_merges = 0

    def grammar(self) -> str:
        """Return the whole grammar."""
        start = self.expression(self._root, "#")
        if not start:
            raise _refused("#", "a schema that nothing satisfies", "one that some value satisfies")
        pattern = self._json_options.get("whitespace_pattern")
        skip = [f"%ignore /{within_slashes(pattern)}/"] if pattern else []
        return "\n".join(['%llguidance {"ignore_once": true}', *skip, f"start: {start}", *self.lines])

    def is_own(self, schema: Any) -> bool:
        """Return whether a part of a schema, or of what it refers to, has to be written here."""
        return _is_own(schema) or any(one in self._own_references for one in _references(schema))

    def _find_own_references(self) -> set[str]:
        leads_to: dict[str, set[str]] = {}
        waiting = _references(self._root)
        while waiting:
            reference = waiting.pop()
            if reference not in leads_to:
                leads_to[reference] = _references(self._analysis.target(reference))
                waiting |= leads_to[reference]
        own = {reference for reference in leads_to if _is_own(self._analysis.target(reference))}
        num_before = -1
        while num_before < len(own):
            num_before = len(own)
            own |= {reference for reference, others in leads_to.items() if others & own}
        return own

    def _rule(self, text: str) -> str:
        """Return the name of a rule with this text."""
        name = self._rules.get(text)
        if name is None:
            name = self._rules[text] = f"r{len(self._rules)}"
            self.lines.append(f"{name}: {text}")
        return name

    def expression(self, schema: Any, path: str) -> str:
        """Return an expression of the values that a schema allows; empty if there are none."""
        if schema is False:
            return ""
        if not self.is_own(schema):
            return "" if self._is_contradiction(schema) else self._compiled(schema)
        try:
            if "$ref" in schema and schema.keys() <= {"$ref", "$defs", "definitions"}:
                return self._referred(schema["$ref"])
            plain = self._without_references(schema, ())
            return self._of_plain(plain, path) if plain is not False else ""
        except (NotWrittenError, UnmergeableError):
            return self._compiled(self._safe(schema, path))

    def _is_contradiction(self, schema: Any) -> bool:
        """Return whether parts of a schema that hold together are seen to leave no value.

        llguidance would refuse the whole schema then, also where this part is optional.
        """
        if not isinstance(schema, dict) or schema.keys() <= {"$ref", "$defs", "definitions"}:
            return False
        if not schema.keys() & {"$ref", "allOf", "const", "enum"}:
            return False
        try:
            plain = self._without_references(schema, ())
        except UnmergeableError:
            return False
        return plain is False or (
            isinstance(plain, dict) and values_of(plain) is not None and not allowed_values(plain)
        )

    def _referred(self, reference: str) -> str:
        """Return the rule of what a reference leads to."""
        if reference not in self._rules:
            name = self._rules[reference] = f"r{len(self._rules)}"
            body = self.expression(self._analysis.target(reference), reference[:500])
            if not body:
                raise _refused(reference[:500], "a schema that nothing satisfies", "one that some value satisfies")
            self.lines.append(f"{name}: {body}")
        return self._rules[reference]

    def _without_references(self, schema: Any, within: tuple[str, ...]) -> Any:
        """Return a schema that means the same and has neither `allOf` nor `$ref` itself.

        `within` are the references that led here: one that leads back to itself cannot be resolved.
        """
        if not isinstance(schema, dict):
            return schema
        self._num_merges += 1
        if self._num_merges > MAX_MERGES:
            raise UnmergeableError
        parts = list(schema.get("allOf", ()))
        plain: Any = {
            name: value for name, value in schema.items() if name not in ("allOf", "$ref", "$defs", "definitions")
        }
        if "$ref" in schema:
            if schema["$ref"] in within:
                raise UnmergeableError
            target = self._analysis.target(schema["$ref"])
            plain = merged(plain, self._without_references(target, (*within, schema["$ref"])))
        for part in parts:
            plain = merged(plain, self._without_references(part, within))
        return plain

    def _of_plain(self, schema: dict[str, Any] | bool, path: str) -> str:
        """Return an expression of a schema without `allOf` and `$ref`."""
        if not isinstance(schema, dict) or not self.is_own(schema):
            return self.expression(schema, path)
        if "anyOf" in schema:
            rest = {name: value for name, value in schema.items() if name != "anyOf"}
            options = []
            for index, option in enumerate(schema["anyOf"]):
                here = f"{path}/anyOf/{index}"
                if not rest:
                    options.append(self.expression(option, here))
                    continue
                plain = merged(rest, self._without_references(option, ()))
                options.append(self._of_plain(plain, here) if plain is not False else "")
            return self._one_of(options)
        if values_of(schema) is not None:
            return self._of_values(schema)
        names = schema.get("type", TYPES)
        types = [names] if isinstance(names, str) else list(names)
        if "number" in types and "integer" in types:
            types.remove("integer")
        options, others = [], []
        for name in types:
            kind = "number" if name == "integer" else name
            part = {key: value for key, value in schema.items() if TYPE_OF_KEYWORD.get(key) == kind}
            if not self.is_own({"type": name, **part}):
                others.append(name)
            elif kind == "number":
                options.append(self._numbers({"type": name, **part}, path))
            elif kind == "array":
                options.append(self._array(part, path))
            elif kind == "object":
                options.append(self._object(part, path))
            else:
                options.append(self._scalar({"type": name, **part}, path))
        if others:
            kinds = {"number" if name == "integer" else name for name in others}
            part = {key: value for key, value in schema.items() if TYPE_OF_KEYWORD.get(key, "") in kinds}
            options.append(self._compiled({"type": others[0] if len(others) == 1 else others, **part}))
        return self._one_of(options)

    def _scalar(self, schema: dict[str, Any], path: str) -> str:
        """Return an expression of the strings, the booleans or the null that a schema allows."""
        return self._compiled(schema)

    def _key(self, name: str) -> str:
        """Return an expression of a listed name and the colon behind it."""
        return f'{literal(json_text(name))} ":"'

    def _one_of(self, options: Iterable[str]) -> str:
        """Return an expression of what one of some expressions allows; those that are empty allow nothing."""
        options = list(dict.fromkeys(option for option in options if option))
        return options[0] if len(options) == 1 else self._rule(" | ".join(options)) if options else ""

    def _of_values(self, schema: dict[str, Any]) -> str:
        """Return an expression of a schema with an `enum` or a `const`."""
        rest = {name: value for name, value in schema.items() if name not in ("const", "enum", *NUMBERS)}
        options, others = [], []
        for value in allowed_values(schema):
            if not _is_own({"const": value}):
                others.append(value)
            elif isinstance(value, list | dict) and rest.keys() - {"type"}:
                raise NotWrittenError
            else:
                options.append(self._constant(value))
        if others:
            options.append(self._compiled({**rest, "enum": others}))
        return self._one_of(options)

    def _constant(self, value: Any) -> str:
        """Return an expression of one value."""
        if isinstance(value, list):
            items = ' "," '.join(map(self._constant, value))
            return self._rule(f'"[" {items} "]"')
        if isinstance(value, dict):
            fields = ' "," '.join(f"{self._key(key)} {self._constant(one)}" for key, one in value.items())
            return self._rule(f'"{{" {fields} "}}"')
        return self._rule(literal(json_text(value)))

    def _numbers(self, schema: dict[str, Any], path: str) -> str:
        """Return an expression of the numbers, or the integers, that a schema allows."""
        numbers = number_range(schema, is_integer=schema["type"] == "integer")
        tight = numbers.tightened()
        if tight is None or not (regex := range_regex(tight)):
            return ""
        if not has_multiple_regex(tight):
            try:
                return self._one_of([self._compiled(part) for part in written_multiples(tight)])
            except ValueError:
                allowed = "at most 6 places and 65535 as its digits, or one that divides a power of ten"
                raise _refused(f"{path}/multipleOf", "a multiple that is not computed with", allowed) from None
        if tight.multiple is None:
            return self._rule(f"/{regex}/")
        name = f"N{len(self.lines)}"
        text = f"/{regex}/ & /{multiple_regex(tight.multiple)}/"
        if text not in self._rules:
            self.lines.append(f"{name}: {text}")
            self._rules[text] = name
        return self._rules[text]

    def _array(self, schema: dict[str, Any], path: str) -> str:
        """Return an expression of the arrays that a schema allows."""
        min_items, max_items = schema.get("minItems", 0), schema.get("maxItems")
        prefix = schema.get("prefixItems", [])
        if schema.get("uniqueItems", False) and (max_items is None or max_items > 1):
            values = unique_values(schema, self._analysis)
            if values is None:  # Other schemas of its items hold too.
                raise _refused(f"{path}/uniqueItems", *_NOT_HERE)
            return self._unique(values, min_items, len(values) if max_items is None else min(max_items, len(values)))
        firsts = []
        for index, item in enumerate(prefix):
            firsts.append(self.expression(item, f"{path}/prefixItems/{index}"))
        other = self.expression(schema.get("items", True), f"{path}/items")
        num_possible = firsts.index("") if "" in firsts else len(firsts) if not other else None
        if num_possible is not None:
            max_items = num_possible if max_items is None else min(num_possible, max_items)
        if max_items is not None and min_items > max_items:
            return ""
        num_first = len(firsts) if max_items is None else min(len(firsts), max_items)
        least = max(0, min_items - num_first)
        most = None if max_items is None else max_items - num_first
        if not firsts:
            if most == 0:
                return self._rule('"[" "]"')
            some = listed(other, least, most)
            return self._rule(f'"[" {some if least else f"({some})?"} "]"')
        text = repeated(f'"," {other}', least, most) if other and most != 0 else ""
        for index in reversed(range(num_first)):
            text = f"{COMMA if index else ''}{firsts[index]} {text}"
            text = text if index < min_items else f"({text})?"
        return self._rule(f'"[" {text} "]"')

    def _unique(self, values: list[Any], min_items: int, max_items: int) -> str:
        """Return an expression of arrays of some of these values, each at most once.

        The parameter of its rules has a bit for each value that was used.
        """
        if min_items > max_items:
            return ""
        if max_items == 0:
            return self._rule('"[" "]"')
        first, other = (f"u{len(self.lines) + number}" for number in range(2))
        used = f"[0:{len(values)}]"
        starts = ['""'] if min_items == 0 else []
        options = [f'"" %if bit_count_ge({used}, {min_items})']
        for bit, value in enumerate(values):
            text = literal(json_text(value))
            starts.append(f"{text} {other}::set_bit({bit})")
            is_free = f"and(bit_clear({bit}), bit_count_lt({used}, {max_items}))"
            options.append(f"{COMMA}{text} {other}::set_bit({bit}) %if {is_free}")
        self.lines += [f"{first}::_: {' | '.join(starts)}", f"{other}::_: {' | '.join(options)}"]
        return self._rule(f'"[" {first}::0 "]"')

    def _object(self, schema: dict[str, Any], path: str) -> str:
        """Return an expression of the objects that a schema allows, with their properties in its order."""
        named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        others = schema.get("additionalProperties", True)
        required = schema.get("required", [])
        names = list(dict.fromkeys([*named, *required]))
        if len(names) > MAX_RULE_CHAIN:
            raise NotWrittenError
        if patterns and (len(patterns) > 1 or others is not False or _may_match(patterns, names)):
            raise NotWrittenError
        fields: list[tuple[str, bool]] = []
        for name in names:
            value = self.expression(named.get(name, others), f"{path}/properties/{escaped(name)}")
            if value:
                fields.append((f"{self._key(name)} {value}", name in required))
            elif name in required:
                return ""
        num_required = sum(is_required for _, is_required in fields)
        least = max(0, schema.get("minProperties", 0) - num_required)
        most = schema["maxProperties"] - num_required if "maxProperties" in schema else None
        if most is not None and most < least:
            return ""
        if num_required < len(fields) and (least or most is not None):
            raise NotWrittenError
        if "propertyNames" in schema:
            if names or patterns:
                raise NotWrittenError
            name = self._compiled({**schema["propertyNames"], "type": "string"})
            value = self.expression(others, f"{path}/additionalProperties")
        elif patterns:
            ((pattern, inner),) = patterns.items()
            name, value = self._compiled({"type": "string", "pattern": pattern}), self.expression(inner, path)
        else:
            name, value = self._other_names(names), self.expression(others, f"{path}/additionalProperties")
        if value and most != 0:
            fields.append((listed(self._rule(f'{name} ":" {value}'), least, most), least > 0))
        elif least:
            return ""
        return self._rule(f'"{{" {self._fields(fields)} "}}"')

    def _fields(self, fields: list[tuple[str, bool]]) -> str:
        """Return an expression of fields in their order, of which some are required, with commas between them."""
        after = before = ""
        """What may follow where some field stands before it, and where none does."""
        for text, is_required in reversed(fields):
            field = self._rule(text)
            following = f'"," {field} {after}' if is_required else f'("," {field})? {after}'
            first = self._rule(f"{field} {after}")
            before = first if is_required else self._rule(f"{first} | {before}" if before else f'{first} | ""')
            after = self._rule(following)
        return before

    def _other_names(self, names: list[str]) -> str:
        """Return the terminal of all names but some."""
        taken = " | ".join(literal(json_text(name)) for name in names)
        text = f"{NAME} & ~({taken})" if taken else NAME
        if text not in self._rules:
            self._rules[text] = f"NAME{len(self._rules)}"
            self.lines.append(f"{self._rules[text]}: {text}")
        return self._rules[text]

    def _compiled(self, schema: Any) -> str:
        """Return the rule of a schema that llguidance compiles. It gets what its references lead to as definitions."""
        definitions: dict[str, Any] = {}
        waiting: list[str] = []

        def renamed(part: Any) -> Any:
            if not isinstance(part, dict):
                return part
            copy = _with_inner(part, renamed)
            for name in ("$defs", "definitions"):
                copy.pop(name, None)
            if "$ref" in copy:
                waiting.append(part["$ref"])
                copy["$ref"] = f"#/$defs/{_definition_name(part['$ref'])}"
            return copy

        body = {} if schema is True else renamed(schema)
        while waiting:
            reference = waiting.pop()
            if _definition_name(reference) not in definitions:
                definitions[_definition_name(reference)] = True
                definitions[_definition_name(reference)] = renamed(self._analysis.target(reference))
        if definitions:
            body = {**body, "$defs": definitions}
        return self._rule(f"%json {json.dumps({**body, 'x-guidance': self._json_options}, ensure_ascii=False)}")

    def _safe(self, schema: Any, path: str) -> Any:
        """Return a schema that llguidance compiles and that allows nothing that this one does not.

        Raise InvalidRequestError, with the place, where none is known.
        """
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema and schema["$ref"] in self._own_references:
            raise _refused(f"{path}/$ref", *_NOT_HERE)
        for name in ("uniqueItems", "propertyNames"):
            if schema.get(name):
                raise _refused(f"{path}/{name}", *_NOT_HERE)
        inner = dict(inner_schemas(schema, path))
        places = {id(value): place for place, value in inner.items()}
        safe = safe_numbers(_with_inner(schema, lambda part: self._safe(part, places.get(id(part), path))))
        if safe is None:
            raise _refused(path, *_NOT_HERE)
        return safe


_NOT_HERE = (
    "a part that is not enforced beside what stands around it",
    "it within properties, items, anyOf and $ref",
    "leave out patternProperties, minProperties, maxProperties and allOf around it",
)


def _is_own(schema: Any) -> bool:
    """Return whether a schema, or one within it, is of a kind that llguidance gets wrong or does not know."""
    if not isinstance(schema, dict):
        return False
    return (
        bool(schema.get("uniqueItems"))
        or "propertyNames" in schema
        or needs_own_numbers(schema)
        or any(map(_is_own, direct_schemas(schema, with_definitions=False)))
    )


def _references(schema: Any) -> set[str]:
    """Return the references of a schema and of those within it, but for its definitions."""
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"]} if "$ref" in schema else set()
    inner = map(_references, direct_schemas(schema, with_definitions=False))
    return own.union(*inner)


def _definition_name(reference: str) -> str:
    """Return a key of `$defs` for what a reference leads to, in letters that need no escape in a JSON pointer."""
    return re.sub(r"[^0-9A-Za-z_]", lambda found: f"-{ord(found[0]):x}-", reference)


def _with_inner(schema: dict[str, Any], changed: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy of a schema with each schema directly within it changed."""
    copy: dict[str, Any] = {}
    for name, value in schema.items():
        if name in SCHEMAS_BY_NAME:
            copy[name] = {key: changed(inner) for key, inner in value.items()}
        elif name in SCHEMA_LISTS:
            copy[name] = [changed(inner) for inner in value]
        elif name in SCHEMAS:
            copy[name] = changed(value)
        else:
            copy[name] = value
    return copy


def _may_match(patterns: Iterable[str], names: Sequence[str]) -> bool:
    """Return whether one of some patterns matches one of some names, or may do so in its own dialect."""
    try:
        return any(re.search(pattern, name) is not None for pattern in patterns for name in names)
    except re.error:
        return bool(names)


def _refused(path: str, got: str, allowed: str, way_out: str = "") -> Exception:
    return refusal("json", f"{got} at {path[:500]}", allowed, way_out)
