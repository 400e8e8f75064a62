"""Checks that a JSON schema can be enforced, keyword by keyword, and names the place of what cannot.

A grammar allows a text token by token, so a keyword that compares distant parts of a value (`uniqueItems`, `not`) has
none. Such a keyword is refused, never dropped. What is left is a schema of those keywords that the grammar enforces,
with the meaning of draft 2020-12. docs/structured_outputs.md has the table. Knows no tokenizer and no llguidance.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from ...checks import Unfit, nearest, refusal, told
from ...errors import JpagedError
from ...structured_outputs import MAX_REGEX_BYTES
from .ecma_regex import portable_regex
from .known_patterns import MAX_LENGTHS, without_look_ahead
from .schema_analysis import (
    SCHEMA_LISTS,
    SCHEMAS,
    SCHEMAS_BY_NAME,
    TYPES,
    SchemaAnalysis,
    escaped,
    inner_schemas,
    is_json_number,
    type_of,
    types_of,
    values_of,
)
from .schema_dialects import has_tuples, with_null, with_open_bounds, with_prefix_items, without_unused_definitions
from .schema_numbers import NUMBERS
from .string_formats import EXPRESSIONS
from .unique_items import MAX_VALUES, unique_values

Schema = dict[str, Any] | bool

FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
FREE_FORMATS = ("password", "binary", "path", "file-path", "directory-path")
"""Formats that any text has."""
DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06", "draft-04")
"""What `$schema` may name. The keywords that are enforced mean the same in all of these drafts."""
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
ENFORCED = (
    "type", "const", "enum", "required", "pattern", "format", "$ref", *SCHEMAS_BY_NAME, *SCHEMA_LISTS, *SCHEMAS,
    *COUNTS, *NUMBERS,
)  # fmt: skip
ANNOTATIONS = (
    "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding",
    "contentMediaType", "contentSchema", "discriminator", "example", "externalDocs", "xml", "propertyOrdering",
    "enumNames", "enumDescriptions", "markdownDescription",
)  # fmt: skip
"""Keywords that say nothing of what is valid; the last eight are those of OpenAPI, of other engines and of editors."""
REFUSED = {
    "not": "",
    "if": "give anyOf",
    "then": "give anyOf",
    "else": "give anyOf",
    "contains": "",
    "minContains": "",
    "maxContains": "",
    "propertyNames": "give an enum, a pattern or a length, beside additionalProperties",
    "dependentRequired": "give anyOf",
    "dependentSchemas": "give anyOf",
    "dependencies": "give anyOf",
    "unevaluatedItems": "give items",
    "unevaluatedProperties": "give additionalProperties",
    "additionalItems": "give prefixItems and items, or name draft-07 in $schema",
    "$anchor": "refer by #/$defs/…",
    "$dynamicAnchor": "refer by #/$defs/…",
    "$dynamicRef": "give $ref",
    "$recursiveAnchor": "give $ref",
    "$recursiveRef": "give $ref",
    "$vocabulary": "",
    "id": "give $defs",
    "x-guidance": "",
}
"""Keywords that are not enforced → the way out, where there is one."""
MAX_INTEGER = 10**40
"""Integers have less digits than this one, and more than those of 128 bits."""
MAX_COUNT = 1_000_000
MAX_JOINED_PATTERNS = 6
"""Patterns that must hold of one text together: what compiling them takes is exponential in their number."""
MAX_MULTIPLE, MAX_JOINED_MULTIPLES = 65_535, 2
"""llguidance computes the least common multiple of those that are joined in 32 bits."""
MAX_NAME_PATTERNS = 40
"""Patterns of one `patternProperties`, which are compared with each other."""
MAX_COUNTED_NAMES = 160
"""Optional names of an object that needs one of them: what compiling them takes grows with the cube of their number."""
MAX_REFERENCES = 500
"""Different references: llguidance follows a chain of them by recursion."""
MAX_TRIES = 100
"""Parts of a schema that `located` tries."""
MAX_NAMES, MAX_NAMED_CHARS = 500, 200_000
"""Names that `propertyNames` lists, and what their schemas may take together."""
FORMAT_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,39}")
"""What is shown of a format: a caller's text may stand there too."""
MAX_TOLD, MAX_TOLD_CHARS = 5, 100
"""Formats that are told of one schema, and what is shown of the place of each."""
SEE_DOCS = "the keywords in docs/structured_outputs.md"


def enforced_schema(schema: Any, *, closes_objects: bool, unknown: list[str] | None = None) -> dict[str, Any]:
    """Return a schema that means the same and has only keywords that are enforced.

    `closes_objects` adds `additionalProperties: false` to each object that names properties and says nothing of others.
    What `unknown_formats` returns is added to `unknown`.
    Raise InvalidRequestError, with the place in the schema, for what cannot be enforced or is no schema.
    """
    try:
        given = _Schema(schema, closes_objects)
        checked = given.checked()
    except RecursionError:
        raise _refused("#", "references that lead from one to the next too often", "a chain of some hundred") from None
    if checked is False:
        raise _refused("#", "false", "a schema that some value satisfies")
    if unknown is not None:
        unknown += given.told_formats()
    return {} if checked is True else checked


def unknown_formats(schema: Any) -> list[str]:
    """Return the formats of texts that a schema names and that are not known, each with its place.

    They say nothing of what is valid, as the draft has it. At most MAX_TOLD are listed. The schema is one that
    `enforced_schema` takes.
    """
    visited = _Schema(schema, False)
    visited.visit()
    return visited.told_formats()


def located(schema: dict[str, Any], error_of: Callable[[dict[str, Any]], str]) -> str:
    """Return the place of the innermost part of a schema that fails by itself as the whole does.

    The place is # if only the whole schema fails. `error_of` gives the error of a schema, empty if it has none.
    Definitions go with each part.
    """
    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, part, error = "#", schema, error_of(schema)
    num_tries = 0
    while True:
        for path, inner in inner_schemas(part, place):
            num_tries += 1
            if num_tries > MAX_TRIES or not isinstance(inner, dict):
                continue
            if error_of({**definitions, **inner}) == error:
                place, part = path, inner
                break
        else:
            return place


class _Schema:
    """One schema of a caller, with its definitions."""

    def __init__(self, root: Any, closes_objects: bool):
        self._root, self._closes_objects = without_unused_definitions(root), closes_objects
        self._refs: list[tuple[str, str]] = []
        """(place, reference) of each `$ref`."""
        self._one_ofs: list[tuple[str, dict[str, Any], str | None]] = []
        """(place, schema, the property by which OpenAPI's `discriminator` tells options apart) of each `oneOf`."""
        self._checked: Schema = True
        self._has_tuples = has_tuples(self._root)
        self._unique: list[tuple[str, dict[str, Any]]] = []
        """(place, schema) of each array whose items all differ."""
        self._unknown_formats: list[tuple[str, str]] = []
        """(place, format) of each `format` of texts that is not known."""

    def checked(self) -> Schema:
        """Return the schema with its enforced keywords alone."""
        self.visit()
        analysis = SchemaAnalysis(self._checked)
        for path, reference in self._refs:
            if not isinstance(analysis.target(reference), dict | bool):
                allowed = "#, or #/… to a schema within this one"
                raise _refused(path, f"a $ref to {'another document' if reference[:1] != '#' else 'nothing'}", allowed)
        for path, schema in self._unique:
            if schema.get("maxItems", MAX_COUNT) <= 1:
                del schema["uniqueItems"]  # One item differs from no other.
            elif unique_values(schema, analysis) is None:
                allowed = f"items of at most {MAX_VALUES} values: an enum, booleans, or a range of integers"
                raise _refused(f"{path}/uniqueItems", "uniqueItems", allowed, "leave it out")
        if (num_references := len({reference for _, reference in self._refs})) > MAX_REFERENCES:
            raise _refused("#", f"{num_references} different references", f"at most {MAX_REFERENCES}")
        for path, schema, discriminator in self._one_ofs:
            self._check_one_of(path, schema, discriminator, analysis)
        for keywords, most in (("pattern", "format"), MAX_JOINED_PATTERNS), (("multipleOf",), MAX_JOINED_MULTIPLES):
            place, number = analysis.most_joined(*keywords)
            if number > most:
                got = f"{number} of {' and '.join(keywords)} that must hold of one value together"
                raise _refused(place, got, f"at most {most}")
        endless = analysis.endless_references({reference for _, reference in self._refs})
        if endless is None:
            raise _refused("#", "a schema that leads back to itself without an end", "one that some value satisfies")
        for _, schema, _ in self._one_ofs:  # After the checks above, since references may go through a oneOf.
            schema["anyOf"] = schema.pop("oneOf")
        if endless:
            _forbid(self._checked, endless)
        return self._checked

    def told_formats(self) -> list[str]:
        """Return the first formats of texts that are not known, each with its place."""
        return [f"{name} at {path[:MAX_TOLD_CHARS]}" for path, name in self._unknown_formats[:MAX_TOLD]]

    def visit(self) -> None:
        """Look at each keyword by itself."""
        self._checked = self._visit(self._root, "#")

    def _visit(self, schema: Any, path: str) -> Schema:
        """Return a schema with its enforced keywords alone, and note its references."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refused(path, f"a JSON {type_of(schema)}", "a schema: an object, true or false")
        schema = self._translated(schema, path)
        kept: dict[str, Any] = {}
        for name, value in schema.items():
            here = f"{path}/{escaped(name)}"
            if name in ENFORCED:
                kept[name] = self._keyword(name, value, here, schema)
            else:
                self._check_other(name, value, here)
        if "format" in kept and (kept["format"] not in FORMATS or "string" not in types_of(kept)):
            if kept["format"] not in FREE_FORMATS and "string" in types_of(kept):
                is_name = FORMAT_NAME.fullmatch(kept["format"]) is not None
                self._unknown_formats.append((f"{path}/format", kept["format"] if is_name else "one that is no name"))
            del kept["format"]  # Of numbers it says nothing, as "int64" does not.
        if (expression := EXPRESSIONS.get(kept.get("format", ""))) is not None:
            del kept["format"]
            kept["allOf"] = [*kept.get("allOf", ()), {"pattern": f"^(?:{expression})$"}]
        if (most := MAX_LENGTHS.get(str(schema.get("pattern")))) is not None:
            kept["maxLength"] = min(most, kept.get("maxLength", most))
        if schema.get("uniqueItems") is True and "array" in types_of(kept):
            kept["uniqueItems"] = True
            self._unique.append((path, kept))
        if "propertyNames" in schema:
            self._name_properties(kept, schema["propertyNames"], f"{path}/propertyNames")
        self._check_together(kept, path)
        if self._closes_objects and "properties" in kept and "patternProperties" not in kept:
            kept.setdefault("additionalProperties", False)
        if "oneOf" in kept:
            marker = schema.get("discriminator")
            name = marker.get("propertyName") if isinstance(marker, dict) else None
            self._one_ofs.append((path, kept, name if isinstance(name, str) else None))
        # llguidance reads keywords in their order, and would take additionalProperties before patternProperties where a
        # keyword such as anyOf stands between them.
        for name in ("const", "enum", "allOf", "anyOf", "oneOf", "$ref"):
            if name in kept:
                kept[name] = kept.pop(name)
        return kept

    def _translated(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Return a schema of a caller in the words of draft 2020-12."""
        if "nullable" in schema:
            if not isinstance(schema["nullable"], bool):
                raise _refused(f"{path}/nullable", f"a JSON {type_of(schema['nullable'])}", "true or false")
            schema = with_null(schema) if schema["nullable"] else schema
        schema = with_open_bounds(schema)
        is_tuple = self._has_tuples and ("additionalItems" in schema or isinstance(schema.get("items"), list))
        return with_prefix_items(schema) if is_tuple else schema

    def _name_properties(self, kept: dict[str, Any], names: Any, path: str) -> None:
        """Write what `propertyNames` says of an object's names into its other keywords.

        Names that it lists become properties, in the order of `properties` and then of the list. A pattern becomes a
        pattern of names. Any other schema of names stays where it is.
        """
        for _ in range(MAX_NAME_PATTERNS):
            if not isinstance(names, dict) or names.keys() != {"$ref"} or not isinstance(names["$ref"], str):
                break
            names = SchemaAnalysis(self._root).target(names["$ref"])
        checked = self._visit(names, path)
        if checked is True or "object" not in types_of(kept):
            return
        checked = {"enum": []} if checked is False else checked
        others = kept.get("additionalProperties", True)
        listed = _listed_values(checked)
        if listed is None and not checked.keys() - {"type"} and "string" in types_of(checked):
            return
        if "patternProperties" in kept or (listed is None and ("properties" in kept or "required" in kept)):
            beside = "patternProperties" if "patternProperties" in kept else "properties"
            raise _refused(path, f"propertyNames beside {beside}", "an enum of names", REFUSED["propertyNames"])
        if listed is not None:
            named = kept.get("properties", {})
            names = [name for name in listed if isinstance(name, str)]
            if len(names) > MAX_NAMES or len(names) * len(repr(others)) > MAX_NAMED_CHARS:
                raise _refused(path, f"{len(names)} names", f"at most {MAX_NAMES}, with short schemas", "give fewer")
            order = [*(name for name in named if name in names), *(name for name in names if name not in named)]
            kept["properties"] = {name: named.get(name, others) for name in order}
            kept["additionalProperties"] = False
        elif checked.keys() - {"type"} == {"pattern"}:
            kept["patternProperties"] = {checked["pattern"]: others}
            kept["additionalProperties"] = False
        else:
            kept["propertyNames"] = checked

    def _keyword(self, name: str, value: Any, path: str, schema: dict[str, Any]) -> Any:
        """Return the value of an enforced keyword of `schema`, checked."""
        if name in SCHEMAS_BY_NAME:
            if not isinstance(value, dict):
                raise _refused(path, f"a JSON {type_of(value)}", "an object with a schema for each name")
            named = {key: self._visit(inner, f"{path}/{escaped(key)}") for key, inner in value.items()}
            if name != "patternProperties":
                return named
            if len(named) > MAX_NAME_PATTERNS:
                raise _refused(path, f"{len(named)} patterns", f"at most {MAX_NAME_PATTERNS}", "join them by |")
            return {_portable_pattern(key, path): inner for key, inner in named.items()}
        if name in SCHEMA_LISTS:
            if not isinstance(value, list) or not value:
                raise _refused(path, f"a JSON {type_of(value)}", "a list with at least one schema")
            return [self._visit(inner, f"{path}/{index}") for index, inner in enumerate(value)]
        if name in SCHEMAS:
            if isinstance(value, list):
                raise _refused(path, "a list of schemas", "one schema", "give the list as prefixItems")
            return self._visit(value, path)
        if name in COUNTS:
            if not _is_integer(value) or not 0 <= value <= MAX_COUNT:
                raise _refused(path, _number_shown(value), f"an integer from 0 to {MAX_COUNT}")
            return int(value)
        if name in NUMBERS:
            if not is_json_number(value) or (name == "multipleOf" and value <= 0):
                raise _refused(path, _number_shown(value), "a number > 0" if name == "multipleOf" else "a number")
            if name == "multipleOf" and value > MAX_MULTIPLE:
                raise _refused(path, _number_shown(value), f"at most {MAX_MULTIPLE}")
            _check_exact(value, path)
            return value
        if name in ("const", "enum"):
            if name == "enum" and (not isinstance(value, list) or not value):
                raise _refused(path, f"a JSON {type_of(value)}", "a list with at least one value")
            _check_exact(value, path)
            return value
        return self._text(name, value, path, schema)

    def _text(self, name: str, value: Any, path: str, schema: dict[str, Any]) -> Any:
        """Return the value of `type`, `required`, `pattern`, `format` or `$ref`, checked."""
        if name in ("type", "required"):
            names = [value] if name == "type" and isinstance(value, str) else value
            is_list = isinstance(names, list) and all(isinstance(one, str) for one in names)
            if not is_list or (name == "type" and not names):
                raise _refused(path, f"a JSON {type_of(value)}", "a list of names")
            if name == "type" and (unknown := [one for one in names if one not in TYPES]):
                near = nearest(unknown[0][:60], TYPES)
                raise _refused(path, "another type", ", ".join(TYPES), f"did you mean {near}?" if near else "")
            return value
        if not isinstance(value, str):
            raise _refused(path, f"a JSON {type_of(value)}", "a string")
        if name == "pattern":
            return _portable_pattern(without_look_ahead(value), path)
        if name == "format":
            return value
        self._refs.append((path, value))
        return value

    def _check_other(self, name: str, value: Any, path: str) -> None:
        """Raise InvalidRequestError for a keyword that is not enforced, unless it says nothing of what is valid."""
        if name in ANNOTATIONS or (name == "$id" and path == "#/$id"):
            return
        if name == "propertyNames" or (name == "nullable" and value is False):
            return  # `_visit` looks at them.
        if name == "uniqueItems" and isinstance(value, bool):
            return
        if name == "$schema":
            if not isinstance(value, str) or not any(draft in value for draft in DRAFTS):
                raise _refused(path, "another draft", ", ".join(DRAFTS))
            return
        if name.startswith("x-") and name not in REFUSED:
            return
        if name in REFUSED or name in ("uniqueItems", "$id"):
            raise _refused(path, f"{name}, which is not enforced", SEE_DOCS, REFUSED.get(name, ""))
        near = nearest(name[:60], ENFORCED)
        raise _refused(path, "an unknown keyword", SEE_DOCS, f"did you mean {near}?" if near else "")

    def _check_together(self, schema: dict[str, Any], path: str) -> None:
        """Raise InvalidRequestError for keywords that are enforced alone, and not beside each other."""
        # Names that the schema does not list may come twice, and then count once.
        num_free = schema.get("minProperties", 0) - len(set(schema.get("required", ())))
        is_open = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
        if num_free > 1 and is_open:
            allowed = "at most one property more than the required ones, since a name could come twice"
            raise _refused(f"{path}/minProperties", schema["minProperties"], allowed, "list them as required")
        num_optional = len(set(schema.get("properties", ())) - set(schema.get("required", ())))
        if num_free > 0 and "maxProperties" not in schema and num_optional > MAX_COUNTED_NAMES:
            allowed = f"at most {MAX_COUNTED_NAMES} beside minProperties"
            raise _refused(f"{path}/properties", f"{num_optional} optional names", allowed, "leave minProperties out")

    def _check_one_of(
        self, path: str, schema: dict[str, Any], discriminator: str | None, analysis: SchemaAnalysis
    ) -> None:
        """Raise InvalidRequestError unless no value can satisfy two options of a `oneOf`: it then means `anyOf`.

        Pydantic does not require a discriminator that has a default, and without it several options may hold. It is
        required here, which allows less than the schema does.
        """
        if "anyOf" in schema:
            raise _refused(f"{path}/oneOf", "oneOf beside anyOf", "one of them", "put one of them into allOf")
        both = analysis.overlapping_options(schema["oneOf"])
        if both is not None and discriminator is not None:
            both = analysis.overlapping_options(schema["oneOf"], (discriminator,))
            schema["required"] = [*schema.get("required", ()), discriminator]
        if both is not None:
            got = f"options {both[0]} and {both[1]}, which may hold at once"
            allowed = "options that differ by type, or by the const of a required property"
            raise _refused(f"{path}/oneOf", got, allowed, "give anyOf")


def _forbid(schema: Any, references: set[str]) -> None:
    """Write false for each schema within one that is one of these references, which no value satisfies."""
    if not isinstance(schema, dict):
        return

    def forbidden(inner: Any) -> Any:
        _forbid(inner, references)
        return False if isinstance(inner, dict) and inner.get("$ref") in references else inner

    for name, value in schema.items():
        if name in SCHEMAS_BY_NAME:
            schema[name] = {key: forbidden(inner) for key, inner in value.items()}
        elif name in SCHEMA_LISTS:
            schema[name] = list(map(forbidden, value))
        elif name in SCHEMAS:
            schema[name] = forbidden(value)


def _listed_values(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values of a schema that lists them by `enum`, `const`, or an `anyOf` of these; None for others."""
    if "anyOf" in schema and schema.keys() <= {"anyOf", "type"}:
        lists = [values_of(option) if isinstance(option, dict) else None for option in schema["anyOf"]]
        return None if None in lists else [value for values in lists for value in values or ()]
    return values_of(schema) if schema.keys() <= {"const", "enum", "type"} else None


def _portable_pattern(pattern: str, path: str) -> str:
    """Return a pattern in Rust's dialect; raise InvalidRequestError if dialects read it differently."""
    if (num_bytes := len(pattern.encode(errors="replace"))) > MAX_REGEX_BYTES:
        raise _refused(path, f"a pattern of {num_bytes} bytes", f"at most {MAX_REGEX_BYTES}")
    try:
        return portable_regex(pattern)
    except Unfit as unfit:
        raise _refused(path, unfit.got, unfit.allowed, unfit.way_out) from None


def _check_exact(value: Any, path: str) -> None:
    """Raise InvalidRequestError if a JSON value holds an integer of too many digits, or a number that is not finite."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_exact(inner, f"{path}/{escaped(key)}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_exact(inner, f"{path}/{index}")
    elif is_json_number(value) and (abs(value) >= MAX_INTEGER if isinstance(value, int) else not math.isfinite(value)):
        raise _refused(path, _number_shown(value), "a finite number, an integer of at most 40 digits")


def _is_integer(value: Any) -> bool:
    """Return whether a JSON value is an integer; 2.0 is one."""
    return is_json_number(value) and (isinstance(value, int) or value.is_integer())


def _number_shown(value: Any) -> str:
    return told(value) if is_json_number(value) else f"a JSON {type_of(value)}"


def _refused(path: str, got: object, allowed: str, way_out: str = "") -> JpagedError:
    """Return the error for a part of a schema."""
    return refusal("json", f"{got} at {path[:500]}", allowed, way_out)
